{{/* Fields in which the containers of Ray's pods differ: ports, probes and preStop hooks. */}}

{{- define "everlift.headContainer" -}}
ports:
  - {name: gcs-server, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  # Port on which Ray exports its metrics, as KubeRay configures it.
  - {name: metrics, containerPort: 8080}
readinessProbe:
  httpGet: {path: /api/gcs_healthz, port: dashboard}
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: 10
livenessProbe:
  initialDelaySeconds: 30
  {{- include "everlift.rayletProbe" 24 | nindent 2 }}
{{- end -}}

{{/*
The pod is ready when its router accepts new requests. The kubelet cannot probe gRPC over TLS, so it probes the metrics
port, which has no TLS. The liveness probe checks Ray and not the router, because Serve starts the router later, checks
its health and restarts it.
*/}}
{{- define "everlift.routerContainer" -}}
{{- $listens := include "everlift.routerPorts" . | fromYaml -}}
ports:
  - {name: serve, containerPort: {{ int $listens.grpc }}}
  - {name: http, containerPort: {{ int $listens.http }}}
  - {name: router-metrics, containerPort: {{ .Values.monitoring.port }}}
readinessProbe:
  httpGet: {path: /ready, port: router-metrics}
  periodSeconds: 2
  failureThreshold: 2
livenessProbe:
  initialDelaySeconds: 30
  {{- include "everlift.rayletProbe" 24 | nindent 2 }}
lifecycle:
  # For the first 5 seconds the router still accepts requests, until the Service no longer routes to this pod.
  {{- $atMost := include "everlift.routerDrain" . | int | add 10 -}}
  {{- include "everlift.leave" (dict "root" . "before" 5 "atMost" $atMost) | nindent 2 }}
{{- end -}}

{{/* Directory in which each rank keeps a file while it serves (worker.ready_dir). */}}
{{- define "everlift.readyDir" -}}
/tmp/everlift-ready
{{- end -}}

{{/* The pod is ready when one of its ranks serves, that is, has loaded the model. */}}
{{- define "everlift.workerContainer" -}}
readinessProbe:
  exec:
    # A file is named after its rank's process id. The process is checked, because a killed rank leaves its file.
    command:
      - bash
      - -c
      - for file in {{ include "everlift.readyDir" . }}/*; do kill -0 "${file##*/}" && exit; done; exit 1
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  initialDelaySeconds: 30
  {{- include "everlift.rayletProbe" 24 | nindent 2 }}
lifecycle:
  {{- include "everlift.leave" (dict "root" . "before" 0 "atMost" 3) | nindent 2 }}
{{- end -}}

{{/* preStop hook. Takes (dict "root" $ "before" SECONDS "atMost" SECONDS): the two arguments of files/leave.sh. */}}
{{- define "everlift.leave" -}}
preStop:
  exec:
    command:
      - bash
      - -c
      - |
        {{- .root.Files.Get "files/leave.sh" | trim | nindent 8 }}
      - leave
      - {{ .before | quote }}
      - {{ .atMost | quote }}
{{- end -}}

{{/* Seconds, rounded up, for which a stopping router lets its streams finish (router.drain). */}}
{{- define "everlift.routerDrain" -}}
{{- $router := dig "router" dict .Values.config | default dict -}}
{{- $drain := (.Files.Get "files/router_defaults.yaml" | fromYaml).drain -}}
{{ hasKey $router "drain" | ternary $router.drain $drain | ceil | int }}
{{- end -}}

{{- define "everlift.workerResources" -}}
{{- $resources := deepCopy .group.resources -}}
{{- if eq .root.Values.workers.device "cuda" -}}
  {{- $gpus := dict .group.gpuResource (include "everlift.ranksPerPod" .group | int) -}}
  {{- $resources = mergeOverwrite $resources (dict "limits" $gpus "requests" $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
