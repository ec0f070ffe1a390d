"""Images and captions to latents and tokens.

Read in this order: `recipe` (what is decided), `reading` (where rows come from), `transform` (bytes to crops, on CPU),
`encoder` (crops to latents, on an accelerator), `table` (what is stored), `work` (what a worker does with a piece),
`pipeline` (all of it on Ray Data), `desk` (which worker holds which piece).
"""
