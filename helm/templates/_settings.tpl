{{/* Everlift's settings, and checks of the chart's values. */}}

{{- define "everlift.check" -}}
{{- range $path, $value := .Files.Get "files/chart_settings.yaml" | fromYaml -}}
  {{- $section := $.Values.config -}}
  {{- $keys := splitList "." $path -}}
  {{- range initial $keys }}{{ $section = get $section . | default dict }}{{ end -}}
  {{- if hasKey $section (last $keys) -}}
    {{- fail (printf "config.%s: is set by %s" $path $value) -}}
  {{- end -}}
{{- end -}}
{{- range $name, $model := .Values.models -}}
  {{- range $path, $value := $.Files.Get "files/chart_settings.yaml" | fromYaml -}}
    {{- $section := $model.config | default dict -}}
    {{- $keys := splitList "." $path -}}
    {{- range initial $keys }}{{ $section = get $section . | default dict }}{{ end -}}
    {{- if hasKey $section (last $keys) -}}
      {{- $source := regexReplaceAll "^(workers|model)\\." $value (printf "models.%s.${1}." $name) -}}
      {{- fail (printf "models.%s.config.%s: is set by %s" $name $path (replace ".model." "." $source)) -}}
    {{- end -}}
  {{- end -}}
  {{- if and $model.revision (hasPrefix "/" $model.name) -}}
    {{- fail (printf "models.%s.revision: is for a hub id (org/name) in models.%s.name" $name $name) -}}
  {{- end -}}
{{- end -}}
{{- $names := list "routers" -}}
{{- $pods := dict "routers" .Values.routers "head" .Values.head -}}
{{- range $workers := include "everlift.workers" . | fromYaml -}}
  {{- $section := .model | empty | ternary "workers" (printf "models.%s.workers" .model) -}}
  {{- $_ := set $pods $section . -}}
  {{- if lt (int .max) (max 1 (int .min)) -}}
    {{- fail (printf "%s.max (%v) must be at least %s.min (%v) and 1" $section .max $section .min) -}}
  {{- end -}}
  {{- if mod (int .tensorParallel) (int .nodesPerWorker) -}}
    {{- fail (printf "%s.nodesPerWorker (%v) must divide %s.tensorParallel (%v)" $section .nodesPerWorker $section .tensorParallel) -}}
  {{- end -}}
  {{- $groups := .groups | default (list (dict "name" (.model | empty | ternary "workers" (print "workers-" .model)))) -}}
  {{- $total := 0 -}}
  {{- range $groups -}}
    {{- if has .name $names -}}
      {{- fail (printf "%s.groups: the name %s is already used by another group of pods" $section .name) -}}
    {{- end -}}
    {{- $names = append $names .name -}}
    {{- $total = add $total (.pods | default 0) -}}
    {{- if and (include "everlift.autoscales" $) (hasKey . "pods") -}}
      {{- fail (printf "%s.groups: %s: pods is only for a fixed number of workers; set maxPods to limit the group" $section .name) -}}
    {{- end -}}
  {{- end -}}
  {{- $needed := mul (int .nodesPerWorker) (include "everlift.firstWorkers" . | int) -}}
  {{- if and .groups (not (include "everlift.autoscales" $)) (ne (int $total) (int $needed)) -}}
    {{- fail (printf "%s.groups: the groups have %d pods in total, but the workers need %d" $section $total $needed) -}}
  {{- end -}}
{{- end -}}
{{- range $section, $group := $pods -}}
  {{- range $field := list "containers" "volumes" "securityContext" "serviceAccountName" "terminationGracePeriodSeconds" -}}
    {{- if hasKey ($group.podSpec | default dict) $field -}}
      {{- fail (printf "%s.podSpec.%s: is set by the chart" $section $field) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- with .Values.model.cache -}}
  {{- if gt (len (compact (list .size .existingClaim .hostPath))) 1 -}}
    {{- fail "model.cache: set one of size, existingClaim and hostPath" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.model -}}
  {{- if and .volume.persistentVolumeClaim .volume.image -}}
    {{- fail "model.volume: set persistentVolumeClaim or image, not both" -}}
  {{- end -}}
  {{- if and (or .volume.persistentVolumeClaim .volume.image) (not .name) -}}
    {{- fail "model.name: must be set with model.volume; else the image's demo model is served" -}}
  {{- end -}}
  {{- if and .revision (or (not .name) (hasPrefix "/" .name)) -}}
    {{- fail "model.revision: is for a hub id (org/name) in model.name" -}}
  {{- end -}}
{{- end -}}
{{- range .Values.env -}}
  {{- if hasPrefix "EVERLIFT_" (toString .name) -}}
    {{- fail (printf "env: %s: settings are not read from the environment under Serve; set them in config" .name) -}}
  {{- end -}}
{{- end -}}
{{- with .Values.service -}}
  {{- if eq (int .port) (int .httpPort) -}}
    {{- fail (printf "service.httpPort (%v) must be another port than service.port" .httpPort) -}}
  {{- end -}}
{{- end -}}
{{- /* Ports in use in a router's pod: the router's own, and Ray's for metrics (8080) and health (52365). */ -}}
{{- $taken := append (values (include "everlift.routerPorts" . | fromYaml)) 8080 | concat (list 52365) -}}
{{- range $taken -}}
  {{- if eq (int .) (int $.Values.monitoring.port) -}}
    {{- fail (printf "monitoring.port: %v is already used in a router's pod" .) -}}
  {{- end -}}
{{- end -}}
{{- with .Values.access -}}
  {{- if and (eq .mode "file") (not .existingSecret) -}}
    {{- fail "access.existingSecret: must be set with access.mode file" -}}
  {{- else if and (ne .mode "file") .existingSecret -}}
    {{- fail "access.existingSecret: is for access.mode file" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.ledger -}}
  {{- if .embedded.enabled -}}
    {{- if .external.existingSecret -}}
      {{- fail "ledger.external.existingSecret: set ledger.embedded.enabled to false with it" -}}
    {{- end -}}
    {{- if .tls.existingSecret -}}
      {{- fail "ledger.tls: is for ledger.external; the chart's own server has no TLS" -}}
    {{- end -}}
    {{- if eq .durabilityClass "replicated" -}}
      {{- fail "ledger.durabilityClass: the chart's own server has no replica; replicated needs ledger.external" -}}
    {{- end -}}
    {{- with dig "limits" "memory" nil .embedded.resources -}}
      {{- $most := include "everlift.mebibytes" . -}}
      {{- if and $most (le (int64 $most) (int64 $.Values.ledger.embedded.maxMemoryMiB)) -}}
        {{- fail (printf "ledger.embedded.resources.limits.memory (%v) must be above ledger.embedded.maxMemoryMiB (%v)"
              . (int64 $.Values.ledger.embedded.maxMemoryMiB)) -}}
      {{- end -}}
    {{- end -}}
  {{- else if not .external.existingSecret -}}
    {{- fail "ledger.external.existingSecret: must be set if ledger.embedded.enabled is false" -}}
  {{- end -}}
  {{- if and .tls.clientCertificate (not .tls.existingSecret) -}}
    {{- fail "ledger.tls.existingSecret: must be set with ledger.tls.clientCertificate" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.gcsFaultTolerance -}}
  {{- if and .enabled (not $.Values.ledger.embedded.enabled) (not .redisAddress) -}}
    {{- fail "gcsFaultTolerance.redisAddress: must be set with ledger.external, or gcsFaultTolerance.enabled to false" -}}
  {{- end -}}
  {{- if and $.Values.ledger.embedded.enabled (or .redisAddress .existingSecret .usernameKey) -}}
    {{- fail "gcsFaultTolerance: redisAddress, existingSecret and usernameKey are for ledger.external" -}}
  {{- end -}}
  {{- if and .usernameKey (not .existingSecret) -}}
    {{- fail "gcsFaultTolerance.existingSecret: must be set with gcsFaultTolerance.usernameKey" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.tls.clients -}}
  {{- if and .mutual (not .existingSecret) -}}
    {{- fail "tls.clients.existingSecret: must be set with tls.clients.mutual" -}}
  {{- end -}}
  {{- if and .testSecret (not .mutual) -}}
    {{- fail "tls.clients.mutual: must be set with tls.clients.testSecret" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.ingress -}}
  {{- if and .enabled (not .host) -}}
    {{- fail "ingress.host: must be set with ingress.enabled" -}}
  {{- end -}}
  {{- if and .http.enabled (not .http.host) -}}
    {{- fail "ingress.http.host: must be set with ingress.http.enabled" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.gateway -}}
  {{- if and .enabled (not .parentRefs) -}}
    {{- fail "gateway.parentRefs: must be set with gateway.enabled" -}}
  {{- end -}}
  {{- if and .http.enabled (not (or .parentRefs .http.parentRefs)) -}}
    {{- fail "gateway.http.parentRefs: must be set with gateway.http.enabled" -}}
  {{- end -}}
  {{- if and .enabled .http.enabled (include "everlift.routesClash" .) -}}
    {{- fail "gateway.http.hostnames: a Gateway accepts only one of GRPCRoute and HTTPRoute for a hostname on a listener; set hostnames that gateway.hostnames does not have, or another listener (sectionName) in gateway.http.parentRefs" -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/*
Prefix of the ledger's keys. Clusters on one ledger must serve the same models in the same way, so the prefix contains
a hash of all values that determine the models. A value that is set to its default results in the same hash.
*/}}
{{- define "everlift.keyPrefix" -}}
{{- $worker := dig "worker" dict .Values.config | default dict -}}
{{- $model := .Values.model -}}
{{- $decides := list .Release.Namespace $model.name $model.revision
      $model.volume.persistentVolumeClaim $model.volume.image -}}
{{- range $name, $default := .Files.Get "files/model_defaults.yaml" | fromYaml -}}
  {{- $decides = append $decides (hasKey $worker $name | ternary (get $worker $name) $default) -}}
{{- end -}}
{{- range $name, $more := .Values.models -}}
  {{- $own := mergeOverwrite (deepCopy $worker) (dig "config" "worker" dict $more | default dict) -}}
  {{- $decides = concat $decides (list $name $more.name ($more.revision | default "")) -}}
  {{- range $setting, $default := $.Files.Get "files/model_defaults.yaml" | fromYaml -}}
    {{- $decides = append $decides (hasKey $own $setting | ternary (get $own $setting) $default) -}}
  {{- end -}}
{{- end -}}
{{ include "everlift.fullname" . }}-{{ $decides | toJson | sha256sum | trunc 8 }}
{{- end -}}

