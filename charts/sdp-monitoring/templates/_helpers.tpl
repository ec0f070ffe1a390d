{{- define "sdp-monitoring.name" -}}
{{- $name := .Values.nameOverride | default .Release.Name -}}
{{- if gt (len $name) 40 -}}
{{- fail (printf "nameOverride: expected at most 40 characters, got %d in %q; choose a shorter one" (len $name) $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "sdp-monitoring.labels" -}}
app.kubernetes.io/name: sdp-monitoring
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "sdp-monitoring.exporter.selector" -}}
app.kubernetes.io/name: sdp-exporter
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sdp-monitoring.image" -}}
{{- with .Values.exporter.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Return the relabelings that give Ray's pods their target labels, in the operator's form. */}}
{{- define "sdp-monitoring.ray.relabelings" -}}
- {action: replace, sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: node}
# The exporter identifies the pod of a process on a GPU by its uid; recording rules join the two.
- {action: replace, sourceLabels: [__meta_kubernetes_pod_uid], targetLabel: pod_uid}
- {action: replace, sourceLabels: [__meta_kubernetes_pod_label_ray_io_cluster], targetLabel: ray_cluster}
- {action: replace, sourceLabels: [__meta_kubernetes_pod_label_ray_io_group], targetLabel: ray_group}
# The label by which Ray's own dashboards select the cluster.
- {action: replace, sourceLabels: [__meta_kubernetes_pod_label_ray_io_cluster], targetLabel: ray_io_cluster}
{{- end -}}

{{/* Return the relabelings that remove Ray's additions to names and labels. Ray's own metrics keep SessionName for its dashboards. */}}
{{- define "sdp-monitoring.ray.metricRelabelings" -}}
- {action: labeldrop, regex: "otel_scope_.+|Version"}
- {action: replace, sourceLabels: [__name__], regex: "ray_sdp_.+()", targetLabel: SessionName, replacement: "$1"} # empty: drops the label
# A job's own label `job` becomes `stage`, because Prometheus has a label of that name.
- {action: replace, sourceLabels: [__name__, exported_job], separator: ";", regex: "ray_sdp_[^;]+;(.+)", targetLabel: stage, replacement: "$1"}
- {action: replace, sourceLabels: [__name__], regex: "ray_sdp_.+()", targetLabel: exported_job, replacement: "$1"}
- {action: replace, sourceLabels: [__name__], regex: "ray_(sdp_.+)", targetLabel: __name__, replacement: "$1"}
{{- end -}}

{{/* Convert the operator's relabelings to the form of Prometheus's configuration. */}}
{{- define "sdp-monitoring.asPrometheus" -}}
{{- $rules := list -}}
{{- range fromYamlArray . -}}
{{- $rule := dict -}}
{{- range $key, $value := . }}{{ $_ := set $rule (snakecase $key) $value }}{{ end -}}
{{- $rules = append $rules $rule -}}
{{- end -}}
{{- toYaml $rules -}}
{{- end -}}

{{/* Return a file of rules unchanged; fail if it is not YAML, which Helm would treat as empty. */}}
{{- define "sdp-monitoring.rulesIn" -}}
{{- if not (get (fromYaml .text) "groups") }}{{ fail (printf "%s: expected YAML with groups: %s" .file (get (fromYaml .text) "Error")) }}{{ end -}}
{{- .text -}}
{{- end -}}

{{/* Return the rules with the values' overrides, as a mapping with `groups`. */}}
{{- define "sdp-monitoring.rules" -}}
{{- $values := .Values.rules -}}
{{- $groups := list -}}
{{- range $file := list "rules/recording.yaml" "rules/alerts.yaml" -}}
{{- range $group := (include "sdp-monitoring.rulesIn" (dict "text" ($.Files.Get $file) "file" $file) | fromYaml).groups -}}
{{- $kept := list -}}
{{- range $rule := $group.rules -}}
{{- if $rule.alert -}}
{{- $other := get $values.alerts $rule.alert | default dict -}}
{{- $asked := or $.Values.exporter.enabled (not (has $rule.alert (list "SdpExporterDown" "SdpExporterBlind"))) -}}
{{- if and $asked (ne (toString (get $other "enabled")) "false") -}}
{{- $labels := mustMergeOverwrite (deepCopy $values.alertLabels) $rule.labels -}}
{{- with get $other "severity" }}{{ $_ := set $labels "severity" . }}{{ end -}}
{{- with get $other "for" }}{{ $_ := set $rule "for" . }}{{ end -}}
{{- with get $other "expr" }}{{ $_ := set $rule "expr" . }}{{ end -}}
{{- $_ := set $rule "labels" $labels -}}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s/%s.md" (trimSuffix "/" $values.runbooks) $rule.annotations.runbook) -}}
{{- $_ := unset $rule.annotations "runbook" -}}
{{- $kept = append $kept $rule -}}
{{- end -}}
{{- else -}}
{{- $kept = append $kept $rule -}}
{{- end -}}
{{- end -}}
{{- if $kept -}}
{{- $groups = append $groups (dict "name" $group.name "interval" $values.interval "rules" $kept) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "groups" $groups) -}}
{{- end -}}

