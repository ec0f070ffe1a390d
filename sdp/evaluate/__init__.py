"""Evaluate: how good pictures are, and how well a checkpoint predicts what it has not seen."""
