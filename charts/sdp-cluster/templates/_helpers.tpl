{{- define "sdp-cluster.name" -}}
{{- $name := .Values.nameOverride | default .Release.Name -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- fail (printf "nameOverride: expected lower-case letters, digits and hyphens, with a letter first, as KubeRay requires, got %q; choose another name" $name) -}}
{{- end -}}
{{- if gt (len $name) 40 -}}
{{- fail (printf "nameOverride: expected at most 40 characters, because KubeRay appends to it, got %d in %q; choose a shorter one" (len $name) $name) -}}
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
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "sdp-cluster.account" -}}
{{ .Values.serviceAccount.name | default (include "sdp-cluster.name" .) }}
{{- end -}}

{{/* Not empty if any group has GPUs; the groups without GPUs then download. */}}
{{- define "sdp-cluster.has-gpus" -}}
{{- range $name, $group := include "sdp-cluster.groups" $ | fromYaml -}}
{{- if gt (int $group.gpus) 0 }}{{ $name }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Return an environment from maps of name: value, sorted by name. Later maps override earlier ones, so no name occurs twice. */}}
{{- define "sdp-cluster.env" -}}
{{- $all := dict -}}
{{- range . -}}
{{- range $name, $value := . }}{{ $_ := set $all $name $value }}{{ end -}}
{{- end -}}
{{- range $name, $value := $all }}
- name: {{ $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }} {{- /* keeps 8388608 from becoming 8.388608e+06 */}}
{{- end }}
{{- end -}}

{{/* Return name: value with each value as a string. */}}
{{- define "sdp-cluster.texts" -}}
{{- range $name, $value := . }}
{{ $name }}: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end -}}

{{/* Return a group's settings: its own values over groupDefaults. */}}
{{- define "sdp-cluster.group" -}}
{{- $group := mustMergeOverwrite (deepCopy .Values.groupDefaults) (deepCopy .group) -}}
{{- if and (gt (int $group.efaDevices) 0) (not $group.hugepages2Mi) }}{{ $_ := set $group "hugepages2Mi" "5120Mi" }}{{ end -}}
{{- toYaml $group -}}
{{- end -}}

