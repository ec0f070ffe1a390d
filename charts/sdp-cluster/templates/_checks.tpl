{{/* Refuse values that cannot work, before anything is applied: one sentence that begins with the value's path. */}}
{{- define "sdp-cluster.check" -}}
{{- include "sdp-cluster.check-required" . -}}
{{- include "sdp-cluster.check-ineffective" . -}}
{{- include "sdp-cluster.check-labels" . -}}
{{- include "sdp-cluster.check-scheduler" (dict "path" "head" "root" . "pod" .Values.head) -}}
{{- include "sdp-cluster.check-memory" (dict "path" "head" "pod" .Values.head) -}}
{{- include "sdp-cluster.check-resources" (dict "path" "head" "pod" .Values.head) -}}
{{- range $name, $group := include "sdp-cluster.groups" . | fromYaml -}}
{{- include "sdp-cluster.check-group" (dict "root" $ "name" $name "group" $group) -}}
{{- end -}}
{{- include "sdp-cluster.check-pods" . -}}
{{- include "sdp-cluster.check-jobs" . -}}
{{- end -}}

{{- define "sdp-cluster.check-required" -}}
{{- if not .Values.image.repository -}}
{{- fail "image.repository: required: the repository in your registry of the image that images/ray/Dockerfile builds" -}}
{{- end -}}
{{- if not .Values.storage.uri -}}
{{- fail "storage.uri: required: the folder for datasets and runs, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER" -}}
{{- end -}}
{{- if and (eq .Values.auth.mode "token") (semverCompare "<2.52.0-0" .Values.rayVersion) -}}
{{- fail (printf "rayVersion: expected 2.52.0 or later, which supports tokens, got %s; or set auth.mode to disabled" .Values.rayVersion) -}}
{{- end -}}
{{- with .Values.queue -}}
{{- if and .manager (not .name) -}}
{{- fail (printf "queue.name: required with queue.manager %s: the name of its queue" .manager) -}}
{{- end -}}
{{- if and .name (not .manager) -}}
{{- fail (printf "queue.manager: required with queue.name (%s): kueue, volcano or kai" .name) -}}
{{- end -}}
{{- end -}}
{{- with .Values.monitoring -}}
{{- if and .grafana.url (not .prometheus.url) -}}
{{- fail "monitoring.prometheus.url: required if monitoring.grafana.url is set: Ray's dashboard shows panels only if it reaches both" -}}
{{- end -}}
{{- if and .grafana.publicUrl (not .grafana.url) -}}
{{- fail "monitoring.grafana.url: required if monitoring.grafana.publicUrl is set: the head uses it to check that Grafana is healthy" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuse values that have no effect together with others. */}}
{{- define "sdp-cluster.check-ineffective" -}}
{{- if and (hasPrefix "gs://" .Values.storage.uri) .Values.storage.endpoint -}}
{{- fail (printf "storage.endpoint: expected none with gs://, which has its own, got %s" .Values.storage.endpoint) -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) .Values.serviceAccount.annotations -}}
{{- fail "serviceAccount.annotations: expected none if serviceAccount.create is false; annotate the existing accounts" -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) .Values.serviceAccount.downloadsAnnotations -}}
{{- fail "serviceAccount.downloadsAnnotations: expected none if serviceAccount.create is false; annotate the existing accounts" -}}
{{- end -}}
{{- if and (eq .Values.auth.mode "disabled") .Values.auth.secretName -}}
{{- fail (printf "auth.secretName: expected none if auth.mode is disabled, got %s; set the mode to token" .Values.auth.secretName) -}}
{{- end -}}
{{- end -}}

