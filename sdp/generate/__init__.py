"""Pictures for prompts.

`sample` is the loop from noise to pictures, `painter` adds the text encoder and memory limits, `worker` writes a part,
and `job` runs workers on Ray. A picture's noise is drawn from (seed, address) alone.
"""
