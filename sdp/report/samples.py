"""The pictures that were drawn while training went on, as the report of a run shows them."""

import re

from sdp.datasets.fields import BadField, Fields
from sdp.datasets.output import read_json
from sdp.errors import DatasetError, NotFound
from sdp.report.page import Block, Strips, Tile
from sdp.storage import Storage

_PROMPTS = re.compile(r"^samples/step-(\d{9,18})/prompts\.json$")
_PICTURE = r"\d{3,9}\.png"
_STEPS = 6
"""Of which there are pictures of each prompt."""


def samples_blocks(run: Storage, pictures: int, problems: list[str]) -> list[Block]:
    """Prompt by prompt, from the first step to the last; nothing where none were drawn."""
    whole = sorted(int(found[1]) for name in run.names("samples/") if (found := _PROMPTS.match(name)))
    if not whole:
        return []
    count = min(_STEPS, len(whole))
    steps = [whole[round(n * (len(whole) - 1) / max(1, count - 1))] for n in range(count)] if count > 1 else whole[-1:]
    told = {step: _prompts(run, step, problems) for step in steps}
    names = sorted({name for drawn in told.values() for name in drawn})[: max(1, pictures // len(steps))]
    rows = [
        (
            next(told[step][name] for step in steps if name in told[step]),
            [_tile(run, step, name, told[step][name]) for step in steps if name in told[step]],
        )
        for name in names
    ]
    return [Strips("Drawn while training went on", rows)]


def _prompts(run: Storage, step: int, problems: list[str]) -> dict[str, str]:
    """Which picture is of which prompt."""
    name = f"{_folder(step)}/prompts.json"
    try:
        found = Fields({"prompts": read_json(run, name)}).texts("prompts")
        return {picture: prompt for picture, prompt in found.items() if re.fullmatch(_PICTURE, picture)}
    except BadField as error:
        problems.append(f"{run.uri_of(name)}: {error}; delete it")
    except DatasetError as error:
        problems.append(str(error))
    return {}


def _tile(run: Storage, step: int, name: str, prompt: str) -> Tile:
    try:
        data = run.read(f"{_folder(step)}/{name}")
    except NotFound:  # somebody has tidied up
        return Tile(None, prompt, f"step {step:,}")
    return Tile(data, prompt, f"step {step:,}")


def _folder(step: int) -> str:
    return f"samples/step-{step:09d}"