{{/* Refuse labels and annotations that the chart or KubeRay uses to select pods and place jobs. */}}
{{- define "sdp-cluster.check-labels" -}}
{{- $own := append (include "sdp-cluster.labels" . | fromYaml | keys) "sdp/group" -}}
{{- range $label, $_ := .Values.podLabels -}}
{{- if or (has $label $own) (hasPrefix "sdp/" $label) -}}
{{- fail (printf "podLabels: %s is the chart's own: choose another name" $label) -}}
{{- end -}}
{{- if hasPrefix "ray.io/" $label -}}
{{- fail (printf "podLabels: %s belongs to KubeRay or Ray; put labels that place jobs into groups.NAME.labels" $label) -}}
{{- end -}}
{{- end -}}
{{- range $label, $_ := .Values.labels -}}
{{- if has $label $own }}{{ fail (printf "labels: %s is the chart's own: choose another name" $label) }}{{ end -}}
{{- end -}}
{{- $own = concat $own (list "ray.io/node-group" "ray.io/accelerator-type") -}}
{{- $all := dict "groupDefaults" .Values.groupDefaults "head" .Values.head "" (dict "annotations" .Values.podAnnotations) -}}
{{- range $name, $group := .Values.groups -}}
{{- if kindIs "map" $group }}{{ $_ := set $all (printf "groups.%s" $name) $group }}{{ end -}}
{{- end -}}
{{- range $path, $group := $all -}}
{{- if hasKey ($group.annotations | default dict) "sdp/template" -}}
{{- fail (printf "%s: sdp/template is the chart's own: upgrades recognise older pods by it" (ternary "podAnnotations" (printf "%s.annotations" $path) (eq $path ""))) -}}
{{- end -}}
{{- range $label, $_ := $group.labels -}}
{{- if has $label $own -}}
{{- fail (printf "%s.labels: %s is the chart's own: it comes from the group's name and its accelerator" $path $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuse a scheduler other than the queue's. Takes path, root and pod. */}}
{{- define "sdp-cluster.check-scheduler" -}}
{{- $scheduler := (include "sdp-cluster.queue" .root | fromYaml).scheduler -}}
{{- if and $scheduler .pod.schedulerName -}}
{{- fail (printf "%s.schedulerName: expected none with queue.manager %s, which sets it for every pod, got %s" .path .root.Values.queue.manager .pod.schedulerName) -}}
{{- end -}}
{{- end -}}

{{- define "sdp-cluster.check-memory" -}}
{{- if ge (include "sdp-cluster.bytes" .pod.shmSize | float64) (include "sdp-cluster.bytes" .pod.memory | float64) -}}
{{- fail (printf "%s.shmSize: expected less than memory (%s), which it is part of, got %s" .path .pod.memory .pod.shmSize) -}}
{{- end -}}
{{- end -}}

{{/* Refuse resources that have a value of their own. Takes path and pod. */}}
{{- define "sdp-cluster.check-resources" -}}
{{- $own := include "sdp-cluster.resources" (omit .pod "resources") | fromYaml -}}
{{- range $name, $_ := .pod.resources -}}
{{- if hasKey $own $name -}}
{{- fail (printf "%s.resources: %s has its own value in this chart: set that" $.path $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Check one group. Takes root, name, and the group merged over groupDefaults. */}}
{{- define "sdp-cluster.check-group" -}}
{{- $group := .group -}}
{{- $path := printf "groups.%s" .name -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$" .name) -}}
{{- fail (printf "%s: expected a name of at most 20 lower-case letters, digits and hyphens; rename it" $path) -}}
{{- end -}}
{{- if eq .name "head" -}}
{{- fail "groups.head: expected another name, because the head's pod has this one; rename it" -}}
{{- end -}}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) -}}
{{- fail (printf "%s.minReplicas: expected at most maxReplicas (%d), got %d" $path (int $group.maxReplicas) (int $group.minReplicas)) -}}
{{- end -}}
{{- if ne (toString $group.replicas) "<nil>" -}}
{{- if or (lt (int $group.replicas) (int $group.minReplicas)) (gt (int $group.replicas) (int $group.maxReplicas)) -}}
{{- fail (printf "%s.replicas: expected from minReplicas (%d) to maxReplicas (%d), got %d" $path (int $group.minReplicas) (int $group.maxReplicas) (int $group.replicas)) -}}
{{- end -}}
{{- end -}}
{{- $most := include "sdp-cluster.most-pods" (dict "Values" .root.Values "group" $group) | int -}}
{{- if gt (int $group.minAvailable) $most -}}
{{- fail (printf "%s.minAvailable: expected at most the group's pods (%d), got %d" $path $most (int $group.minAvailable)) -}}
{{- end -}}
{{- include "sdp-cluster.check-scheduler" (dict "path" $path "root" .root "pod" $group) -}}
{{- include "sdp-cluster.check-memory" (dict "path" $path "pod" $group) -}}
{{- include "sdp-cluster.check-resources" (dict "path" $path "pod" $group) -}}
{{- include "sdp-cluster.check-gpus" (dict "path" $path "root" .root "group" $group) -}}
{{- if not .root.Values.autoscaling.enabled -}}
{{- range $key := list "priority" "idleTimeoutSeconds" -}}
{{- with get $group $key -}}
{{- fail (printf "%s.%s: expected 0 if autoscaling.enabled is false, got %d: only the autoscaler uses it" $path $key (int .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "sdp-cluster.check-gpus" -}}
{{- $group := .group -}}
{{- if and (gt (int $group.gpus) 0) (not $group.accelerator) -}}
{{- fail (printf "%s.accelerator: required if gpus is not 0: jobs use it to place encoders and trainers" .path) -}}
{{- end -}}
{{- if and $group.accelerator (eq (int $group.gpus) 0) -}}
{{- fail (printf "%s.gpus: expected 1 or more if accelerator is set (%s), got 0" .path $group.accelerator) -}}
{{- end -}}
{{- $product := get ($group.nodeSelector | default dict) "nvidia.com/gpu.product" -}}
{{- if and $product $group.accelerator -}}
{{- $products := .root.Files.Get "products.json" | fromJson -}}
{{- $right := get $products $group.accelerator -}}
{{- range $products -}}
{{- if and (has $product .) (not (has $product $right)) -}}
{{- fail (printf "%s.nodeSelector: expected nvidia.com/gpu.product to match accelerator %s (%s), got %s" $.path $group.accelerator (join ", " $right) $product) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (int $group.efaDevices) 0 -}}
{{- if eq (int $group.gpus) 0 -}}
{{- fail (printf "%s.efaDevices: expected 0 in a group without GPUs, got %d" .path (int $group.efaDevices)) -}}
{{- end -}}
{{- range $at, $env := dict (printf "%s.env" .path) $group.env "env" .root.Values.env -}}
{{- $net := get ($env | default dict) "NCCL_NET" | toString -}}
{{- if and $net (not (contains "libfabric" (lower $net))) -}}
{{- fail (printf "%s.NCCL_NET: expected none with %s.efaDevices, which NCCL can use only through AWS Libfabric, got %s" $at $.path $net) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Return the most pods that a group can have: maxReplicas with the autoscaler, otherwise its fixed number. */}}
{{- define "sdp-cluster.most-pods" -}}
{{- if .Values.autoscaling.enabled -}}
{{- int .group.maxReplicas -}}
{{- else -}}
{{- int (ternary .group.minReplicas .group.replicas (eq (toString .group.replicas) "<nil>")) -}}
{{- end -}}
{{- end -}}

{{/* Check that there is a group, and that some group can have a pod. */}}
{{- define "sdp-cluster.check-pods" -}}
{{- $groups := include "sdp-cluster.groups" . | fromYaml -}}
{{- if not $groups -}}
{{- fail "groups: expected one or more, got none: the head runs only drivers" -}}
{{- end -}}
{{- $pods := 0 -}}
{{- range $group := $groups -}}
{{- $pods = add $pods (include "sdp-cluster.most-pods" (dict "Values" $.Values "group" $group) | int) -}}
{{- end -}}
{{- if not $pods -}}
{{- fail "groups: expected replicas of 1 or more in some group if autoscaling.enabled is false, got 0 in each: no pod would ever be added" -}}
{{- end -}}
{{- end -}}

{{/* Check that the groups can serve each job. */}}
{{- define "sdp-cluster.check-jobs" -}}
{{- $have := dict -}}
{{- range $name, $group := include "sdp-cluster.groups" $ | fromYaml -}}
{{- $gpus := mul (include "sdp-cluster.most-pods" (dict "Values" $.Values "group" $group) | int) (int $group.gpus) -}}
{{- if $gpus }}{{ $_ := set $have $group.accelerator (add $gpus (get $have $group.accelerator | default 0)) }}{{ end -}}
{{- end -}}
{{- range $job, $own := .Values.jobs -}}
{{- if kindIs "map" $own -}}
{{- if gt (len $job) 37 -}}
{{- fail (printf "jobs.%s: expected at most 37 characters, because KubeRay allows 47 and sdp- and a suffix are added, got %d; choose a shorter name" $job (len $job)) -}}
{{- end -}}
{{- $kind := regexFind "^[a-z]+" $job -}}
{{- $data := get $own "data" | default dict -}}
{{- $online := and (kindIs "map" $data) (eq (toString (get $data "mode")) "online") -}}
{{- $left := deepCopy $have -}}
{{- range $section := ternary (list "scaling") (list "scaling" "encode") (and (eq $kind "train") (not $online)) -}}
{{- $settings := get $own $section -}}
{{- if kindIs "map" $settings -}}
{{- $accelerator := get $settings "accelerator" -}}
{{- if and $accelerator (kindIs "string" $accelerator) (not (has $accelerator (list "cpu" "gpu"))) -}}
{{- if not (hasKey $have $accelerator) -}}
{{- fail (printf "jobs.%s.%s.accelerator: expected one that the groups have (%s), got %s; add a group, or set jobs.%s to null" $job $section (join ", " (keys $have | sortAlpha) | default "none") $accelerator $job) -}}
{{- end -}}
{{- $workers := get $settings "num_workers" | default 1 -}}
{{- if kindIs "map" $workers }}{{ $workers = get $workers "min" | default 1 }}{{ end -}}
{{- $each := max 1 (get $settings "gpus_per_worker" | default 1) -}}
{{- $gpus := get $left $accelerator -}}
{{- $most := div $gpus $each | int -}}
{{- if gt (int $workers) $most -}}
{{- fail (printf "jobs.%s.%s.num_workers: expected at most %d, the number that the GPUs of groups with %s can serve (%s times gpus%s), got %d" $job $section $most $accelerator (ternary "maxReplicas" "replicas" $.Values.autoscaling.enabled) (ternary "" ", less the job's others" (eq (float64 $gpus) (float64 (get $have $accelerator)))) (int $workers)) -}}
{{- end -}}
{{- $_ := set $left $accelerator (sub $gpus (mul $workers $each) | int) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq $kind "train" }}{{ include "sdp-cluster.check-grace-period" (dict "Values" $.Values "job" $job "own" $own "gpus" $have) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Check that trainers have time for a checkpoint when their pod must stop: Ray needs the last 20 seconds (sdp-cluster.own-env). */}}
{{- define "sdp-cluster.check-grace-period" -}}
{{- $scaling := get .own "scaling" -}}
{{- $accelerator := kindIs "map" $scaling | ternary (get (kindIs "map" $scaling | ternary $scaling dict) "accelerator") "" -}}
{{- range $name, $group := include "sdp-cluster.groups" $ | fromYaml -}}
{{- $trains := or (and $accelerator (eq (toString $accelerator) $group.accelerator)) (and (not $accelerator) (or (not $.gpus) (gt (int $group.gpus) 0))) -}}
{{- if and $trains (lt (int $group.terminationGracePeriodSeconds) 30) -}}
{{- fail (printf "groups.%s.terminationGracePeriodSeconds: expected 30 or more where trainers run (jobs.%s), because they save a checkpoint in all but the last 20 seconds, got %d" $name $.job (int $group.terminationGracePeriodSeconds)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
