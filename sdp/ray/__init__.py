"""Ray: connecting, placing work, waiting for places, and everything that Ray does not promise."""
