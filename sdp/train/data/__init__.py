"""Readers of the rows of an epoch, in an order that depends on the seed alone.

Read in this order: `order` (which row comes when), `rows` and `batch` (what a trainer gets), `direct` (latents from
storage), `online` and `collocated` (images that are encoded meanwhile), `mixture` and `buckets` (several datasets,
several shapes).
"""