{{/*
Key in the ledger that names the Ray cluster which serves clients, across changes of the model. It begins with the
release's name, because the ledger's user may only access such keys.
*/}}
{{- define "everlift.activeKey" -}}
{{ include "everlift.fullname" . }}-{{ .Release.Namespace | sha256sum | trunc 8 }}-active
{{- end -}}

{{/* Settings of the workers of a model that follow from their values. Takes these. */}}
{{- define "everlift.workerSettings" -}}
nodes_per_worker: {{ int .nodesPerWorker }}
worker_resource: {{ include "everlift.workerResource" . }}
worker: {tensor_parallel: {{ int .tensorParallel }}}
{{- if include "everlift.workersScale" . }}
autoscale: {min_workers: {{ int .min }}, max_workers: {{ int .max }}}
{{- else }}
num_workers: {{ include "everlift.firstWorkers" . }}
{{- end }}
{{- end -}}

{{/*
Name of a model for clients, by which the policy of its workers finds its load. Takes the name in the settings, "" for
the image's demo model.
*/}}
{{- define "everlift.clientName" -}}
{{- $isHubId := and (regexMatch "^[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*$" .) (not (hasSuffix ".gguf" .)) -}}
{{ $isHubId | ternary . (. | default "demo_model" | base | trimSuffix ".gguf") }}
{{- end -}}

