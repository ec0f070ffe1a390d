{{/* Refuse values that cannot work, before anything is applied: one sentence that begins with the value's path. */}}
{{- define "sdp-cluster.check" -}}
{{- if not .Values.image.repository -}}
{{- fail "image.repository: required: the repository in your registry of the image that images/ray/Dockerfile builds" -}}
{{- end -}}
{{- if not .Values.storage.uri -}}
{{- fail "storage.uri: required: the folder for datasets and runs, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER" -}}
{{- end -}}
{{- $own := pick .Values "image" "storage" "model" "jobs" | toJson -}}
{{- if regexMatch "\\b(BUCKET|FOLDER)\\b" $own -}}
{{- fail (printf "values: replace %s with your own" (regexFindAll "\\b(REGISTRY|BUCKET|FOLDER)\\b" $own -1 | uniq | join ", ")) -}}
{{- end -}}
{{- if ne (empty .Values.queue.manager) (empty .Values.queue.name) -}}
{{- fail "queue: expected both manager and name, or neither" -}}
{{- end -}}
{{- if and (hasPrefix "gs://" .Values.storage.uri) .Values.storage.endpoint -}}
{{- fail (printf "storage.endpoint: expected none with gs://, which has its own, got %s" .Values.storage.endpoint) -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (or .Values.serviceAccount.annotations .Values.serviceAccount.downloadsAnnotations) -}}
{{- fail "serviceAccount.annotations: expected none if serviceAccount.create is false; annotate the existing accounts" -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (lookup "v1" "ServiceAccount" .Release.Namespace "default") -}}{{/* there is a cluster to ask */}}
{{- $missing := list -}}
{{- range $suffix := list "" "-head" "-downloads" -}}
{{- $account := printf "%s%s" (include "sdp-cluster.account" $) $suffix -}}
{{- if not (lookup "v1" "ServiceAccount" $.Release.Namespace $account) }}{{ $missing = append $missing $account }}{{ end -}}
{{- end -}}
{{- with $missing }}{{ fail (printf "serviceAccount.create: false needs accounts that exist, and namespace %s lacks %s; create them, or leave it true" $.Release.Namespace (join ", " .)) }}{{ end -}}
{{- end -}}
{{- $have := list "cpu" "gpu" -}}
{{- $groups := include "sdp-cluster.groups" . | fromYaml -}}
{{- if not $groups }}{{ fail "groups: expected one or more, got none: the head runs only drivers" }}{{ end -}}
{{- range $name, $group := $groups -}}
{{- include "sdp-cluster.check-group" (dict "root" $ "name" $name "group" $group) -}}
{{- if and $group.accelerator $group.most }}{{ $have = append $have $group.accelerator }}{{ end -}}
{{- end -}}
{{- $wrong := list -}}
{{- range $job, $own := .Values.jobs -}}
{{- $own = $own | default dict -}}
{{- $offline := and (hasPrefix "train" $job) (ne (toString ($own.data | default dict).mode) "online") -}}
{{- range $section := ternary (list "scaling") (list "scaling" "encode") $offline -}}
{{- with (get $own $section | default dict).accelerator -}}
{{- if not (has . $have) -}}
{{- $wrong = append $wrong (printf "jobs.%s.%s.accelerator: expected one that the groups have (%s), got %s; add a group, or set jobs.%s to null" $job $section (join ", " (slice $have 2 | uniq | sortAlpha) | default "none") . $job) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $wrong }}{{ fail (join "\n" .) }}{{ end -}}
{{- end -}}

{{/* Check one group. Takes root, name, and the group merged over groupDefaults. */}}
{{- define "sdp-cluster.check-group" -}}
{{- $group := .group -}}
{{- $path := printf "groups.%s" .name -}}
{{- if or (eq .name "head") (not (regexMatch "^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$" .name)) -}}
{{- fail (printf "%s: expected a name of at most 20 lower-case letters, digits and hyphens, and not head; rename it" $path) -}}
{{- end -}}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) -}}
{{- fail (printf "%s.minReplicas: expected at most maxReplicas (%v), got %v" $path $group.maxReplicas $group.minReplicas) -}}
{{- end -}}
{{- if and $group.gpus (not $group.accelerator) -}}
{{- fail (printf "%s.accelerator: required if gpus is not 0: jobs use it to place encoders and trainers" $path) -}}
{{- end -}}
{{- range $key := list "accelerator" "efaDevices" -}}
{{- if and (not $group.gpus) (get $group $key) -}}
{{- fail (printf "%s.gpus: expected 1 or more if %s is set (%v), got 0" $path $key (get $group $key)) -}}
{{- end -}}
{{- end -}}
{{- $product := get (($group.podSpec | default dict).nodeSelector | default dict) "nvidia.com/gpu.product" -}}
{{- $products := .root.Files.Get "products.json" -}}
{{- $right := get (fromJson $products) $group.accelerator | default list -}}
{{- if and $product $group.gpus (contains (quote $product) $products) (not (has $product $right)) -}}
{{- fail (printf "%s.podSpec.nodeSelector: expected nvidia.com/gpu.product to match accelerator %s (%s), got %s" $path $group.accelerator (join ", " $right) $product) -}}
{{- end -}}
{{- end -}}
