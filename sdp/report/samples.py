"""The pictures that were drawn while training went on, as the report of a run shows them."""

import json
import re
from typing import Any

from sdp.report.page import Block, Gallery, Tile
from sdp.storage import Storage

_PROMPTS = re.compile(r"^samples/step-(\d{9,})/prompts\.json$")
_STEPS = 6
"""Of which there are pictures of each prompt."""


def samples_blocks(run: Storage, pictures: int) -> list[Block]:
    """Prompt by prompt, from the first step to the last; nothing where none were drawn."""
    whole = sorted(int(found[1]) for name in run.names("samples/") if (found := _PROMPTS.match(name)))
    if not whole:
        return []
    count = min(_STEPS, len(whole))
    steps = [whole[round(n * (len(whole) - 1) / max(1, count - 1))] for n in range(count)] if count > 1 else whole[-1:]
    told: dict[int, dict[str, Any]] = {step: json.loads(run.read(f"{_folder(step)}/prompts.json")) for step in steps}
    names = sorted({name for drawn in told.values() for name in drawn})[: max(1, pictures // len(steps))]
    tiles = [
        Tile(run.read(f"{_folder(step)}/{name}"), str(told[step][name]), f"step {step:,}")
        for name in names
        for step in steps
        if name in told[step]
    ]
    return [Gallery("Drawn while training went on", tiles)]


def _folder(step: int) -> str:
    return f"samples/step-{step:09d}"
