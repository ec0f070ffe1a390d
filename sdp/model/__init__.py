"""Models: where they come from, what is Stable Diffusion's about them, and their weights in checkpoints.

Read in this order: `family` (all that is specific to Stable Diffusion 1 and 2), `sources` and `load` (a model by its
name), `trained` (the networks that a run trains), `sharded` and `checkpoints` (weights in a checkpoint), `export`.
"""
