{{/* What sets the containers of Ray's pods apart: ports, probes, and what happens before they stop. */}}

{{- define "everlift.headContainer" -}}
ports:
  - {name: gcs-server, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  # Where KubeRay has Ray export its metrics.
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
Ready when a router there takes new requests. The kubelet speaks no gRPC over TLS: it asks where metrics are, which
have none. A pod is alive before it has one: Serve places it, asks after its health
and starts another, and the kubelet asks after Ray.
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
  # It takes new requests until the Service has forgotten it.
  {{- $atMost := include "everlift.routerDrain" . | int | add 10 -}}
  {{- include "everlift.leave" (dict "root" . "before" 5 "atMost" $atMost) | nindent 2 }}
{{- end -}}

{{/* Where each rank keeps a file while it serves (worker.ready_dir). */}}
{{- define "everlift.readyDir" -}}
/tmp/everlift-ready
{{- end -}}

{{/* Ready when a rank there serves, and so its model is loaded. */}}
{{- define "everlift.workerContainer" -}}
readinessProbe:
  exec:
    # A rank that was killed leaves its file, which is named after its process.
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

{{/* Takes (dict "root" $ "before" SECONDS "atMost" SECONDS), as the script does. */}}
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

{{/* Whole seconds for which a router that stops lets its streams finish. */}}
{{- define "everlift.routerDrain" -}}
{{- $router := dig "router" dict .Values.config | default dict -}}
{{- $drain := (.Files.Get "files/router_defaults.yaml" | fromYaml).drain -}}
{{ hasKey $router "drain" | ternary $router.drain $drain | ceil | int }}
{{- end -}}

{{- define "everlift.workerResources" -}}
{{- $resources := deepCopy .group.resources -}}
{{- if eq .root.Values.workers.device "cuda" -}}
  {{- $gpus := dict .group.gpuResource (include "everlift.ranksPerPod" .root | int) -}}
  {{- $resources = mergeOverwrite $resources (dict "limits" $gpus "requests" $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
