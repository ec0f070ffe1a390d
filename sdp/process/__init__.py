"""From images and captions to latents and tokens.

Read in this order: `transform` (bytes to crops, on CPU), `encode` (crops to latents, on an accelerator), `table` (what
is stored), `reading` (where rows come from), `job` (all of it on a cluster).
"""
