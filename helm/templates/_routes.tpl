{{/* What leads from outside to the routers. */}}

{{/* Clients need no other: Admin and Chaos stay inside. */}}
{{- define "everlift.services" -}}
[everlift.v1.Inference, inference.GRPCInferenceService, grpc.health.v1.Health]
{{- end -}}

{{/* The same over HTTP: /metrics stays inside. */}}
{{- define "everlift.paths" -}}
[/v1, /tokenize, /detokenize, /health, /openapi.json]
{{- end -}}

{{/* An Ingress: root, its name, the Service's port, the paths that lead there, and what values say of it. */}}
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