{{- define "everlift.settings" -}}
{{- $worker := dict "device" .Values.workers.device "ready_dir" (include "everlift.readyDir" .) -}}
{{- $listens := include "everlift.routerPorts" . | fromYaml -}}
{{- $router := dict "host" "0.0.0.0" "port" (int $listens.grpc)
      "http_host" "0.0.0.0" "http_port" (int $listens.http)
      "metrics_host" "0.0.0.0" "metrics_port" (int .Values.monitoring.port) -}}
{{- if ne .Values.access.mode "off" -}}
  {{- $_ := set $router "access" .Values.access.mode -}}
{{- end -}}
{{- if .Values.access.existingSecret -}}
  {{- $_ := set $router "access_file" (printf "/etc/everlift/access/%s" .Values.access.key) -}}
{{- end -}}
{{- $ledger := dict "key_prefix" (include "everlift.keyPrefix" .)
      "active_key" (include "everlift.activeKey" .)
      "durability_class" .Values.ledger.durabilityClass -}}
{{- if .Values.ledger.tls.existingSecret -}}
  {{- $_ := set $ledger "tls_ca" "/etc/everlift/ledger-tls/ca.crt" -}}
  {{- if .Values.ledger.tls.clientCertificate -}}
    {{- $_ := set $ledger "tls_cert" "/etc/everlift/ledger-tls/tls.crt" -}}
    {{- $_ := set $ledger "tls_key" "/etc/everlift/ledger-tls/tls.key" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.tls.clients -}}
  {{- if .existingSecret -}}
    {{- $_ := set $router "tls_cert" "/etc/everlift/clients-tls/tls.crt" -}}
    {{- $_ := set $router "tls_key" "/etc/everlift/clients-tls/tls.key" -}}
  {{- end -}}
  {{- if .mutual -}}
    {{- $_ := set $router "tls_client_ca" "/etc/everlift/clients-tls/ca.crt" -}}
  {{- end -}}
{{- end -}}
{{- $settings := dict "num_routers" (int .Values.routers.replicas) "router_resource" "everlift_router"
      "state_dir" "/home/everlift/state"
      "router" $router "worker" $worker "ledger" $ledger -}}
{{- $settings = mergeOverwrite $settings (include "everlift.workerSettings" .Values.workers | fromYaml) -}}
{{- if include "everlift.routersScale" . -}}
  {{- $settings = mergeOverwrite $settings (dict "autoscale" (dict "max_routers" (int .Values.routers.max))) -}}
{{- end -}}
{{- $models := dict -}}
{{- range include "everlift.workers" . | fromYaml -}}
  {{- if .model -}}
    {{- $model := get $.Values.models .model -}}
    {{- $own := include "everlift.workerSettings" . | fromYaml -}}
    {{- $_ := set $own "model" $model.name -}}
    {{- if $model.revision }}{{ $_ := set $own "model_revision" $model.revision }}{{ end -}}
    {{- $_ := set $models .model (mergeOverwrite (deepCopy ($model.config | default dict)) $own) -}}
  {{- end -}}
{{- end -}}
{{- if $models }}{{ $_ := set $settings "models" $models }}{{ end -}}
{{- with .Values.tls.internal -}}
  {{- if .existingSecret -}}
    {{- $directory := "/etc/everlift/internal-tls" -}}
    {{- $_ := set $settings "internal_tls" (dict "ca" (print $directory "/ca.crt")
          "cert" (print $directory "/tls.crt") "key" (print $directory "/tls.key") "name" .name) -}}
  {{- end -}}
{{- end -}}
{{- if .Values.model.name -}}
  {{- $_ := set $settings "model" .Values.model.name -}}
{{- end -}}
{{- if .Values.model.revision -}}
  {{- $_ := set $settings "model_revision" .Values.model.revision -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.config) $settings | toYaml -}}
{{- end -}}

