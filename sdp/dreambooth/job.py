"""`sdp dreambooth`: runs the other jobs one after another, each in its own folder of the output.

These folders are the complete state. The same command continues with the first step that is not done.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from sdp.config import JobConfig, parse
from sdp.config.dreambooth import DreamboothConfig
from sdp.console import counted, say, table
from sdp.datasets.manifest import open_dataset
from sdp.datasets.output import HEAD
from sdp.datasets.parts import read_rows
from sdp.encode.pictures import open_pictures
from sdp.encode.recipe import Recipe
from sdp.encode.transform import SandboxedCrops
from sdp.errors import UserError
from sdp.imaging import RowError
from sdp.model import sources
from sdp.model.layout import INDEX
from sdp.plan.make import Drawing
from sdp.storage import StorageOptions, open_source, open_storage

if TYPE_CHECKING:
    from sdp.report.page import Section

MODEL, CLASS, CLASS_LATENTS, OWN_LATENTS = "model", "class", "class-latents", "subject-latents"
RUN, PICTURES, EVALUATION, PAGE = "run", "pictures", "evaluation", "report.html"
CLASS_AFTER, DRIFT = "class-after", "class-evaluation"
_DRIFT = 50
"""Limit on the pictures of the class that are drawn after training, to measure how far the class has drifted."""
_SHOWN = 8
"""Pictures in each row of the page."""
_CHECKED = 100
"""Limit on the subject's pictures that are decoded before the first step."""


@dataclass(frozen=True)
class Step:
    """One job of the sequence."""

    title: str
    job: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class DreamboothSummary:
    """The result of a run."""

    steps: tuple[Step, ...]


def run(config: DreamboothConfig, *, dry_run: bool = False) -> DreamboothSummary:
    """Run the remaining steps, or print all steps in a dry run."""
    _check(config)
    if not dry_run:
        config = keep_model(config)
    steps = steps_of(config)
    parsed = [parse(step.job, step.config) for step in steps]  # errors appear before the first step starts
    if dry_run:
        say(table([(f"{n}. {s.job}", f"{s.title}: {s.config['output']['uri']}") for n, s in enumerate(steps, 1)]))
        return DreamboothSummary(steps)
    for number, (step, job_config) in enumerate(zip(steps, parsed, strict=True), 1):
        say(f"dreambooth: {number} of {len(steps)}: {step.title}")
        job: Callable[..., Any] = import_module(f"sdp.{step.job}.job").run
        result = job(job_config)
        if str(getattr(result, "reason", "")).startswith("asked to stop"):
            signal_name = result.reason.partition(": ")[2]
            raise KeyboardInterrupt(signal_name)
    page = _report(config, steps)
    say(table(_next_steps(config, page)))
    return DreamboothSummary(steps)


def keep_model(config: DreamboothConfig) -> DreamboothConfig:
    """Copy a hub model to the output, so that no worker asks the hub; return a configuration with the copy."""
    options = config.storage.options()
    source = sources.parse(config.model.source)
    if source.kind != "hub":
        return config
    copy = open_storage(config.output.uri, options).child(MODEL)
    if not copy.exists(INDEX):
        say(f"dreambooth: copying {source} to {copy.uri}")
        path = sources.resolve(source, storage=options).path
        # The index comes last, since its presence marks a complete copy.
        for name in sorted(sources.present(path), key=lambda name: (name == INDEX, name)):
            copy.publish(name, (path / name).read_bytes())
    return config.replaced(model=config.model.replaced(source=copy.uri))


