{{/* Node labels that identify a kind of node: a group that selects by one of them needs no GPU product. */}}
{{- define "sdp-cluster.kinds-of-nodes" -}}
- nvidia.com/gpu.product
- node.kubernetes.io/instance-type
- cloud.google.com/gke-accelerator
- cloud.google.com/gke-nodepool
- eks.amazonaws.com/nodegroup
- karpenter.sh/nodepool
- karpenter.k8s.aws/instance-gpu-name
- karpenter.k8s.aws/instance-family
{{- end -}}

{{/* Return a group's GPU products as JSON, as GPU feature discovery labels nodes; empty if the group itself selects its nodes. */}}
{{- define "sdp-cluster.products" -}}
{{- $said := false -}}
{{- range include "sdp-cluster.kinds-of-nodes" . | fromYamlArray -}}
{{- if hasKey ($.settings.nodeSelector | default dict) . }}{{ $said = true }}{{ end -}}
{{- end -}}
{{- if not $said }}{{ get (.root.Files.Get "products.json" | fromJson) .settings.accelerator | toJson }}{{ end -}}
{{- end -}}
