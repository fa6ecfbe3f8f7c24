{{/* Common parts of Ray's pods. Templates take (dict "root" $ "group" GROUP "name" NAME) unless stated otherwise. */}}

{{- define "everlift.podLabels" -}}
{{ include "everlift.selectorLabels" .root }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "everlift.podSpread" -}}
{{- $constraints := list -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (include "everlift.podLabels" . | fromYaml)) -}}
{{- range .group.topologySpreadConstraints -}}
  {{- $constraints = append $constraints (merge (deepCopy .) $selector) -}}
{{- end -}}
{{- $constraints | toYaml -}}
{{- end -}}

{{- define "everlift.podPlacement" -}}
{{- with .group.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .group.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- include "everlift.podSpread" . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Environment of a Ray container; KubeRay adds Ray's token. Takes $. */}}
{{- define "everlift.env" -}}
{{- if .Values.ledger.embedded.enabled }}
- name: LEDGER_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "everlift.ledgerSecret" . | quote }}, key: everlift}
- name: EVERLIFT_LEDGER__URL
  value: redis://everlift:$(LEDGER_PASSWORD)@{{ include "everlift.ledgerAddress" . }}
{{- else }}
- name: EVERLIFT_LEDGER__URL
  valueFrom:
    secretKeyRef: {name: {{ .Values.ledger.external.existingSecret | quote }}, key: {{ .Values.ledger.external.key | quote }}}
{{- end }}
- {name: HOME, value: /home/everlift}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# Otherwise a stopping node would wait up to 30 s, the whole grace period of a pod, for Serve to move its actors. The wait
# is not needed: routers and workers hand over their requests before Ray receives the signal, and Serve's controller
# stays on the head.
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
{{- with .Values.model.hub }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- if include "everlift.hasCache" (dict "root" . "name" "router") }}
- {name: HF_HOME, value: /var/cache/everlift/hub}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* "true" if the pod mounts the volume with models: routers read the tokenizer, workers the whole model. */}}
{{- define "everlift.hasModels" -}}
{{- $volume := .root.Values.model.volume -}}
{{- if and (ne .name "head") (or $volume.persistentVolumeClaim $volume.image) }}true{{ end -}}
{{- end -}}

{{- define "everlift.hasCache" -}}
{{- $cache := .root.Values.model.cache -}}
{{- if and (ne .name "head") (or $cache.size $cache.existingClaim $cache.hostPath) }}true{{ end -}}
{{- end -}}

{{- define "everlift.cacheClaim" -}}
{{ default (printf "%s-models" (include "everlift.fullname" .)) .Values.model.cache.existingClaim }}
{{- end -}}

{{- define "everlift.serviceAccount" -}}
{{- with .Values.serviceAccount }}{{ .name | default (.create | ternary (include "everlift.fullname" $) "") }}{{ end -}}
{{- end -}}

{{- define "everlift.hasClientsTls" -}}
{{- if and (eq .name "router") .root.Values.tls.clients.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "everlift.hasInternalTls" -}}
{{- if and (ne .name "head") .root.Values.tls.internal.existingSecret }}true{{ end -}}
{{- end -}}

{{/*
"true" if the pod mounts the file of API keys; only routers authenticate clients. The Secret is mounted as a directory,
because a single mounted file would not be updated.
*/}}
{{- define "everlift.hasAccess" -}}
{{- if and (eq .name "router") .root.Values.access.existingSecret }}true{{ end -}}
{{- end -}}

{{/* Mounts of a Ray container. Its root file system is read-only, so writable directories are mounts, too. */}}
{{- define "everlift.volumeMounts" -}}
- {name: home, mountPath: /home/everlift}
- {name: tmp, mountPath: /tmp}
- {name: shared-memory, mountPath: /dev/shm}
{{- if include "everlift.hasModels" . }}
- {name: models, mountPath: {{ .root.Values.model.volume.mountPath | quote }}, readOnly: true}
{{- end }}
{{- if include "everlift.hasCache" . }}
- {name: hub, mountPath: /var/cache/everlift/hub}
{{- end }}
{{- with .root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- if include "everlift.hasClientsTls" . }}
- {name: clients-tls, mountPath: /etc/everlift/clients-tls, readOnly: true}
{{- end }}
{{- if include "everlift.hasInternalTls" . }}
- {name: internal-tls, mountPath: /etc/everlift/internal-tls, readOnly: true}
{{- end }}
{{- if .root.Values.ledger.tls.existingSecret }}
- {name: ledger-tls, mountPath: /etc/everlift/ledger-tls, readOnly: true}
{{- end }}
{{- if include "everlift.hasAccess" . }}
- {name: access, mountPath: /etc/everlift/access, readOnly: true}
{{- end }}
{{- end -}}

