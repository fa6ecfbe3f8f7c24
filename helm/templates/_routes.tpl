{{/* Routes from outside the Kubernetes cluster to the routers. */}}

{{/* gRPC services that clients need. Admin and Chaos are not reachable from outside. */}}
{{- define "everlift.services" -}}
[everlift.v1.Inference, inference.GRPCInferenceService, grpc.health.v1.Health]
{{- end -}}

{{/* HTTP paths that clients need. /metrics is not reachable from outside. */}}
{{- define "everlift.paths" -}}
[/v1, /tokenize, /detokenize, /tokenizer_info, /health, /ping, /version, /openapi.json]
{{- end -}}

{{/*
"true" if the GRPCRoute and the HTTPRoute share a listener and a hostname. Takes .Values.gateway. A Gateway must reject
one of two such routes (gateway.networking.k8s.io/v1, GRPCRoute.spec.hostnames).
*/}}
{{- define "everlift.routesClash" -}}
{{- $clash := dict -}}
{{- $gateway := . -}}
{{- range $grpc := .parentRefs -}}
  {{- range $http := $gateway.http.parentRefs | default $gateway.parentRefs -}}
    {{- $same := and (eq $grpc.name $http.name) (eq (toString $grpc.namespace) (toString $http.namespace)) -}}
    {{- range $key := list "sectionName" "port" -}}
      {{- if and (hasKey $grpc $key) (hasKey $http $key) -}}
        {{- $same = and $same (eq (get $grpc $key | toString) (get $http $key | toString)) -}}
      {{- end -}}
    {{- end -}}
    {{- if $same -}}{{- $_ := set $clash "listener" true -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- $httpHostnames := .http.hostnames | default .hostnames -}}
{{- if or (not .hostnames) (not $httpHostnames) -}}{{- $_ := set $clash "hostname" true -}}{{- end -}}
{{- range $grpc := .hostnames -}}
  {{- range $http := $httpHostnames -}}
    {{- range $pair := list (list $grpc $http) (list $http $grpc) -}}
      {{- $wildcard := index $pair 0 | trimPrefix "*" -}}
      {{- if or (eq $grpc $http) (and (hasPrefix "*." (index $pair 0)) (hasSuffix $wildcard (index $pair 1))) -}}
        {{- $_ := set $clash "hostname" true -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and $clash.listener $clash.hostname }}true{{ end -}}
{{- end -}}

{{/*
Ingress. Takes "root", "name", "port" (name of the Service's port), "paths" (that are routed to the port) and "values"
(a section such as .Values.ingress).
*/}}
{{- define "everlift.ingress" }}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ .name | quote }}
  labels:
    {{- include "everlift.labels" .root | nindent 4 }}
  {{- with .values.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .root.Values.ingress.className }}
  ingressClassName: {{ . | quote }}
  {{- end }}
  {{- with .values.tlsSecret }}
  tls:
    - hosts: [{{ $.values.host | quote }}]
      secretName: {{ . | quote }}
  {{- end }}
  rules:
    - host: {{ .values.host | quote }}
      http:
        paths:
          {{- range .paths }}
          - path: {{ . }}
            pathType: Prefix
            backend:
              service:
                name: {{ include "everlift.fullname" $.root | quote }}
                port: {name: {{ $.port }}}
          {{- end }}
{{- end }}
