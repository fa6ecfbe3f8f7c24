{{/* What the pods of Ray have in common. Each takes (dict "root" $ "group" GROUP "name" NAME). */}}

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

{{/* All that a Ray container's environment has; KubeRay adds Ray's token. */}}
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
# Ray would wait until Serve has moved what runs on the node, for up to 30 s: all of a pod's grace. Routers and
# workers have handed over what they had before Ray gets the signal, and Serve's controller on the head stays there.
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

{{/* Routers read the tokenizer, workers all of it. */}}
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

{{/* Routers alone ask who comes. A directory is mounted, not a file: that one would never change. */}}
{{- define "everlift.hasAccess" -}}
{{- if and (eq .name "router") .root.Values.access.existingSecret }}true{{ end -}}
{{- end -}}

{{/* The root file system is read-only: these are what is written to, and what is read. */}}
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
Takes "extra", the rest of the container, "token", whether the pod speaks to Kubernetes, "grace", the seconds
in which it has to end, and of a group of several pods "replicas", how many there are at first.
*/}}
{{- define "everlift.podTemplate" -}}
metadata:
  labels:
    {{- include "everlift.podLabels" . | nindent 4 }}
    {{- with merge (deepCopy (.group.podLabels | default dict)) .root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Another model is another ledger, and so another Ray cluster, not other settings in this one.
    everlift/ledger: {{ include "everlift.keyPrefix" .root | quote }}
    {{- if and (hasKey . "replicas") (not (include "everlift.autoscales" .root)) }}
    # KubeRay tells a Ray cluster that runs nothing of another number of pods: it makes another one by this.
    everlift/replicas: {{ .replicas | quote }}
    {{- end }}
    {{- with .group.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: {{ .token }}
  # A Service named everlift would otherwise set EVERLIFT_PORT, which is no setting.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace }}
  {{- if and (hasKey . "replicas") (include "everlift.autoscales" .root) }}
  # Ray's autoscaler ends Ray in a pod that is to go: started again there, it would be a node that stays.
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

{{/* Whether Ray's process on a node lives. It does so for ten minutes without the head. */}}
{{- define "everlift.rayletProbe" -}}
httpGet: {path: /api/local_raylet_healthz, port: 52365}
periodSeconds: 5
timeoutSeconds: 2
failureThreshold: {{ . }}
{{- end -}}
