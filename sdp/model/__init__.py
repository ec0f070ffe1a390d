"""Models: where they come from, and their weights in checkpoints.

Read in this order: `sources` and `load` (a model by its name), `trained` (the networks that a run trains), `sharded`
and `checkpoints` (weights in a checkpoint), `export`.
"""
