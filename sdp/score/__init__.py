"""Pictures to scores: `prepare` checks and plans, `stages` computes, `near` finds near-duplicates by their hashes."""
