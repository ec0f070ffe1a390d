"""Readers of the rows of an epoch, in an order that depends on the seed alone.

Read in this order: `order` (which row comes when; what lanes and windows are), `reader` (from steps to batches), then
its plans `mixture` (one dataset or several) and `granules` (several shapes), and its sources `stored` (latents) and
`encoded` (images that are encoded meanwhile). A new kind of rows is another source, a new order another plan.
"""