{{/*
Args of the Serve application. Serve restarts all actors when one of them changes. The settings that change without a
restart (files/run_time_settings.yaml) are therefore in `deployments` instead (cluster/ray/deployments.py).
*/}}
{{- define "everlift.args" -}}
{{- $args := include "everlift.settings" . | fromYaml -}}
{{- range $path := (.Files.Get "files/run_time_settings.yaml" | fromYaml).settings -}}
  {{- $keys := splitList "." $path -}}
  {{- $sections := list $args -}}
  {{- if hasPrefix "models.*." $path }}{{ $sections = values ($args.models | default dict) }}{{ $keys = slice $keys 2 }}{{ end -}}
  {{- range $section := $sections -}}
    {{- range initial $keys }}{{ $section = get $section . | default dict }}{{ end -}}
    {{- $_ := unset $section (last $keys) -}}
  {{- end -}}
{{- end -}}
{{- $args | toYaml -}}
{{- end -}}

{{- define "everlift.autoscaled" -}}
autoscaling_config:
  min_replicas: {{ int .min }}
  max_replicas: {{ int .max }}
  upscale_delay_s: 0
  downscale_delay_s: 0
  policy:
    policy_function: {{ .policy }}
    policy_kwargs:
      {{- with .model }}
      model: {{ . | quote }}
      {{- end }}
      state_dir: {{ .settings.state_dir | quote }}
      ledger: {{ .settings.ledger | toJson }}
{{- end -}}

