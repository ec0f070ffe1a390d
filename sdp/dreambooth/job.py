"""`sdp dreambooth`: runs the other jobs one after another, each in its own folder of the output.

These folders are the complete state. The same command continues with the first step that is not done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import getitem
from pathlib import Path
from typing import Any

from sdp.config import keys, parse
from sdp.config.dreambooth import DreamboothConfig
from sdp.config.train import LoraConfig
from sdp.console import counted, say, table
from sdp.datasets.output import HEAD
from sdp.dreambooth.template import fill
from sdp.errors import UserError
from sdp.families.sd import SD
from sdp.model import sources
from sdp.sources.pictures import Selection, open_pictures
from sdp.storage import open_storage

CLASS_LATENTS, OWN_LATENTS, RUN, PICTURES = "class-latents", "subject-latents", "run", "pictures"
"""Folders of the output that are named here; steps.yaml names all of the steps'."""
PAGE = "report.html"
_DRIFT = 50
"""Limit on the pictures of the class that are drawn after training, to measure how far the class has drifted."""


@dataclass(frozen=True)
class Step:
    """One job of the sequence."""

    title: str
    job: str
    config: Any
    """The job's configuration."""


def run(config: DreamboothConfig, *, dry_run: bool = False) -> Any:
    """Run the remaining steps, or print all steps in a dry run; return the result of training if it was stopped."""
    _check(config)
    steps = steps_of(config)  # errors in any of them appear before the first starts
    if dry_run:
        say(table([(f"{n}. {s.job}", f"{s.title}: {s.config.output.uri}") for n, s in enumerate(steps, 1)]))
        return None
    for number, step in enumerate(steps, 1):
        say(f"dreambooth: {number} of {len(steps)}: {step.title}")
        job: Callable[..., Any] = import_module(f"sdp.{step.job}.job").run
        result = job(step.config)
        if str(getattr(result, "reason", "")).startswith("asked to stop"):
            return result
    page = _report(config, steps)
    say(table(_next_steps(config, page)))
    return None


def steps_of(config: DreamboothConfig) -> tuple[Step, ...]:
    """Return the jobs with their configurations, from steps.yaml."""
    folder, prior, measured = config.output.uri.rstrip("/"), config.prior, config.evaluate
    dumped = config.model_dump(mode="json")
    own = {"uri": f"{folder}/{OWN_LATENTS}"}
    # An epoch is one pass over the class, in which the subject's pictures repeat. The mean over both is, up to a
    # factor, DreamBooth's loss: the subject's plus the class's.
    both = {"uri": f"{folder}/{CLASS_LATENTS}", "also": [{**own, "weight": 1.0}]}
    workers = config.scaling.model_dump(mode="json")
    compares_class = measured.features is not None and prior.prompt is not None
    values = {
        **dumped,
        **{key.path: reduce(getitem, key.path.split("."), dumped) for key in keys(DreamboothConfig)},
        "folder": folder,
        "workers": workers,
        "encoders": {**workers, "dtype": config.precision},
        "class_pictures": counted(prior.pictures, "picture"),
        "trained": own if prior.prompt is None else both,
        "training_steps": counted(config.max_steps, "step"),
        "rate": config.learning_rate or (5e-6 if config.lora.rank is None else 1e-4),
        "checkpoint_steps": max(1, config.max_steps // 4),
        "prompts": list(config.draw.prompts or (config.source.caption,)),
        "compared": measured.clip or measured.features,
        "reference": config.source.uri if measured.features is not None else None,
        "drift": min(prior.pictures, _DRIFT) if compares_class else None,
    }
    steps = fill(Path(__file__).with_name("steps.yaml"), values)
    wanted = [step for step in steps if step.get("when", True)]
    return tuple(Step(step["title"], step["job"], parse(step["job"], step["config"])) for step in wanted)


def _check(config: DreamboothConfig) -> None:
    """Check what is cheap to check: that there are pictures of the subject, and the model."""
    options = config.storage.options()
    open_pictures("source", config.source.uri, options, Selection(text=config.source.caption))
    model = sources.check(config.model.source, storage=options)
    if config.lora.rank is not None:
        from sdp.model.trained import refuse_lora  # imports torch

        refuse_lora(LoraConfig(rank=config.lora.rank), model, options, text_encoder=config.train_text_encoder)
    if open_storage(config.output.uri, options).exists(HEAD):
        raise UserError(f"output.uri: {config.output.uri} is a dataset; choose a folder for this job alone")


def _report(config: DreamboothConfig, steps: Sequence[Step]) -> str:
    """Write the report on all results; return its URI."""
    from sdp.report.page import page_of
    from sdp.report.sections import gather

    output = open_storage(config.output.uri, config.storage.options())
    results = [step.config.output.uri for step in steps]
    output.publish(PAGE, page_of(config.source.caption, gather(results, output.options)))
    return output.uri_of(PAGE)


def _next_steps(config: DreamboothConfig, page: str) -> list[tuple[str, str]]:
    """Return the command or URI for each use of the results."""
    folder = config.output.uri.rstrip("/")
    family = sources.family(config.model.source, storage=config.storage.options())
    target = "subject.safetensors --lora" if config.lora.rank is not None and family.lora_names else "FOLDER"
    comfy = ("for ComfyUI", f"sdp export {folder}/{RUN} subject.safetensors --single-file --raw")
    return [
        ("pictures", f"{folder}/{PICTURES}/images"),
        ("for diffusers", f"sdp export {folder}/{RUN} {target} --raw"),
        *([comfy] if family is SD else []),
        ("report", page),
    ]