{{/* Return all groups' settings by name. */}}
{{- define "sdp-cluster.groups" -}}
{{- $groups := dict -}}
{{- range $name, $own := .Values.groups -}}
{{- if kindIs "map" $own }}{{ $_ := set $groups $name (include "sdp-cluster.group" (dict "Values" $.Values "group" $own) | fromYaml) }}{{ end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}

{{/* Return the default number of trainers of a job: all GPUs of its accelerator, or one pod's GPUs fewer. Takes Values and own. */}}
{{- define "sdp-cluster.trainers" -}}
{{- $scaling := get .own "scaling" | default dict -}}
{{- $accelerator := kindIs "map" $scaling | ternary (get (kindIs "map" $scaling | ternary $scaling dict) "accelerator") "" -}}
{{- $most := 0 -}}
{{- $pod := 0 -}}
{{- range $name, $group := include "sdp-cluster.groups" $ | fromYaml -}}
{{- if and $accelerator (eq $group.accelerator (toString $accelerator)) -}}
{{- $most = add $most (mul (include "sdp-cluster.most-pods" (dict "Values" $.Values "group" $group) | int) (int $group.gpus)) -}}
{{- $pod = max $pod (int $group.gpus) -}}
{{- end -}}
{{- end -}}
{{- $encode := get .own "encode" | default dict -}}
{{- if and (kindIs "map" $encode) (eq (toString (dig "data" "mode" "" .own)) "online") -}}
{{- if eq (toString (get $encode "accelerator")) (toString $accelerator) }}{{ $most = sub $most (get $encode "num_workers" | default 1 | int) }}{{ end -}}
{{- end -}}
{{- if gt $most $pod -}}
num_workers: {min: {{ sub $most $pod }}, max: {{ $most }}}
{{- else if gt $most 0 -}}
num_workers: {{ $most }}
{{- end -}}
{{- end -}}

{{/* Return the instance type of the groups with an accelerator, if their node selectors name the same one. Takes Values and accelerator. */}}
{{- define "sdp-cluster.instance" -}}
{{- $types := list -}}
{{- range $name, $group := include "sdp-cluster.groups" $ | fromYaml -}}
{{- if and $.accelerator (eq $group.accelerator (toString $.accelerator)) -}}
{{- $types = append $types (get ($group.nodeSelector | default dict) "node.kubernetes.io/instance-type" | toString) -}}
{{- end -}}
{{- end -}}
{{- if eq (len (uniq $types)) 1 }}{{ first $types }}{{ end -}}
{{- end -}}

{{/*
Return where downloads run, and with how many workers: in groups without GPUs, if there are any, with as many workers as
those can grow to. Ray does not know this number for a group without a pod.
*/}}
{{- define "sdp-cluster.downloaders" -}}
{{- $workers := get .own "workers" | default dict -}}
{{- if not (kindIs "map" $workers) }}{{ $workers = dict }}{{ end -}}{{/* the job itself refuses it, by name */}}
{{- $cpus := get $workers "cpus" | default 4 | int | max 1 -}}
{{- $names := list -}}
{{- $plain := list -}}
{{- range $name, $group := include "sdp-cluster.groups" $ | fromYaml -}}
{{- $names = append $names $name -}}
{{- if and (eq (int $group.gpus) 0) (gt (include "sdp-cluster.most-pods" (dict "Values" $.Values "group" $group) | int) 0) -}}
{{- $text := toString $group.cpu -}}{{/* KubeRay rounds CPUs up to a whole number for Ray. */}}
{{- $cpu := int (ceil (hasSuffix "m" $text | ternary (divf (float64 (trimSuffix "m" $text)) 1000) (float64 $text))) -}}
{{- $plain = append $plain (dict "name" $name "cpu" $cpu "most" (int $group.maxReplicas)) -}}
{{- $cpus = min $cpus $cpu -}}
{{- end -}}
{{- end -}}
{{- $most := 0 -}}
{{- $among := list -}}
{{- range $plain -}}
{{- $most = add $most (mul .most (div .cpu $cpus)) -}}
{{- $among = append $among .name -}}
{{- end -}}
{{- $placed := hasKey $workers "node_labels" -}}
{{- if and $plain (not $placed) -}}
{{- if .Values.autoscaling.enabled }}
concurrency: {{ $most }}
{{- end }}
workers:
  cpus: {{ $cpus }}
  {{- if lt (len $plain) (len $names) }}
  node_labels: {ray.io/node-group: {{ printf "in(%s)" (join "," $among) | quote }}}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Return a pod's resources, used as both requests and limits. */}}
{{- define "sdp-cluster.resources" -}}
cpu: {{ .cpu | toString | quote }}
memory: {{ .memory }}
{{- if gt (int (default 0 .gpus)) 0 }}
{{ .gpuResource }}: {{ int .gpus }}
{{- end }}
{{- with .resources }}
{{ toYaml . }}
{{- end }}
{{- if gt (int (default 0 .efaDevices)) 0 }}
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
Return a pod's affinity: the settings' own, or the default by GPUs; and, with colocateBy, affinity to the group's other pods.
Takes the arguments of sdp-cluster.pod.
*/}}
{{- define "sdp-cluster.affinity" -}}
{{- $s := .settings -}}
{{- $affinity := deepCopy ($s.affinity | default dict) -}}
{{- if not $affinity -}}
{{- $expression := dict -}}
{{- if eq (int (default 0 $s.gpus)) 0 -}}{{/* otherwise it could keep a node alive that costs a hundred times as much */}}
{{- $expression = dict "key" "nvidia.com/gpu.product" "operator" "DoesNotExist" -}}
{{- else -}}
{{- with include "sdp-cluster.products" . -}}
{{- $expression = dict "key" "nvidia.com/gpu.product" "operator" "In" "values" (fromJsonArray .) -}}
{{- end -}}
{{- end -}}
{{- if $expression -}}
{{- $terms := list (dict "matchExpressions" (list $expression)) -}}
{{- $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) -}}
{{- end -}}
{{- end -}}
{{- with $s.colocateBy -}}
{{- $labels := dict "ray.io/cluster" (include "sdp-cluster.name" $.root) "sdp/group" $.name -}}
{{- $term := dict "topologyKey" . "labelSelector" (dict "matchLabels" $labels) -}}
{{- $pods := get $affinity "podAffinity" | default dict -}}
{{- $required := append (get $pods "requiredDuringSchedulingIgnoredDuringExecution" | default list) $term -}}
{{- $_ := set $affinity "podAffinity" (set $pods "requiredDuringSchedulingIgnoredDuringExecution" $required) -}}
{{- end -}}
{{- with $affinity }}{{ toYaml . }}{{ end -}}
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
{{- if eq .is "head" }} {{- /* the panels that Ray's dashboard embeds */}}
{{- with $v.monitoring.grafana }}
{{- if .url }}
RAY_GRAFANA_HOST: {{ .url | quote }}
RAY_GRAFANA_IFRAME_HOST: {{ .publicUrl | default .url | quote }}
RAY_GRAFANA_CLUSTER_FILTER: {{ include "sdp-cluster.name" $.root }}
{{- end }}
{{- end }}
{{- with $v.monitoring.prometheus.url }}
RAY_PROMETHEUS_HOST: {{ . | quote }}
{{- end }}
{{- end }}
{{- with $v.storage.endpoint }}
AWS_ENDPOINT_URL: {{ . | quote }}
{{- end }}
{{- with $v.storage.region }}
AWS_REGION: {{ . | quote }}
{{- end }}
{{- if gt (int (default 0 $s.gpus)) 0 }}
PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True # memory that is not fragmented
TORCHINDUCTOR_CACHE_DIR: /tmp/torchinductor
{{- $cpu := toString $s.cpu }}
{{- $cpus := hasSuffix "m" $cpu | ternary (divf (trimSuffix "m" $cpu | float64) 1000) (float64 $cpu) }}
TORCHINDUCTOR_COMPILE_THREADS: {{ div (int $cpus) (int $s.gpus) | max 1 | quote }} # each trainer compiles
TORCH_NCCL_TRACE_BUFFER_SIZE: "20000"
{{- end }}
{{- if gt (int (default 0 $s.efaDevices)) 0 }}
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
  annotations:
    {{- toYaml (merge (dict "sdp/template" (include "sdp-cluster.digest" .)) (include "sdp-cluster.annotations" . | fromYaml)) | nindent 4 }}
{{ include "sdp-cluster.pod-spec" . }}
{{- end -}}

