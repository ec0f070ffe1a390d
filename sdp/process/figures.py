"""What a run has come to, in numbers: what its progress line, its summary and its metrics speak of."""

from collections import Counter
from dataclasses import dataclass, field

STARVED = 0.1
"""The share of their time that encoders may wait before transforms are called the bottleneck."""


@dataclass(slots=True)
class Figures:
    """Counts and seconds of one run; seconds of workers are summed over them."""

    rows_total: int = 0
    """Addresses to be worked off by this run."""
    images_total: int = 0
    """About the images that they come to."""
    rows_done: int = 0
    """Addresses of units that are written."""
    written: int = 0
    filtered: int = 0
    failed: int = 0
    images_transformed: int = 0
    images_encoded: int = 0
    bytes_written: int = 0
    parts_written: int = 0
    reading_s: float = 0.0
    transform_s: float = 0.0
    busy_s: float = 0.0
    """Encoders: at work."""
    idle_s: float = 0.0
    """Encoders: waiting for input, from their first input on."""
    transforms: int = 0
    """At the moment: transforms under way."""
    transforms_most: int = 0
    ready: int = 0
    """At the moment: pieces that wait for an encoder."""
    encoders: int = 0
    """At the moment: encoders at work."""
    encoders_most: int = 0
    deaths: int = 0
    """Workers that died and were replaced."""
    fitting: dict[int, int] = field(default_factory=dict)
    """Of batches that memory had no room for: the size that they were split to, by resolution (or TEXT)."""
    elapsed_s: float = 0.0
    transformed_on: Counter[str] = field(default_factory=Counter)
    encoded_on: Counter[str] = field(default_factory=Counter)
    """Images by the node that worked on them."""

    @property
    def wait(self) -> float:
        """The share of the encoders' time that they waited for input."""
        return self.idle_s / (self.busy_s + self.idle_s) if self.busy_s + self.idle_s else 0.0

    @property
    def bytes_per_image(self) -> float:
        return self.bytes_written / self.written if self.written else 0.0


def suggestion(figures: Figures, concurrency: int | None) -> str:
    """The bottleneck by name, and what would help."""
    wait = f"{figures.wait:.0%}".replace("%", " %")
    if figures.wait < STARVED:
        return f"the encoders were the bottleneck (they waited {wait} for input): raise encode.num_workers or add GPUs"
    if figures.reading_s > figures.transform_s:
        return (
            f"encoders waited {wait} for input, transforms mostly for the source's storage: raise transform.concurrency"
        )
    if concurrency is not None and figures.transforms_most >= concurrency:
        return f"encoders waited {wait} for input: raise transform.concurrency (now {concurrency}) or add CPU nodes"
    return f"encoders waited {wait} for input: add CPU nodes, or take fewer encoders"
