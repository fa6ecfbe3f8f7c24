{{/* KubeRay takes names of up to 47 characters; the longest that is made of this one adds 7. */}}
{{- define "everlift.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "everlift.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "everlift.labels" -}}
{{ include "everlift.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "everlift.image" -}}
{{- $variant := eq .Values.workers.device "cpu" | ternary "-cpu" "" -}}
{{ .Values.image.repository }}:{{ default (print .Chart.AppVersion $variant) .Values.image.tag }}
{{- end -}}

{{- define "everlift.ledgerSecret" -}}
{{ default (printf "%s-ledger" (include "everlift.fullname" .)) .Values.ledger.embedded.existingSecret }}
{{- end -}}

{{- define "everlift.ledgerAddress" -}}
{{ include "everlift.fullname" . }}-ledger.{{ .Release.Namespace }}.svc:6379
{{- end -}}

{{/*
Where routers listen in their pods, whatever the Service's ports are: below 1024 they may not, and 8080 is Ray's there.
*/}}
{{- define "everlift.routerPorts" -}}
{grpc: 50051, http: 8000}
{{- end -}}

{{/* A quantity of memory in whole MiB; nothing of one that is written in a way that nobody writes memory in. */}}
{{- define "everlift.mebibytes" -}}
{{- $text := kindIs "string" . | ternary . (int64 . | toString) -}}
{{- if regexMatch "^[0-9.]+([kMGT]|[KMGT]i)?$" $text -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- divf (mulf (float64 $number) (get $units (trimPrefix $number $text))) 1048576 | int64 -}}
{{- end -}}
{{- end -}}

{{/* Prometheus' job of the release. */}}
{{- define "everlift.job" -}}
{{ .Release.Namespace }}/{{ include "everlift.fullname" . }}
{{- end -}}

{{- define "everlift.workersScale" -}}
{{- if gt (int .Values.workers.max) (int .Values.workers.min) }}true{{ end -}}
{{- end -}}

{{- define "everlift.routersScale" -}}
{{- if gt (int .Values.routers.max) (int .Values.routers.replicas) }}true{{ end -}}
{{- end -}}

{{/* Whether Ray's autoscaler makes the pods: as many as Serve asks for, of all groups. */}}
{{- define "everlift.autoscales" -}}
{{- if or (include "everlift.workersScale" .) (include "everlift.routersScale" .) }}true{{ end -}}
{{- end -}}

{{/* Workers at first: where their number is fixed, one or more. */}}
{{- define "everlift.firstWorkers" -}}
{{ include "everlift.workersScale" . | empty | ternary 1 0 | max (int .Values.workers.min) }}
{{- end -}}

{{- define "everlift.ranksPerPod" -}}
{{ div (int .Values.workers.tensorParallel) (int .Values.workers.nodesPerWorker) }}
{{- end -}}

{{/* CPUs that Ray counts in a worker's pod: as many as its ranks take, so that it has room for one. */}}
{{- define "everlift.workerCpus" -}}
{{- $threads := dig "worker" "num_threads" nil .Values.config | default 1 -}}
{{ mul (include "everlift.ranksPerPod" .) (int $threads) }}
{{- end -}}

{{/*
Pods of a group, of which there are to be so many at first. Where Ray's autoscaler makes them, there are as many as
Serve asks for, whose bounds hold at once: those of a Ray cluster that runs stay what they were. So it has none, which
is KubeRay's largest number, unless the group has a cap ("most").
*/}}
{{- define "everlift.groupSize" -}}
replicas: {{ .replicas }}
{{- if include "everlift.autoscales" .root }}
minReplicas: 0
maxReplicas: {{ .most | default 2147483647 }}
{{- else }}
minReplicas: {{ .replicas }}
maxReplicas: {{ .replicas }}
{{- end }}
{{- end -}}