{{- define "everlift.volumes" -}}
- {name: home, emptyDir: {}}
- {name: tmp, emptyDir: {}}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ default "512Mi" .group.sharedMemory | quote }}}
{{- if include "everlift.hasCache" . }}
- name: hub
  {{- with .root.Values.model.cache.hostPath }}
  hostPath: {path: {{ . | quote }}, type: DirectoryOrCreate}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ include "everlift.cacheClaim" .root | quote }}}
  {{- end }}
{{- end }}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- if include "everlift.hasModels" . }}
- name: models
  {{- with .root.Values.model.volume }}
  {{- if .image }}
  image: {reference: {{ .image | quote }}, pullPolicy: {{ $.root.Values.image.pullPolicy }}}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ .persistentVolumeClaim | quote }}, readOnly: true}
  {{- end }}
  {{- end }}
{{- end }}
{{- if include "everlift.hasClientsTls" . }}
- name: clients-tls
  secret: {secretName: {{ .root.Values.tls.clients.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- if include "everlift.hasInternalTls" . }}
- name: internal-tls
  secret: {secretName: {{ .root.Values.tls.internal.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- if .root.Values.ledger.tls.existingSecret }}
- name: ledger-tls
  secret: {secretName: {{ .root.Values.ledger.tls.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- if include "everlift.hasAccess" . }}
- name: access
  secret: {secretName: {{ .root.Values.access.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/*
Pod template. In addition it takes "resources"; "extra": further fields of the container; "token": whether the pod gets a
token for the Kubernetes API; "grace": its termination grace period in seconds; and for a group of several pods
"replicas": their initial number.
*/}}
{{- define "everlift.podTemplate" -}}
metadata:
  labels:
    {{- include "everlift.podLabels" . | nindent 4 }}
    {{- with merge (deepCopy (.group.podLabels | default dict)) .root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Another model needs another ledger. The changed annotation makes KubeRay create another Ray cluster for it, instead
    # of changing the settings of this one.
    everlift/ledger: {{ include "everlift.keyPrefix" .root | quote }}
    {{- if and (hasKey . "replicas") (not (include "everlift.autoscales" .root)) }}
    # KubeRay does not change the number of pods of a running Ray cluster. The changed annotation makes it create
    # another Ray cluster.
    everlift/replicas: {{ .replicas | quote }}
    {{- end }}
    {{- with .group.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: {{ .token }}
  # Otherwise a Service named everlift would set the variable EVERLIFT_PORT, which is not a setting of Everlift.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace }}
  {{- if and (hasKey . "replicas") (include "everlift.autoscales" .root) }}
  # Ray's autoscaler stops Ray in a pod that it removes. If the container restarted, the pod would join again as a node.
  restartPolicy: Never
  {{- end }}
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-{{ .name }}
      image: {{ include "everlift.image" .root | quote }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      securityContext:
        {{- toYaml .root.Values.securityContext | nindent 8 }}
      env:
        {{- include "everlift.env" .root | trim | nindent 8 }}
      {{- with .root.Values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "everlift.volumeMounts" . | nindent 8 }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      {{- .extra | nindent 6 }}
  volumes:
    {{- include "everlift.volumes" . | nindent 4 }}
  {{- with include "everlift.podPlacement" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if and (ne .name "head") (include "everlift.serviceAccount" .root) }}
  serviceAccountName: {{ include "everlift.serviceAccount" .root | quote }}
  {{- end }}
  {{- with .group.podSpec }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/*
Probe of Ray's process on the node (raylet), which stays alive for ten minutes without the head. Takes the failure
threshold.
*/}}
{{- define "everlift.rayletProbe" -}}
httpGet: {path: /api/local_raylet_healthz, port: 52365}
periodSeconds: 5
timeoutSeconds: 2
failureThreshold: {{ . }}
{{- end -}}