{{/* Check that a scrape's timeout is at most its interval, as Prometheus requires. */}}
{{- define "sdp-monitoring.check-times" -}}
{{- $interval := include "sdp-monitoring.milliseconds" .scrape.interval | float64 -}}
{{- if gt (include "sdp-monitoring.milliseconds" .scrape.scrapeTimeout | float64) $interval -}}
{{- fail (printf "%s.scrapeTimeout: expected at most %s.interval (%s), got %s" .at .at .scrape.interval .scrape.scrapeTimeout) -}}
{{- end -}}
{{- if and (hasKey .scrape "timeoutSeconds") (ge (mulf 1000.0 .scrape.timeoutSeconds) (include "sdp-monitoring.milliseconds" .scrape.scrapeTimeout | float64)) -}}
{{- fail (printf "%s.timeoutSeconds: expected less than %s.scrapeTimeout (%s), got %v" .at .at .scrape.scrapeTimeout .scrape.timeoutSeconds) -}}
{{- end -}}
{{- end -}}

{{/* Return the milliseconds of a duration in Prometheus's form, such as 1m30s. */}}
{{- define "sdp-monitoring.milliseconds" -}}
{{- $sum := 0 -}}
{{- $in := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 -}}
{{- range $part := regexFindAll "[0-9]+(ms|s|m|h)" . -1 -}}
{{- $unit := regexFind "[a-z]+" $part -}}
{{- $sum = add $sum (mul (trimSuffix $unit $part | int64) (get $in $unit)) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/* Refuse values that cannot work, before anything is applied. */}}
{{- define "sdp-monitoring.check" -}}
{{- if and .Values.exporter.enabled (not .Values.exporter.image.repository) -}}
{{- fail "exporter.image.repository: required if exporter.enabled is true: the repository in your registry of the image that images/exporter/Dockerfile builds" -}}
{{- end -}}
{{- $known := list -}}
{{- range (include "sdp-monitoring.rulesIn" (dict "text" (.Files.Get "rules/alerts.yaml") "file" "rules/alerts.yaml") | fromYaml).groups -}}
{{- range .rules }}{{ $known = append $known .alert }}{{ end -}}
{{- end -}}
{{- range $name, $_ := .Values.rules.alerts -}}
{{- if not (has $name $known) -}}
{{- fail (printf "rules.alerts.%s: no such alert; the alerts are %s" $name (join ", " (sortAlpha $known))) -}}
{{- end -}}
{{- end -}}
{{- include "sdp-monitoring.check-times" (dict "at" "ray" "scrape" .Values.ray) -}}
{{- include "sdp-monitoring.check-times" (dict "at" "exporter" "scrape" .Values.exporter) -}}
{{- range $label, $_ := include "sdp-monitoring.exporter.selector" . | fromYaml -}}
{{- if hasKey ($.Values.exporter.podLabels | default dict) $label -}}
{{- fail (printf "exporter.podLabels: %s is the chart's own: it selects the pods" $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "sdp-monitoring.ray.namespaces" -}}
{{- with .Values.ray.namespaces -}}
matchNames: {{ toJson . }}
{{- else -}}
any: true
{{- end -}}
{{- end -}}

{{/* Return name: value pairs as a selector for kubectl's -l. */}}
{{- define "sdp-monitoring.asSelector" -}}
{{- $parts := list -}}
{{- range $name, $value := . }}{{ $parts = append $parts (printf "%s=%s" $name (toString $value)) }}{{ end -}}
{{- join "," $parts -}}
{{- end -}}

{{- define "sdp-monitoring.exporter.probe" -}}
tcpSocket: {port: metrics} # a restart does not mend a driver, so none is asked
timeoutSeconds: 5
periodSeconds: 20
{{- end -}}
