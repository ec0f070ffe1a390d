"""From prompts to pictures.

`sample` is the loop from noise to pictures, `painter` adds the text and the memory limits, `worker` makes a part of
them, `job` lays that on Ray. Each picture's noise is drawn from (seed, address) alone.
"""
