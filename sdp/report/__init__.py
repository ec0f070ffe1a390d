"""Descriptions and reports of datasets, runs, checkpoints and evaluations."""