def steps_of(config: DreamboothConfig) -> tuple[Step, ...]:
    """Return the jobs with their configurations."""
    folder = config.output.uri.rstrip("/")
    names = (CLASS, CLASS_LATENTS, OWN_LATENTS, RUN, PICTURES, EVALUATION, CLASS_AFTER, DRIFT)
    uris = {name: f"{folder}/{name}" for name in names}
    prior, scaling = config.prior, config.scaling.model_dump(mode="json", exclude={"gpus_per_worker"})
    common = {"storage": config.storage.model_dump(mode="json")}
    sampler = {"steps": config.draw.steps, "guidance_scale": config.draw.guidance_scale}

    def draw(title: str, prompts: Sequence[str], count: int, checkpoint: str, output: str, **more: Any) -> Step:
        settings = {
            **common,
            "prompts": list(prompts),
            "images_per_prompt": count,
            "checkpoint": checkpoint,
            "output": {"uri": output, **more},
            "resolution": config.resolution,
            "seed": config.seed,
            "sampler": sampler,
            "precision": config.precision,
            "scaling": scaling,
        }
        return Step(title, "generate", settings)

    def compare(title: str, pictures: str, reference: str, output: str, **more: Any) -> Step:
        features = config.evaluate.features
        settings = {
            **common,
            "source": {"uri": pictures},
            "reference": {"uri": reference if features is not None else None},
            "output": {"uri": output},
            "features": {"model": features},
            "scaling": scaling,
            **more,
        }
        return Step(title, "evaluate", settings)

    def process(title: str, source: Mapping[str, Any], output: str, **more: Any) -> Step:
        settings = {
            **common,
            "source": source,
            "output": {"uri": output},
            "model": {"source": config.model.source},
            "resolutions": [config.resolution],
            "seed": config.seed,
            "encode": {**scaling, "dtype": config.precision},
            **more,
        }
        return Step(title, "process", settings)

    own = {"uri": config.source.uri, "caption": config.source.caption}
    steps = [process("encode the subject's pictures", own, uris[OWN_LATENTS], limit=config.limit)]
    trained: dict[str, Any] = {"uri": uris[OWN_LATENTS]}
    if prior.prompt is not None:
        title = f"draw {counted(prior.pictures, 'picture')} of the class"
        source = config.model.source
        steps.append(draw(title, [prior.prompt], prior.pictures, source, uris[CLASS], image_files=False))
        steps.append(process("encode the pictures of the class", {"uri": uris[CLASS]}, uris[CLASS_LATENTS]))
        # An epoch is one pass over the class, in which the subject's pictures repeat. The mean over both equals, up to
        # a factor, DreamBooth's loss: the subject's plus `weight` times the class's.
        trained = {"uri": uris[CLASS_LATENTS], "also": [{"uri": uris[OWN_LATENTS], "weight": 1 / prior.weight}]}
    rate = config.learning_rate or (5e-6 if config.lora.rank is None else 1e-4)
    train = {
        **common,
        "source": trained,
        "output": {"uri": uris[RUN]},
        "model": {
            "source": config.model.source,
            "unet": "pretrained",
            "train_text_encoder": config.train_text_encoder,
        },
        "lora": config.lora.model_dump(mode="json"),
        "data": {"resolution": config.resolution, "batch_size": config.batch_size},
        "max_steps": config.max_steps,
        "objective": {"caption_dropout": 0.0},
        "optimizer": {"kind": config.optimizer, "learning_rate": rate, "warmup_steps": 0, "clip_norm": 1.0},
        "ema": {"decay": None},
        "precision": config.precision,
        "strategy": {"activation_checkpointing": config.activation_checkpointing},
        "checkpoint": {"every_steps": max(1, config.max_steps // 4)},
        "scaling": {**scaling, "gpus_per_worker": config.scaling.gpus_per_worker},
        "seed": config.seed,
    }
    steps.append(Step(f"train {counted(config.max_steps, 'step')}", "train", train))
    prompts, count = config.draw.prompts or (config.source.caption,), config.draw.images_per_prompt
    steps.append(draw("draw the subject", prompts, count, uris[RUN], uris[PICTURES]))
    if config.evaluate.clip is not None or config.evaluate.features is not None:
        title, clip = "compare the drawn pictures with the subject's", {"model": config.evaluate.clip}
        steps.append(compare(title, uris[PICTURES], config.source.uri, uris[EVALUATION], clip=clip))
    if config.evaluate.features is not None and prior.prompt is not None:
        count = min(prior.pictures, _DRIFT)
        steps.append(draw("draw the class again", [prior.prompt], count, uris[RUN], uris[CLASS_AFTER]))
        steps.append(compare("compare the class with its first pictures", uris[CLASS_AFTER], uris[CLASS], uris[DRIFT]))
    return tuple(steps)


def training_of(config: DreamboothConfig) -> JobConfig:
    """Return the configuration of the training step; its number of rows is that of the class's pictures."""
    train = next(step.config for step in steps_of(config) if step.job == "train")
    return parse("train", {**train, "limit": config.prior.pictures if config.prior.prompt is not None else None})


def drawing_of(config: DreamboothConfig) -> Drawing:
    """Return what the steps draw, for a plan."""
    draws = [step.config for step in steps_of(config) if step.job == "generate"]
    pictures = sum(len(draw["prompts"]) * draw["images_per_prompt"] for draw in draws)
    return Drawing(pictures, config.draw.steps * (2 if config.draw.guidance_scale > 1 else 1))


def _check(config: DreamboothConfig) -> None:
    """Check what is cheap to check: the subject's pictures and the model."""
    options = config.storage.options()
    pictures = open_pictures("source", config.source.uri, options, text=config.source.caption)
    crop = SandboxedCrops(Recipe((config.resolution,)))
    for file in pictures.files[:_CHECKED] if pictures.kind == "pictures" else ():
        try:
            crop(open_source(file.uri, options).read(), 0)
        except RowError as error:
            cause = f"{error.reason} ({error.detail})" if error.detail else error.reason
            raise UserError(f"source.uri: {file.uri}: {cause}; replace or remove it") from error
    model = sources.check(config.model.source, storage=options)
    if config.lora.rank is not None:
        from sdp.model.trained import refuse_lora  # imports torch

        refuse_lora(config.lora, model, options, text_encoder=config.train_text_encoder)
    if open_storage(config.output.uri, options).exists(HEAD):
        raise UserError(f"output.uri: {config.output.uri} is a dataset; choose a folder for this job alone")


def _report(config: DreamboothConfig, steps: Sequence[Step]) -> str:
    """Write the report on all results; return its URI."""
    from sdp.report.page import write_page
    from sdp.report.sections import gather

    output = open_storage(config.output.uri, config.storage.options())
    results = [str(step.config["output"]["uri"]) for step in steps]
    with TemporaryDirectory(prefix="sdp-dreambooth-") as scratch:
        file = Path(scratch) / PAGE
        write_page(config.source.caption, [_side_by_side(config), *gather(results, output.options)], file)
        output.publish(PAGE, file.read_bytes())
    return output.uri_of(PAGE)


def _side_by_side(config: DreamboothConfig) -> "Section":
    """Return a section with the subject's own pictures above the drawn ones."""
    from sdp.report.data import small
    from sdp.report.page import Section, Strips, Tile

    options, folder = config.storage.options(), f"{config.output.uri.rstrip('/')}/{PICTURES}"
    own = open_pictures("source", config.source.uri, options, text=config.source.caption)
    files = own.files[:_SHOWN] if own.kind == "pictures" else ()
    rows: dict[str, list[Tile]] = {
        config.source.uri: [Tile(small(open_source(file.uri, options).read()), file.uri) for file in files]
    }
    for prompt, picture in drawn(folder, options):
        rows.setdefault(prompt, []).append(Tile(picture, prompt))
    strips = Strips("Own and drawn pictures", [(name, tiles[:_SHOWN]) for name, tiles in rows.items() if tiles])
    return Section("Subject", folder, f"{config.source.caption}, learnt from {own.size}.", blocks=[strips])


def drawn(samples: str, options: StorageOptions | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield the prompts and pictures of a samples dataset."""
    dataset = open_dataset(open_storage(samples, options), "samples")
    for part in dataset.parts.filter(pc.field("written") > 0)["path"].to_pylist():
        for row in read_rows(dataset.storage, part, ["prompt", "image"]).to_pylist():
            yield row["prompt"], row["image"]


def _next_steps(config: DreamboothConfig, page: str) -> list[tuple[str, str]]:
    """Return the command or URI for each use of the results."""
    folder = config.output.uri.rstrip("/")
    target = "FOLDER" if config.lora.rank is None else "subject.safetensors --lora"
    return [
        ("pictures", f"{folder}/{PICTURES}/images"),
        ("for diffusers", f"sdp export {folder}/{RUN} {target} --raw"),
        ("for ComfyUI", f"sdp export {folder}/{RUN} subject.safetensors --single-file --raw"),
        ("report", page),
    ]
