{{/* Labels of a node that say which kind it is: who names one has chosen, and needs no GPU's name. */}}
{{- define "sdp.kinds-of-nodes" -}}
- nvidia.com/gpu.product
- node.kubernetes.io/instance-type
- cloud.google.com/gke-accelerator
- cloud.google.com/gke-nodepool
- eks.amazonaws.com/nodegroup
- karpenter.sh/nodepool
- karpenter.k8s.aws/instance-gpu-name
- karpenter.k8s.aws/instance-family
{{- end -}}

{{/* A group's GPUs, as GPU feature discovery labels nodes with them, in JSON; empty where the group says itself where it goes. */}}
{{- define "sdp.products" -}}
{{- $said := false -}}
{{- range include "sdp.kinds-of-nodes" . | fromYamlArray -}}
{{- if hasKey ($.settings.nodeSelector | default dict) . }}{{ $said = true }}{{ end -}}
{{- end -}}
{{- if not $said }}{{ get (.root.Files.Get "products.json" | fromJson) .settings.accelerator | toJson }}{{ end -}}
{{- end -}}
