"""Pictures for prompts.

`painter` turns prompts into pictures, `worker` writes a part of them, and `job` runs workers on Ray. A picture's noise
is drawn from (seed, address) alone.
"""
