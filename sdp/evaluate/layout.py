"""The names of what lies in an evaluation."""

KIND = "features"
"""Of the datasets in GENERATED and REFERENCE: a row for each picture that was looked at."""
GENERATED, REFERENCE = "generated", "reference"
RESULT = "evaluation.json"
FEATURES, CLIP = "features", "clip"
"""Columns: the network's features of a picture, and its CLIP score."""
