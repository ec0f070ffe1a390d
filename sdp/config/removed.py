"""Keys and sections that earlier versions had, and what happens now without them."""

from collections.abc import Mapping

from sdp.config.base import Section
from sdp.config.jobs import JOBS

REMOVED: Mapping[str, str] = {
    "evaluate fid": "0.3: FID is not extrapolated",
    "train strategy.fp8": "0.3: linear layers compute in the precision of the others",
    "evaluate output.rows_per_file": "0.3: features are not stored",
}
"""Version and line by `JOB KEY`; docs/upgrading.md lists the same."""


def removed(path: str, model: type[Section]) -> str | None:
    """Return what to say of a key that an earlier version had; None if none had it."""
    job = next((name for name, config in JOBS.items() if config is model), "")
    parts = path.split(".")
    lines = (REMOVED.get(f"{job} {'.'.join(parts[:count])}") for count in range(len(parts), 0, -1))
    return next((f"remove it: gone since {line}" for line in lines if line), None)
