{{/* Refuse values that cannot work, before anything is applied: one sentence that begins with the value's path. */}}
{{- define "sdp-cluster.check" -}}
{{- include "sdp-cluster.check-required" . -}}
{{- include "sdp-cluster.check-ineffective" . -}}
{{- range $name, $group := include "sdp-cluster.groups" . | fromYaml -}}
{{- include "sdp-cluster.check-group" (dict "root" $ "name" $name "group" $group) -}}
{{- end -}}
{{- include "sdp-cluster.check-jobs" . -}}
{{- end -}}

{{- define "sdp-cluster.check-required" -}}
{{- if not .Values.image.repository -}}
{{- fail "image.repository: required: the repository in your registry of the image that images/ray/Dockerfile builds" -}}
{{- end -}}
{{- if not .Values.storage.uri -}}
{{- fail "storage.uri: required: the folder for datasets and runs, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER" -}}
{{- end -}}
{{- with .Values.queue -}}
{{- if and .manager (not .name) -}}
{{- fail (printf "queue.name: required with queue.manager %s: the name of its queue" .manager) -}}
{{- end -}}
{{- if and .name (not .manager) -}}
{{- fail (printf "queue.manager: required with queue.name (%s): kueue, volcano or kai" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuse values that have no effect together with others. */}}
{{- define "sdp-cluster.check-ineffective" -}}
{{- if and (hasPrefix "gs://" .Values.storage.uri) .Values.storage.endpoint -}}
{{- fail (printf "storage.endpoint: expected none with gs://, which has its own, got %s" .Values.storage.endpoint) -}}
{{- end -}}
{{- range $key := list "annotations" "downloadsAnnotations" -}}
{{- if and (not $.Values.serviceAccount.create) (get $.Values.serviceAccount $key) -}}
{{- fail (printf "serviceAccount.%s: expected none if serviceAccount.create is false; annotate the existing accounts" $key) -}}
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
{{- include "sdp-cluster.check-gpus" (dict "path" $path "root" .root "group" $group) -}}
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
{{- if and (gt (int $group.efaDevices) 0) (eq (int $group.gpus) 0) -}}
{{- fail (printf "%s.efaDevices: expected 0 in a group without GPUs, got %d" .path (int $group.efaDevices)) -}}
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

{{/* Check that there are groups, with the accelerators that jobs select. Whether they are enough, sdp doctor says. */}}
{{- define "sdp-cluster.check-jobs" -}}
{{- $have := list -}}
{{- $groups := include "sdp-cluster.groups" $ | fromYaml -}}
{{- if not $groups }}{{ fail "groups: expected one or more, got none: the head runs only drivers" }}{{ end -}}
{{- range $group := $groups -}}
{{- if and $group.accelerator (gt (include "sdp-cluster.most-pods" (dict "Values" $.Values "group" $group) | int) 0) }}{{ $have = append $have $group.accelerator }}{{ end -}}
{{- end -}}
{{- range $job, $own := .Values.jobs -}}
{{- if kindIs "map" $own -}}
{{- if gt (len $job) 37 -}}
{{- fail (printf "jobs.%s: expected at most 37 characters, because KubeRay allows 47 and sdp- and a suffix are added, got %d; choose a shorter name" $job (len $job)) -}}
{{- end -}}
{{- $offline := and (eq (regexFind "^[a-z]+" $job) "train") (ne (toString (dig "data" "mode" "" $own)) "online") -}}
{{- range $section := ternary (list "scaling") (list "scaling" "encode") $offline -}}
{{- $settings := get $own $section -}}
{{- $accelerator := kindIs "map" $settings | ternary (get (kindIs "map" $settings | ternary $settings dict) "accelerator") "" -}}
{{- if and $accelerator (kindIs "string" $accelerator) (not (has $accelerator (concat (list "cpu" "gpu") $have))) -}}
{{- fail (printf "jobs.%s.%s.accelerator: expected one that the groups have (%s), got %s; add a group, or set jobs.%s to null" $job $section (join ", " ($have | uniq | sortAlpha) | default "none") $accelerator $job) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
