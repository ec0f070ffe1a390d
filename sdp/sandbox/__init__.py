"""Processes that decode strangers' images and can do nothing else.

Read in this order: `decoders` (the parent's side), `child` (the process), `confine` (the kernel's restrictions on it).
"""
