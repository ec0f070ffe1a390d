{{- define "sdp-cluster.name" -}}
{{- $name := .Values.nameOverride | default .Release.Name -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$" $name) -}}
{{- fail (printf "nameOverride: expected at most 40 lower-case letters, digits and hyphens, with a letter first, as KubeRay requires, got %q; choose another name" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "sdp-cluster.labels" -}}
app.kubernetes.io/name: sdp
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "sdp-cluster.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "sdp-cluster.account" -}}
{{ .Values.serviceAccount.name | default (include "sdp-cluster.name" .) }}
{{- end -}}

{{/* Return an environment from maps of name: value, sorted by name. Later maps override earlier ones, so no name occurs twice. */}}
{{- define "sdp-cluster.env" -}}
{{- $all := dict -}}
{{- range . -}}
{{- range $name, $value := . }}{{ $_ := set $all $name $value }}{{ end -}}
{{- end -}}
{{- range $name, $value := $all }}
- name: {{ quote $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }} {{- /* keeps 8388608 from becoming 8.388608e+06 */}}
{{- end }}
{{- end -}}

{{/*
Return all groups' settings by name: each group's own values over groupDefaults, with `cpus` as a number and `most`, the
most pods that the group can have.
*/}}
{{- define "sdp-cluster.groups" -}}
{{- $groups := dict -}}
{{- range $name, $own := .Values.groups -}}
{{- if kindIs "map" $own -}}
{{- $group := mustMergeOverwrite (deepCopy $.Values.groupDefaults) (deepCopy $own) -}}
{{- if and $group.efaDevices (not $group.hugepages2Mi) }}{{ $_ := set $group "hugepages2Mi" "5120Mi" }}{{ end -}}
{{- if kindIs "invalid" $group.replicas }}{{ $_ := set $group "replicas" $group.minReplicas }}{{ end -}}
{{- $cpu := toString $group.cpu -}}
{{- $_ := set $group "cpus" (hasSuffix "m" $cpu | ternary (divf (trimSuffix "m" $cpu | float64) 1000) (float64 $cpu)) -}}
{{- $_ := set $group "most" ($.Values.autoscaling.enabled | ternary $group.maxReplicas $group.replicas) -}}
{{- $_ := set $groups $name $group -}}
{{- end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}

{{/* Not empty if any group has GPUs; the groups without GPUs then download. */}}
{{- define "sdp-cluster.has-gpus" -}}
{{- range $name, $group := include "sdp-cluster.groups" $ | fromYaml -}}
{{- if $group.gpus }}{{ $name }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Add the settings of a user to a map of the chart's: lists are appended, maps merged, other values replaced. */}}
{{- define "sdp-cluster.add" -}}
{{- $made := index . 0 -}}
{{- range $key, $value := index . 1 -}}
{{- if kindIs "map" $value -}}
{{- $value = mustMergeOverwrite (get $made $key | default dict) (deepCopy $value) -}}
{{- else if kindIs "slice" $value -}}
{{- $value = concat (get $made $key | default list) $value -}}
{{- end -}}
{{- $_ := set $made $key $value -}}
{{- end -}}
{{- end -}}

{{/* Return a pod's resources, used as both requests and limits. */}}
{{- define "sdp-cluster.resources" -}}
cpu: {{ .cpu | toString | quote }}
memory: {{ .memory }}
{{- if .gpus }}
{{ .gpuResource }}: {{ int .gpus }}
{{- end }}
{{- if .efaDevices }}
vpc.amazonaws.com/efa: {{ int .efaDevices }}
{{- end }}
{{- with .hugepages2Mi }}
hugepages-2Mi: {{ . }}
{{- end }}
{{- with .ephemeralStorage }}
ephemeral-storage: {{ . }}
{{- end }}
{{- end -}}

{{/* Return the seconds that jobs have for a last checkpoint when a pod must stop: all but those that Ray needs to end. */}}
{{- define "sdp-cluster.checkpoint-seconds" -}}
{{- max 1 (sub (int .terminationGracePeriodSeconds) 20) -}}
{{- end -}}

{{/*
Return what the queue's manager reads: labels and annotations of the RayCluster, and every pod's scheduler and annotations.
Volcano takes a pod's queue from its annotation; the label is for KubeRay's own support of Volcano.
*/}}
{{- define "sdp-cluster.queue" -}}
{{- with .Values.queue -}}
{{- if eq .manager "kueue" }}
labels: {kueue.x-k8s.io/queue-name: {{ .name }}}
{{- if $.Values.autoscaling.enabled }}
annotations: {kueue.x-k8s.io/elastic-job: "true"}
{{- end }}
{{- else if eq .manager "volcano" }}
labels: {volcano.sh/queue-name: {{ .name }}}
scheduler: volcano
podAnnotations: {scheduling.volcano.sh/queue-name: {{ .name }}}
{{- else if eq .manager "kai" }}
labels: {kai.scheduler/queue: {{ .name }}}
scheduler: kai-scheduler
{{- end }}
{{- end }}
{{- end -}}

{{/*
Return a pod's affinity: nodes with a product of its GPUs, as GPU feature discovery labels them, unless its nodeSelector names
a kind of node, or nodes without GPUs; and, with colocateBy, the group's other pods. Takes the arguments of sdp-cluster.pod.
*/}}
{{- define "sdp-cluster.affinity" -}}
{{- $s := .settings -}}
{{- $kind := pick (($s.podSpec | default dict).nodeSelector | default dict)
  "nvidia.com/gpu.product" "node.kubernetes.io/instance-type" "cloud.google.com/gke-accelerator" "cloud.google.com/gke-nodepool"
  "eks.amazonaws.com/nodegroup" "karpenter.sh/nodepool" "karpenter.k8s.aws/instance-gpu-name" "karpenter.k8s.aws/instance-family"
-}}
{{- $expression := dict "key" "nvidia.com/gpu.product" "operator" "DoesNotExist" -}}{{/* or it could keep an expensive node alive */}}
{{- if $s.gpus -}}
{{- $products := get (.root.Files.Get "products.json" | fromJson) $s.accelerator -}}
{{- $expression = dict "key" "nvidia.com/gpu.product" "operator" "In" "values" $products -}}
{{- end -}}
{{- if not (and $s.gpus $kind) }}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms: [{matchExpressions: [{{ toJson $expression }}]}]
{{- end }}
{{- with $s.colocateBy }}
podAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: {{ . }}
      labelSelector: {matchLabels: {{ include "sdp-cluster.selector" $ }}}
{{- end }}
{{- end -}}

{{/* Return the labels that select a group's pods, as JSON. Takes the arguments of sdp-cluster.pod. */}}
{{- define "sdp-cluster.selector" -}}
{{- dict "ray.io/cluster" (include "sdp-cluster.name" .root) "sdp/group" .name | toJson -}}
{{- end -}}

{{/* Return a pod's annotations from the values; a group's own override the others. Takes the arguments of sdp-cluster.pod. */}}
{{- define "sdp-cluster.annotations" -}}
{{- $queue := (include "sdp-cluster.queue" .root | fromYaml).podAnnotations | default dict -}}
{{- with merge (deepCopy (default dict .settings.annotations)) (default dict .root.Values.podAnnotations) $queue }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Return the environment that the chart sets for a pod, as name: value. Takes the arguments of sdp-cluster.pod. */}}
{{- define "sdp-cluster.own-env" -}}
{{- $v := .root.Values -}}
{{- $s := .settings -}}
HOME: /home/ray
{{- if eq .is "worker" }} {{- /* trainers are notified and save; Ray needs the last seconds to end */}}
RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S: {{ include "sdp-cluster.checkpoint-seconds" $s | quote }}
{{- end }}
{{- range $name, $value := dict "AWS_ENDPOINT_URL" $v.storage.endpoint "AWS_REGION" $v.storage.region }}
{{- if $value }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end }}
{{- if $s.gpus }}
PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True # memory that is not fragmented
TORCHINDUCTOR_CACHE_DIR: /tmp/torchinductor
TORCHINDUCTOR_COMPILE_THREADS: {{ div (int $s.cpus) (int $s.gpus) | max 1 | quote }} # each trainer compiles
TORCH_NCCL_TRACE_BUFFER_SIZE: "20000"
{{- end }}
{{- if $s.efaDevices }}
FI_PROVIDER: efa
FI_EFA_USE_DEVICE_RDMA: "1"
FI_EFA_FORK_SAFE: "1"
NCCL_NET: AWS Libfabric # NCCL ends with an error if its plugin is missing
NCCL_DEBUG: WARN
{{- end }}
{{- end -}}

{{/* Return the pod template, shared by the head and every group. Takes root, name, is ("head" or "worker") and settings. */}}
{{- define "sdp-cluster.pod" -}}
metadata:
  labels:
    {{- toYaml (merge (include "sdp-cluster.labels" .root | fromYaml) (dict "sdp/group" .name) (.root.Values.podLabels | default dict)) | nindent 4 }}
  {{- with include "sdp-cluster.annotations" . | fromYaml }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec: {{- include "sdp-cluster.pod-spec" . | nindent 2 }}
{{- end -}}

{{/* Return the autoscaler's container in the head's pod, without the settings that it rereads while it runs. */}}
{{- define "sdp-cluster.autoscaler" -}}
image: {{ include "sdp-cluster.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
resources: {{- toYaml .Values.autoscaling.resources | nindent 2 }}
{{- /* Its own user: containers of a pod share processes, and jobs in the head could otherwise read its token. */}}
{{- $own := add1 (int .Values.runAsUser) }}
securityContext: {runAsUser: {{ $own }}, allowPrivilegeEscalation: false, readOnlyRootFilesystem: {{ .Values.readOnlyRootFilesystem }}, capabilities: {drop: [ALL]}}
env:
  {{- include "sdp-cluster.env" (list (dict "HOME" "/home/ray") .Values.env) | nindent 2 }}
volumeMounts: {{- /* its own volumes, so that jobs cannot change files that it runs */}}
  - {name: autoscaler-tmp, mountPath: /tmp}
  - {name: autoscaler-home, mountPath: /home/ray}
  - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
  {{- with .Values.volumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* Return the spec of the pod template: the chart's own, with the user's podSpec and container. */}}
{{- define "sdp-cluster.pod-spec" -}}
{{- $spec := include "sdp-cluster.own-spec" . | fromYaml -}}
{{- include "sdp-cluster.add" (list (first $spec.containers) .settings.container) -}}
{{- include "sdp-cluster.add" (list $spec .settings.podSpec) -}}
{{- range $spec.topologySpreadConstraints -}}
{{- $_ := merge . (dict "labelSelector" (dict "matchLabels" (include "sdp-cluster.selector" $ | fromJson))) -}}
{{- end -}}
{{- toYaml $spec -}}
{{- end -}}

{{- define "sdp-cluster.own-spec" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $s := .settings -}}
{{- $suffix := eq .is "head" | ternary "-head" "" }}
{{- if and (eq .is "worker") (not $s.gpus) (include "sdp-cluster.has-gpus" $root) }}{{ $suffix = "-downloads" }}{{ end }}
serviceAccountName: {{ include "sdp-cluster.account" $root }}{{ $suffix }}
automountServiceAccountToken: false
{{- with $v.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $user := int $v.runAsUser }}
securityContext: {runAsNonRoot: true, runAsUser: {{ $user }}, runAsGroup: {{ $user }}, fsGroup: {{ $user }}, seccompProfile: {type: RuntimeDefault}}
{{- /* Ray as PID 1 does not reap processes: zombies would accumulate, and stopping a job would wait for them. */}}
shareProcessNamespace: true
terminationGracePeriodSeconds: {{ int $s.terminationGracePeriodSeconds }}
enableServiceLinks: false
{{- with (include "sdp-cluster.queue" $root | fromYaml).scheduler }}
schedulerName: {{ . }}
{{- end }}
{{- if and (eq .is "worker") (not $s.gpus) }} {{- /* Kubernetes' default makes five times as many queries for each host */}}
dnsConfig: {options: [{name: ndots, value: "1"}]}
{{- end }}
{{- with include "sdp-cluster.affinity" . }}
affinity: {{- . | nindent 2 }}
{{- end }}
{{- if $s.gpus }}
tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
{{- end }}
containers:
  - name: ray-{{ .is }}
    image: {{ include "sdp-cluster.image" $root }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: {{ $v.readOnlyRootFilesystem }}, capabilities: {drop: [ALL]}}
    resources:
      requests: {{- include "sdp-cluster.resources" $s | nindent 8 }}
      limits: {{- include "sdp-cluster.resources" $s | nindent 8 }}
    env:
      {{- include "sdp-cluster.env" (list (include "sdp-cluster.own-env" . | fromYaml) $v.env $s.env) | nindent 6 }}
    {{- if or $v.storage.secretName $v.envFrom }}
    envFrom:
      {{- with $v.storage.secretName }}
      - secretRef: {name: {{ . }}}
      {{- end }}
      {{- with $v.envFrom }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- end }}
    {{- if eq .is "head" }}
    lifecycle: # the head runs the drivers: their jobs save a last checkpoint
      preStop:
        exec: {command: [python, -m, sdp.kube.leave, {{ include "sdp-cluster.checkpoint-seconds" $s | quote }}]}
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
      {{- if and (eq .is "head") $v.serviceAccount.reader }}
      - {name: reader, mountPath: /etc/sdp/reader, readOnly: true}
      {{- end }}
      {{- if $s.hugepages2Mi }}
      - {name: hugepages, mountPath: /dev/hugepages}
      {{- end }}
      {{- with $v.volumeMounts }}{{ toYaml . | nindent 6 }}{{ end }}
volumes:
  - {name: shared-mem, emptyDir: {medium: Memory, sizeLimit: {{ $s.shmSize }}}}
  - {name: tmp, emptyDir: {}}
  - {name: home, emptyDir: {}}
  - {name: jobs, configMap: {name: {{ include "sdp-cluster.name" $root }}-jobs}}
  {{- if and (eq .is "head") $v.serviceAccount.reader }}
  - {name: reader, secret: {secretName: {{ include "sdp-cluster.name" $root }}-reader, optional: true}}
  {{- end }}
  {{- if $s.hugepages2Mi }}
  - {name: hugepages, emptyDir: {medium: HugePages}}
  {{- end }}
  {{- if and (eq .is "head") $v.autoscaling.enabled }}
  - {name: autoscaler-tmp, emptyDir: {}}
  - {name: autoscaler-home, emptyDir: {}}
  - name: token
    projected:
      sources:
        - serviceAccountToken: {path: token, expirationSeconds: 3607}
        - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
        - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
  {{- end }}
  {{- with $v.volumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}
