"""From a table of URLs to a checked image dataset.

Read in this order: `job` (the driver), `stages` (what a runner calls), `worker` (one process of it, which fetches,
checks and writes whole units), `fetch` (libcurl in one thread), `image` (bytes to a checked picture), `plan` (the rows
that are fetched).
"""