{{- define "everlift.deployments" -}}
{{- $settings := include "everlift.settings" . | fromYaml -}}
{{- $level := $settings.log_level | default "info" -}}
{{- $policy := dict -}}
{{- range $path := (.Files.Get "files/run_time_settings.yaml" | fromYaml).settings -}}
  {{- $name := trimPrefix "router." $path -}}
  {{- if and (hasPrefix "router." $path) (hasKey $settings.router $name) -}}
    {{- $_ := set $policy $name (get $settings.router $name) -}}
  {{- end -}}
{{- end -}}
{{- $workers := include "everlift.workers" . | fromYaml -}}
{{- $numbers := dict -}}
{{- $autoscale := dict -}}
{{- range $label, $_ := $workers -}}
  {{- $of := .model | empty | ternary $settings (get ($settings.models | default dict) .model) -}}
  {{- $_ := set $numbers $label (include "everlift.workersScale" . | empty | ternary $of.num_workers nil) -}}
  {{- $given := $of.autoscale | default dict -}}
  {{- if .model }}{{ $given = mergeOverwrite (omit ($settings.autoscale | default dict) "requests_per_router") $given }}{{ end -}}
  {{- $_ := set $autoscale $label (omit $given "min_workers" "max_workers" "max_routers") -}}
{{- end -}}
- name: router
  {{- if include "everlift.routersScale" . }}
  {{- include "everlift.autoscaled" (dict "settings" $settings "min" .Values.routers.replicas "max" .Values.routers.max
        "policy" "cluster.autoscale.router_policy:RouterPolicy") | nindent 2 }}
  {{- else }}
  num_replicas: {{ int .Values.routers.replicas }}
  {{- end }}
  user_config:
    log_level: {{ $level }}
    num_workers: {{ $numbers | toJson }}
    router: {{ $policy | toJson }}
    autoscale: {{ $autoscale | toJson }}
{{- range $label, $_ := $workers }}
- name: {{ $label }}
  user_config:
    log_level: {{ $level }}
  {{- if include "everlift.workersScale" . }}
  {{- $name := .model | empty | ternary $.Values.model.name (dig .model "name" "" $.Values.models) }}
  {{- include "everlift.autoscaled" (dict "settings" $settings "min" .min "max" .max
        "model" (include "everlift.clientName" $name)
        "policy" "cluster.autoscale.serve_policy:QueuePolicy") | nindent 2 }}
  {{- else }}
  num_replicas: {{ include "everlift.firstWorkers" . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/*
Options with which `everlift key`, run in a router's pod, uses the release's ledger; the pod's environment has its URL.
*/}}
{{- define "everlift.accessOptions" -}}
{{- $settings := include "everlift.settings" . | fromYaml -}}
--set router.access=ledger
{{- range $name := list "key_prefix" "durability_class" "shards" "tls_ca" "tls_cert" "tls_key" -}}
  {{- if hasKey $settings.ledger $name }} --set ledger.{{ $name }}={{ get $settings.ledger $name }}{{ end -}}
{{- end -}}
{{- end -}}
