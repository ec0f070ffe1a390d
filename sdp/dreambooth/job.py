"""`sdp dreambooth`: the other jobs one after another, each in its own folder of the output.

Nothing is remembered but what these folders hold: the same command again goes on with the step that is not done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sdp.config import JobConfig, parse
from sdp.config.dreambooth import DreamboothConfig
from sdp.console import say, table
from sdp.datasets.output import HEAD
from sdp.encode.pictures import open_pictures
from sdp.encode.recipe import Recipe
from sdp.encode.transform import SandboxedCrops
from sdp.errors import UserError
from sdp.imaging import RowError
from sdp.model import sources
from sdp.storage import open_source, open_storage

CLASS, CLASS_LATENTS, OWN_LATENTS = "class", "class-latents", "subject-latents"
RUN, PICTURES, EVALUATION, PAGE = "run", "pictures", "evaluation", "report.html"
_LOOKED_AT = 100
"""The most pictures of a subject that are decoded before anything begins."""


@dataclass(frozen=True)
class Step:
    """One job of the way."""

    what: str
    job: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """The result of a run."""

    steps: tuple[Step, ...]


def run(config: DreamboothConfig, *, dry_run: bool = False) -> Summary:
    """Take the steps that are left, or say what they are."""
    _look(config)
    steps = steps_of(config)
    parsed = [parse(step.job, step.config) for step in steps]  # all that can be wrong is told before anything is taken
    if dry_run:
        say(table([(f"{n}. {s.job}", f"{s.what}: {s.config['output']['uri']}") for n, s in enumerate(steps, 1)]))
        return Summary(steps)
    for number, (step, told) in enumerate(zip(steps, parsed, strict=True), 1):
        say(f"dreambooth: {number} of {len(steps)}: {step.what}")
        job: Callable[..., Any] = import_module(f"sdp.{step.job}.job").run
        result = job(told)
        if str(getattr(result, "reason", "")).startswith("asked to stop"):
            signal_name = result.reason.partition(": ")[2]
            raise KeyboardInterrupt(signal_name)
    page = _report(config, steps)
    say(table(_next(config, page)))
    return Summary(steps)


def steps_of(config: DreamboothConfig) -> tuple[Step, ...]:
    """The jobs and what each is told."""
    folder = config.output.uri.rstrip("/")
    at = {name: f"{folder}/{name}" for name in (CLASS, CLASS_LATENTS, OWN_LATENTS, RUN, PICTURES, EVALUATION)}
    prior, scaling = config.prior, config.scaling.model_dump(mode="json")
    common = {"storage": config.storage.model_dump(mode="json")}
    sampler = {"steps": config.draw.steps, "guidance_scale": config.draw.guidance_scale}
    drawing = {
        **common,
        "resolution": config.resolution,
        "seed": config.seed,
        "sampler": sampler,
        "precision": config.precision,
        "scaling": scaling,
    }

    def process(source: Mapping[str, Any], output: str) -> dict[str, Any]:
        return {
            **common,
            "source": source,
            "output": {"uri": output},
            "model": {"source": config.model.source},
            "resolutions": [config.resolution],
            "seed": config.seed,
            "encode": {**scaling, "dtype": config.precision},
        }

    own = {"uri": config.source.uri, "caption": config.source.caption}
    encode_own = {**process(own, at[OWN_LATENTS]), "limit": config.limit}
    steps = [Step("encode the subject's pictures", "process", encode_own)]
    trained: dict[str, Any] = {"uri": at[OWN_LATENTS]}
    if prior.prompt is not None:
        draw = {
            **drawing,
            "prompts": [prior.prompt],
            "images_per_prompt": prior.pictures,
            "checkpoint": config.model.source,
            "output": {"uri": at[CLASS], "image_files": False},
        }
        steps.append(Step(f"draw {prior.pictures} pictures of the class", "generate", draw))
        steps.append(Step("encode the class", "process", process({"uri": at[CLASS]}, at[CLASS_LATENTS])))
        # An epoch is one pass over the class, and the subject's go round. The mean over both is what DreamBooth
        # calls the loss of the subject plus `weight` times that of the class, up to a factor.
        trained = {"uri": at[CLASS_LATENTS], "also": [{"uri": at[OWN_LATENTS], "weight": 1 / prior.weight}]}
    rate = config.learning_rate or (5e-6 if config.lora.rank is None else 1e-4)
    train = {
        **common,
        "source": trained,
        "output": {"uri": at[RUN]},
        "model": {"source": config.model.source, "unet": "pretrained"},
        "lora": config.lora.model_dump(mode="json"),
        "data": {"resolution": config.resolution, "batch_size": config.batch_size},
        "max_steps": config.max_steps,
        "objective": {"caption_dropout": 0.0},
        "optimizer": {"learning_rate": rate, "warmup_steps": 0, "clip_norm": 1.0},
        "ema": {"decay": None},
        "precision": config.precision,
        "strategy": {"activation_checkpointing": config.activation_checkpointing},
        "checkpoint": {"every_steps": max(1, config.max_steps // 4)},
        "scaling": scaling,
        "seed": config.seed,
    }
    steps.append(Step(f"train {config.max_steps} steps", "train", train))
    pictures = {
        **drawing,
        "prompts": list(config.draw.prompts or (config.source.caption,)),
        "images_per_prompt": config.draw.images_per_prompt,
        "checkpoint": at[RUN],
        "output": {"uri": at[PICTURES]},
    }
    steps.append(Step("draw the subject", "generate", pictures))
    if config.evaluate.clip is not None or config.evaluate.features is not None:
        evaluate = {
            **common,
            "source": {"uri": at[PICTURES]},
            "reference": {"uri": config.source.uri if config.evaluate.features is not None else None},
            "output": {"uri": at[EVALUATION]},
            "clip": {"model": config.evaluate.clip},
            "features": {"model": config.evaluate.features},
            "scaling": scaling,
        }
        steps.append(Step("compare them with the subject's pictures", "evaluate", evaluate))
    return tuple(steps)


def training_of(config: DreamboothConfig) -> JobConfig:
    """Return the configuration of the training among the steps, with as many rows as it draws of the class."""
    train = next(step.config for step in steps_of(config) if step.job == "train")
    return parse("train", {**train, "limit": config.prior.pictures if config.prior.prompt is not None else None})


def _look(config: DreamboothConfig) -> None:
    """Look at what is cheap to look at: the subject's pictures and the model."""
    options = config.storage.options()
    pictures = open_pictures("source", config.source.uri, options, text=config.source.caption)
    crop = SandboxedCrops(Recipe((config.resolution,)))
    for file in pictures.files[:_LOOKED_AT] if pictures.kind == "pictures" else ():
        try:
            crop(open_source(file.uri, options).read(), 0)
        except RowError as error:
            what = f"{error.reason} ({error.detail})" if error.detail else error.reason
            raise UserError(f"source.uri: {file.uri}: {what}; replace or remove it") from error
    model = sources.check(config.model.source, storage=options)
    if config.lora.rank is not None:
        from sdp.model.trained import refuse_lora  # brings torch

        refuse_lora(config.lora, model, options)
    if open_storage(config.output.uri, options).exists(HEAD):
        raise UserError(f"output.uri: {config.output.uri} is a dataset; choose a folder of its own")


def _report(config: DreamboothConfig, steps: Sequence[Step]) -> str:
    """Write the page on all that was made; return where it is."""
    from sdp.report.write import write_report

    output = open_storage(config.output.uri, config.storage.options())
    made = [str(step.config["output"]["uri"]) for step in steps]
    with TemporaryDirectory(prefix="sdp-dreambooth-") as scratch:
        file, _ = write_report(made, Path(scratch) / PAGE, title=config.source.caption, options=output.options)
        output.publish(PAGE, file.read_bytes())
    return output.uri_of(PAGE)


def _next(config: DreamboothConfig, page: str) -> list[tuple[str, str]]:
    folder = config.output.uri.rstrip("/")
    lines = [("pictures", f"{folder}/{PICTURES}/images")]
    if config.lora.rank is not None:
        lines.append(("for diffusers", f"sdp export {folder}/{RUN} subject.safetensors --lora --raw"))
    else:
        lines.append(("for diffusers", f"sdp export {folder}/{RUN} FOLDER --raw"))
    lines.append(("for ComfyUI", f"sdp export {folder}/{RUN} subject.safetensors --single-file --raw"))
    return [*lines, ("look at it", page)]
