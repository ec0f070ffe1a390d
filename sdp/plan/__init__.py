"""The cost and the duration of a job, and whether it fits its GPU, before it runs."""
