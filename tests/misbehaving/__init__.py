"""An image server for tests that misbehaves on request."""
