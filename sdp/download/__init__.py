"""From a table of URLs to a checked image dataset.

Read in this order: `job` (the pipeline on Ray), `worker` (one process of it: fetches, checks and writes whole units),
`fetch` (libcurl in one thread), `image` (bytes → a checked picture), `plan` (which rows are fetched at all).
"""
