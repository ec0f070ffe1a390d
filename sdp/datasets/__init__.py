"""Addressed datasets: every row has an address, and every address one outcome.

Read in this order: `units` (runs of addresses), `index` (the files of the source), `outcomes` and `parts` (a unit's
rows and their account), `output` (a dataset being written), `manifest` (a complete dataset).
"""
