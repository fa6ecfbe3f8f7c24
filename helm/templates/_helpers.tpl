{{/* At most 40 characters, because KubeRay accepts names of up to 47, and the longest suffix of this name has 7. */}}
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
Ports on which routers listen in their pods. They are independent of the Service's ports, because a router must not
listen below 1024, and 8080 is used by Ray.
*/}}
{{- define "everlift.routerPorts" -}}
{grpc: 50051, http: 8000}
{{- end -}}

{{/* A memory quantity such as 2Gi in whole MiB; empty for unusual notations, such as 1e9 or with the unit m. */}}
{{- define "everlift.mebibytes" -}}
{{- $text := kindIs "string" . | ternary . (int64 . | toString) -}}
{{- if regexMatch "^[0-9.]+([kMGT]|[KMGT]i)?$" $text -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- divf (mulf (float64 $number) (get $units (trimPrefix $number $text))) 1048576 | int64 -}}
{{- end -}}
{{- end -}}

{{/* Value of Prometheus' label `job` for this release. */}}
{{- define "everlift.job" -}}
{{ .Release.Namespace }}/{{ include "everlift.fullname" . }}
{{- end -}}

{{/*
Workers of each model by the name of their deployment: `worker` has the values of `workers`, and `worker-NAME` those of
models.NAME.workers, which inherit the former except numbers and groups. "model" is NAME, or "" for the first model.
*/}}
{{- define "everlift.workers" -}}
{{- $all := dict "worker" (mergeOverwrite (deepCopy .Values.workers) (dict "model" "")) -}}
{{- $base := omit .Values.workers "min" "max" "nodesPerWorker" "groups" -}}
{{- range $name, $model := .Values.models -}}
  {{- $own := dict "min" 1 "max" 1 "nodesPerWorker" 1 "groups" list "model" $name -}}
  {{- $_ := set $all (printf "worker-%s" $name) (mergeOverwrite (deepCopy $base) $own (deepCopy ($model.workers | default dict))) -}}
{{- end -}}
{{- $all | toYaml -}}
{{- end -}}

{{/* "true" if the number of workers follows the queue. Takes the workers of a model, as the next three templates do. */}}
{{- define "everlift.workersScale" -}}
{{- if gt (int .max) (int .min) }}true{{ end -}}
{{- end -}}

{{/* Initial number of workers: min, or at least 1 if the number is fixed. */}}
{{- define "everlift.firstWorkers" -}}
{{ include "everlift.workersScale" . | empty | ternary 1 0 | max (int .min) }}
{{- end -}}

{{- define "everlift.ranksPerPod" -}}
{{ div (int .tensorParallel) (int .nodesPerWorker) }}
{{- end -}}

{{/* Custom Ray resource of which a pod has one for each of its ranks, so that it holds no other model's worker. */}}
{{- define "everlift.workerResource" -}}
everlift_worker{{ with .model }}_{{ . }}{{ end }}
{{- end -}}

{{/*
CPUs that Ray counts in a worker's pod: those that its ranks request, so that the pod holds one worker. Takes
(dict "root" $ "workers" WORKERS).
*/}}
{{- define "everlift.workerCpus" -}}
{{- $threads := dig "worker" "num_threads" nil .root.Values.config | default 1 -}}
{{- if .workers.model -}}
  {{- $threads = dig "config" "worker" "num_threads" nil (get .root.Values.models .workers.model) | default $threads -}}
{{- end -}}
{{ mul (include "everlift.ranksPerPod" .workers) (int $threads) }}
{{- end -}}

{{- define "everlift.routersScale" -}}
{{- if gt (int .Values.routers.max) (int .Values.routers.replicas) }}true{{ end -}}
{{- end -}}

{{/* "true" if Ray's autoscaler creates the pods of all groups, as many as Serve requests. */}}
{{- define "everlift.autoscales" -}}
{{- $scales := include "everlift.routersScale" . -}}
{{- range include "everlift.workers" . | fromYaml -}}
  {{- $scales = print $scales (include "everlift.workersScale" .) -}}
{{- end -}}
{{- if $scales }}true{{ end -}}
{{- end -}}

{{/*
Number of pods of a group. Takes (dict "root" $ "replicas" INITIAL "most" CAP). If Ray's autoscaler creates the pods,
their number is the one that Serve requests. A change of Serve's bounds takes effect at once, but the bounds of a running
Ray cluster cannot change. Therefore the group has no upper bound (KubeRay's largest number), unless "most" is set.
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
