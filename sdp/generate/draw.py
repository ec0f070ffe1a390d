"""`sdp generate RUN PROMPT`: pictures drawn at once in this process, without a configuration or a dataset."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sdp.config import parse_into
from sdp.config.generate import GenerateConfig
from sdp.console import counted, say, starting
from sdp.errors import SdpError
from sdp.generate.layout import DRAWN
from sdp.generate.sample import image_seed
from sdp.generate.source import choose, settled
from sdp.model.checkpoints import newer_than, run_of
from sdp.storage import open_storage


def draw(
    checkpoint: str, prompts: Sequence[str], count: int, settings: Mapping[str, Any], *, dry_run: bool = False
) -> Iterator[str]:
    """Draw `count` pictures of each prompt, with a configuration's settings; yield the URI of each."""
    data = {
        "output": {"uri": DRAWN}, **settings, "source": {}, "checkpoint": checkpoint, "prompts": [*prompts],
        "images_per_prompt": count,
    }  # fmt: skip
    config = settled(parse_into(GenerateConfig, data))
    options, model = config.storage.options(), choose(config)
    run = run_of(model.uri)
    step, own = "", DRAWN
    if run != model.uri:
        step, own = f"-{model.uri.rpartition('/')[2]}", f"{run}/{DRAWN}"
    folder = open_storage(config.output.uri if "output" in settings else own, options)
    newer = newer_than(model.uri, options)
    say(f"generate: drawing with {model.uri}{f', though {newer} is newer' if newer else ''}")
    if dry_run:
        say(f"generate: it would draw {counted(count * len(config.prompts), 'picture')}, to {folder.uri}")
        return
    with starting("generate", "loading the model and drawing") as drawn:
        from sdp.generate.painter import load_painter  # imports torch
        from sdp.generate.worker import encode_png

        painter = load_painter(model, config)
        for prompt in config.prompts:
            seeds = [image_seed(config.seed, number) for number in range(count)]
            for number, picture in enumerate(painter.paint([prompt] * count, seeds)):
                if picture is None:
                    raise SdpError(f"{model.uri}: its networks returned NaN for {prompt!r}; use an earlier checkpoint")
                words = re.sub(r"\W+", "-", prompt.lower()).strip("-")[:60]
                file = f"{words}{step}-{number}.png"
                folder.publish(file, encode_png(picture))
                drawn()
                yield folder.uri_of(file)