{{/*
Return the digest of a pod's template, which the pod carries; a pod with another digest is of an older template. The
number of pods and the labels that change with the chart's version are not part of it. Takes the arguments of sdp-cluster.pod.
*/}}
{{- define "sdp-cluster.digest" -}}
{{- $v := .root.Values -}}
{{- $made := include "sdp-cluster.pod-spec" . | fromYaml -}}
{{- $_ := set $made "metadata" (list $v.podLabels (include "sdp-cluster.annotations" . | fromYaml)) -}}
{{- $_ := set $made "operator" (list $v.rayVersion $v.auth $v.autoscaling.enabled) -}}{{/* KubeRay's own additions depend on these */}}
{{- if eq .is "worker" -}}
{{- $_ := set $made "labels" (list .settings.labels .settings.accelerator .settings.rayStartParams) -}}
{{- else -}}
{{- $_ := set $made "start" .settings.rayStartParams -}}
{{- if $v.autoscaling.enabled }}{{ $_ := set $made "autoscaler" (include "sdp-cluster.autoscaler" .root | fromYaml) }}{{ end -}}
{{- end -}}
{{- toJson $made | sha256sum | trunc 12 -}}
{{- end -}}

{{/* Return the digests of all pod templates by group, the head's under `head`. */}}
{{- define "sdp-cluster.digests" -}}
head: {{ include "sdp-cluster.digest" (dict "root" . "name" "head" "is" "head" "settings" .Values.head) | quote }}
{{- range $name, $group := include "sdp-cluster.groups" $ | fromYaml }}
{{ $name | quote }}: {{ include "sdp-cluster.digest" (dict "root" $ "name" $name "is" "worker" "settings" $group) | quote }}
{{- end }}
{{- end -}}

