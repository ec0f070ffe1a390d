"""The number of encoders that the trainers need, from the pace of each when neither waits for the other."""

import math

_TOLERANCE = 0.02
"""Share of an encoder that may be missing before another one is started."""


def encoders_needed(trainers: float, encoder: float, least: int, most: int) -> tuple[int, str]:
    """Return the number of encoders to run, and the reason, from both sides' images per second.

    Both paces leave out waiting, so the number of encoders during the measurement does not matter.
    """
    needed = math.ceil(trainers / encoder - _TOLERANCE)
    count = max(least, min(most, needed))
    text = (
        f"{count} encoder{'s' * (count != 1)}: the trainers take {trainers:,.1f} img/s, one encoder makes "
        f"{encoder:,.1f}, which is {trainers / encoder:.2f} encoders"
    )
    if needed > most:
        text += f" (encode.num_workers.max is {most})"
    elif needed < least:
        text += f" (encode.num_workers.min is {least})"
    return count, text
