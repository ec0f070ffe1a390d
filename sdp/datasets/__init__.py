"""Addressed datasets: every row has an address, and every address one outcome.

Read in this order: `units` (runs of addresses), `index` (what a dataset is made from), `outcomes` and `parts` (the
rows of a unit and their account), `output` (a dataset being written), `manifest` (a dataset that is complete).
"""
