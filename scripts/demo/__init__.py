"""The demo: captioned shapes, a server for them, and the pipeline run on both."""
