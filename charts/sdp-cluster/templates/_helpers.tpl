{{- define "sdp.name" -}}
{{- $name := .Values.nameOverride | default .Release.Name -}}
{{- if gt (len $name) 40 -}}
{{- fail (printf "nameOverride: expected at most 40 characters, since KubeRay adds to it, got %d in %q; set a shorter one" (len $name) $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "sdp.labels" -}}
app.kubernetes.io/name: sdp
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "sdp.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "sdp.account" -}}
{{ .Values.serviceAccount.name | default (include "sdp.name" .) }}
{{- end -}}

{{/* An environment out of name: value, by name. */}}
{{- define "sdp.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* What holds for a group: its own values over groupDefaults. */}}
{{- define "sdp.group" -}}
{{- toYaml (mustMergeOverwrite (deepCopy .Values.groupDefaults) (deepCopy .group)) -}}
{{- end -}}

{{/*
Where downloads run: in groups without GPUs, if there are any; and as many workers as those may grow to, which Ray
does not know of groups that have no pod yet.
*/}}
{{- define "sdp.downloaders" -}}
{{- $cpus := int (dig "workers" "cpus" 4 .own) -}}
{{- $names := list -}}
{{- $plain := list -}}
{{- range $name, $own := .Values.groups -}}
{{- if $own -}}
{{- $group := include "sdp.group" (dict "Values" $.Values "group" $own) | fromYaml -}}
{{- $names = append $names $name -}}
{{- if and (eq (int $group.gpus) 0) (gt (int $group.maxReplicas) 0) -}}
{{- $text := toString $group.cpu -}}{{/* KubeRay tells Ray of whole CPUs, rounded up. */}}
{{- $cpu := int (ceil (hasSuffix "m" $text | ternary (divf (float64 (trimSuffix "m" $text)) 1000) (float64 $text))) -}}
{{- $plain = append $plain (dict "name" $name "cpu" $cpu "most" (int $group.maxReplicas)) -}}
{{- $cpus = min $cpus $cpu -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $workers := 0 -}}
{{- $among := list -}}
{{- range $plain -}}
{{- $workers = add $workers (mul .most (div .cpu $cpus)) -}}
{{- $among = append $among .name -}}
{{- end -}}
{{- $placed := hasKey (dig "workers" dict .own) "node_labels" -}}
{{- if and $plain (not $placed) -}}
{{- if .Values.autoscaling.enabled }}
concurrency: {{ $workers }}
{{- end }}
workers:
  cpus: {{ $cpus }}
  {{- if lt (len $plain) (len $names) }}
  node_labels: {ray.io/node-group: {{ printf "in(%s)" (join "," $among) | quote }}}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* What cannot work, said before anything is applied. */}}
{{- define "sdp.check" -}}
{{- if not .Values.storage.uri -}}
{{- fail "storage.uri: required: where datasets and runs lie, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER" -}}
{{- end -}}
{{- range $name, $own := .Values.groups -}}
{{- if $own -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$" $name) -}}
{{- fail (printf "groups.%s: expected a name of at most 20 small letters, digits and hyphens; rename it" $name) -}}
{{- end -}}
{{- $group := include "sdp.group" (dict "Values" $.Values "group" $own) | fromYaml -}}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) -}}
{{- fail (printf "groups.%s.minReplicas: expected at most maxReplicas (%d), got %d" $name (int $group.maxReplicas) (int $group.minReplicas)) -}}
{{- end -}}
{{- if ne (toString $group.replicas) "<nil>" -}}
{{- if or (lt (int $group.replicas) (int $group.minReplicas)) (gt (int $group.replicas) (int $group.maxReplicas)) -}}
{{- fail (printf "groups.%s.replicas: expected from minReplicas (%d) to maxReplicas (%d), got %d" $name (int $group.minReplicas) (int $group.maxReplicas) (int $group.replicas)) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int $group.gpus) 0) (not $group.accelerator) -}}
{{- fail (printf "groups.%s.accelerator: required where gpus is not 0: jobs place encoders and trainers by it" $name) -}}
{{- end -}}
{{- if and $group.accelerator (eq (int $group.gpus) 0) -}}
{{- fail (printf "groups.%s.gpus: expected 1 or more where accelerator is set (%s), got 0" $name $group.accelerator) -}}
{{- end -}}
{{- if and (gt (int $group.efaDevices) 0) (eq (int $group.gpus) 0) -}}
{{- fail (printf "groups.%s.efaDevices: expected 0 where there are no GPUs, got %d" $name (int $group.efaDevices)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a pod asks for, and what it may take. */}}
{{- define "sdp.resources" -}}
cpu: {{ .cpu | toString | quote }}
memory: {{ .memory }}
{{- if gt (int (default 0 .gpus)) 0 }}
nvidia.com/gpu: {{ int .gpus }}
{{- end }}
{{- if gt (int (default 0 .efaDevices)) 0 }}
vpc.amazonaws.com/efa: {{ int .efaDevices }}
{{- end }}
{{- with .hugepages2Mi }}
hugepages-2Mi: {{ . }}
{{- end }}
{{- end -}}

{{/* The one pod template: of the head and of every group. Takes root, name, is ("head" or "worker") and its settings. */}}
{{- define "sdp.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $s := .settings -}}
{{- $gpus := int (default 0 $s.gpus) -}}
{{- $efa := int (default 0 $s.efaDevices) -}}
metadata:
  labels:
    {{- include "sdp.labels" $root | nindent 4 }}
    sdp/group: {{ .name }}
    {{- with $v.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $v.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "sdp.account" $root }}{{ if eq .is "head" }}-head{{ end }}
  {{- if eq .is "head" }}
  automountServiceAccountToken: {{ $v.autoscaling.enabled }}
  {{- else }}
  automountServiceAccountToken: false
  {{- end }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ int $v.runAsUser }}
    runAsGroup: {{ int $v.runAsUser }}
    fsGroup: {{ int $v.runAsUser }}
    seccompProfile: {type: RuntimeDefault}
  {{- /* Ray as PID 1 reaps nobody: zombies would pile up, and Ray would wait for them whenever a job is stopped. */}}
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ int $s.terminationGracePeriodSeconds }}
  {{- with $s.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $s.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $s.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or $s.tolerations (gt $gpus 0) }}
  tolerations:
    {{- if gt $gpus 0 }}
    - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
    {{- end }}
    {{- with $s.tolerations }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- with $s.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- toYaml (merge (dict "labelSelector" (dict "matchLabels" (dict "ray.io/cluster" (include "sdp.name" $root) "sdp/group" $.name))) .) | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ .is }}
      image: {{ include "sdp.image" $root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: {{ $v.readOnlyRootFilesystem }}
        capabilities:
          drop: [ALL]
          {{- if gt $efa 0 }}
          add: [IPC_LOCK] # EFA pins memory
          {{- end }}
      resources:
        requests: {{- include "sdp.resources" $s | nindent 10 }}
        limits: {{- include "sdp.resources" $s | nindent 10 }}
      env:
        - {name: HOME, value: /home/ray}
        {{- if eq .is "worker" }} {{- /* trainers hear of it, and save; the last seconds are for Ray's own end */}}
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ max 1 (sub (int $s.terminationGracePeriodSeconds) 20) | quote }}}
        {{- end }}
        {{- with $v.storage.endpoint }}
        - {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
        {{- end }}
        {{- with $v.storage.region }}
        - {name: AWS_REGION, value: {{ . | quote }}}
        {{- end }}
        {{- if gt $gpus 0 }}
        - {name: TORCHINDUCTOR_CACHE_DIR, value: /tmp/torchinductor}
        - {name: TORCH_NCCL_TRACE_BUFFER_SIZE, value: "20000"}
        {{- end }}
        {{- if gt $efa 0 }}
        - {name: FI_PROVIDER, value: efa}
        - {name: FI_EFA_USE_DEVICE_RDMA, value: "1"}
        - {name: FI_EFA_FORK_SAFE, value: "1"}
        - {name: NCCL_NET, value: AWS Libfabric} # NCCL ends with an error where its plugin is not there
        - {name: NCCL_DEBUG, value: WARN}
        {{- end }}
        {{- include "sdp.env" $v.env | nindent 8 }}
        {{- include "sdp.env" $s.env | nindent 8 }}
      {{- if or $v.storage.secretName $v.envFrom }}
      envFrom:
        {{- with $v.storage.secretName }}
        - secretRef: {name: {{ . }}}
        {{- end }}
        {{- with $v.envFrom }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- end }}
      {{- if eq .is "head" }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: metrics, containerPort: 8080}
        - {name: as-metrics, containerPort: 44217} # the autoscaler's
        - {name: dash-metrics, containerPort: 44227} # the dashboard's
      {{- else }}
      ports:
        - {name: metrics, containerPort: 8080}
      {{- end }}
      volumeMounts:
        - {name: shared-mem, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/ray}
        - {name: jobs, mountPath: /etc/sdp/jobs, readOnly: true}
        {{- if $s.hugepages2Mi }}
        - {name: hugepages, mountPath: /dev/hugepages}
        {{- end }}
        {{- with $v.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
        {{- with $s.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - {name: shared-mem, emptyDir: {medium: Memory, sizeLimit: {{ $s.shmSize }}}}
    - {name: tmp, emptyDir: {}}
    - {name: home, emptyDir: {}}
    - {name: jobs, configMap: {name: {{ include "sdp.name" $root }}-jobs}}
    {{- if $s.hugepages2Mi }}
    - {name: hugepages, emptyDir: {medium: HugePages}}
    {{- end }}
    {{- with $v.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- with $s.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}
