"""The pause before another attempt."""

import random


def backoff(retry: int, first_s: float, longest_s: float, *, spread: bool = False) -> float:
    """Return the seconds to wait before a retry, numbered from 0. Each pause is twice the previous one.

    With `spread`, the pause is a random share of that, at least half, so that many workers do not retry together.
    """
    pause_s: float = min(longest_s, first_s * 2.0 ** min(retry, 64))
    return pause_s * random.uniform(0.5, 1.0) if spread else pause_s