{{/* Return the number of pods of an older template by group, NAME: COUNT. Takes root and the namespace's pods. */}}
{{- define "sdp-cluster.older" -}}
{{- $digests := include "sdp-cluster.digests" .root | fromYaml -}}
{{- $older := dict -}}
{{- range .pods -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $group := get $labels "sdp/group" -}}
{{- $ours := and (eq (get $labels "ray.io/cluster") (include "sdp-cluster.name" $.root)) (hasKey $digests $group) -}}
{{- if and $ours (not .metadata.deletionTimestamp) (ne (get (.metadata.annotations | default dict) "sdp/template") (get $digests $group)) -}}
{{- $_ := set $older $group (add1 (get $older $group | default 0)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $older -}}
{{- end -}}

{{/* Return the autoscaler's container in the head's pod, without the settings that it rereads while it runs. */}}
{{- define "sdp-cluster.autoscaler" -}}
image: {{ include "sdp-cluster.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
resources: {{- toYaml .Values.autoscaling.resources | nindent 2 }}
securityContext: {{- /* its own user: containers of a pod share processes, and jobs in the head could otherwise read its token */}}
  runAsUser: {{ add1 (int .Values.runAsUser) }}
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: {{ .Values.readOnlyRootFilesystem }}
  capabilities: {drop: [ALL]}
env:
  {{- include "sdp-cluster.env" (list (dict "HOME" "/home/ray") .Values.env) | nindent 2 }}
volumeMounts: {{- /* its own volumes, so that jobs cannot change files that it runs */}}
  - {name: autoscaler-tmp, mountPath: /tmp}
  - {name: autoscaler-home, mountPath: /home/ray}
  - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
  {{- with .Values.volumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* Return the spec of the pod template. */}}
{{- define "sdp-cluster.pod-spec" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $s := .settings -}}
{{- $gpus := int (default 0 $s.gpus) -}}
spec:
  {{- $suffix := eq .is "head" | ternary "-head" "" }}
  {{- if and (eq .is "worker") (eq $gpus 0) (include "sdp-cluster.has-gpus" $root) }}{{ $suffix = "-downloads" }}{{ end }}
  serviceAccountName: {{ include "sdp-cluster.account" $root }}{{ $suffix }}
  automountServiceAccountToken: false
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ int $v.runAsUser }}
    runAsGroup: {{ int $v.runAsUser }}
    fsGroup: {{ int $v.runAsUser }}
    seccompProfile: {type: RuntimeDefault}
  {{- /* Ray as PID 1 does not reap processes: zombies would accumulate, and stopping a job would wait for them. */}}
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ int $s.terminationGracePeriodSeconds }}
  enableServiceLinks: false
  {{- range $key := list "priorityClassName" "runtimeClassName" }}
  {{- with get $s $key }}
  {{ $key }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- with (include "sdp-cluster.queue" $root | fromYaml).scheduler | default $s.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- if $s.dnsConfig }}
  dnsConfig: {{- toYaml $s.dnsConfig | nindent 4 }}
  {{- else if and (eq .is "worker") (eq $gpus 0) }} {{- /* Kubernetes' default makes five times as many queries for each host */}}
  dnsConfig: {options: [{name: ndots, value: "1"}]}
  {{- end }}
  {{- with $s.initContainers }}
  initContainers: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $s.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "sdp-cluster.affinity" . }}
  affinity: {{- . | nindent 4 }}
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
    - {{- toYaml (merge (dict "labelSelector" (dict "matchLabels" (dict "ray.io/cluster" (include "sdp-cluster.name" $root) "sdp/group" $.name))) .) | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ .is }}
      image: {{ include "sdp-cluster.image" $root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      {{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" $v.readOnlyRootFilesystem "capabilities" (dict "drop" (list "ALL")) }}
      securityContext: {{- toYaml (mergeOverwrite $context (deepCopy ($s.securityContext | default dict))) | nindent 8 }}
      resources:
        requests: {{- include "sdp-cluster.resources" $s | nindent 10 }}
        limits: {{- include "sdp-cluster.resources" $s | nindent 10 }}
      env:
        {{- include "sdp-cluster.env" (list (include "sdp-cluster.own-env" . | fromYaml) $v.env $s.env) | nindent 8 }}
      {{- if or $v.storage.secretName $v.envFrom }}
      envFrom:
        {{- with $v.storage.secretName }}
        - secretRef: {name: {{ . }}}
        {{- end }}
        {{- with $v.envFrom }}{{ toYaml . | nindent 8 }}{{ end }}
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
        {{- if $s.hugepages2Mi }}
        - {name: hugepages, mountPath: /dev/hugepages}
        {{- end }}
        {{- with $v.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
        {{- with $s.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- with $s.sidecars }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes:
    - {name: shared-mem, emptyDir: {medium: Memory, sizeLimit: {{ $s.shmSize }}}}
    - {name: tmp, emptyDir: {}}
    - {name: home, emptyDir: {}}
    - {name: jobs, configMap: {name: {{ include "sdp-cluster.name" $root }}-jobs}}
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
    {{- with $v.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- with $s.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}
