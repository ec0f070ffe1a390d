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
    others = [count - 1, count + 1] if count > 1 else [count + 1]
    return count, f"{text}; {'; '.join(f'with {n} {_effect(n * encoder, trainers)}' for n in (count, *others))}"


def _effect(made: float, taken: float) -> str:
    if made < taken:
        return f"trainers wait {100 * (1 - made / taken):.0f} % of their time"
    return f"encoders idle {100 * (1 - taken / made):.0f} %"
