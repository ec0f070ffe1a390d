"""`sdp init`: looks at pictures or URLs, and writes a YAML file for each job."""

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdp.cli.command import LOOK, Arguments, UsageError, argument, command, one_of, say
from sdp.console import counted

if TYPE_CHECKING:
    from sdp.hardware import Gpu
    from sdp.sources.captions import PictureFolder

_HOLD_OUT_FROM = 20
"""With fewer pictures, init holds out none: a tenth of them might be none at all."""
_PROMPT = 300
"""Characters of a caption that becomes a prompt."""
_RECIPES = {"article": "seed-table-4", "fast": "fast"}
"""The plan's preset with the samples of each recipe, at 256 px and then at 512 px."""


@command(LOOK, "init my-data --pictures ./photos")
@argument("FOLDER", "the folder of the YAML files and, on a laptop, of the data")
@argument("--store URI", "write files for a cluster with its data in this s3:// or gs://")
@one_of(
    argument("--urls URI", "a CSV, TSV, JSONL or Parquet table of URLs and captions (default: FOLDER/urls.parquet)"),
    argument("--pictures URI", "a folder of pictures, tars or Parquet with images, in place of URLs to download"),
)
@argument("--gpu GPU", "for Stable Diffusion 2 on one GPU: A10G, its memory (24GB), or auto for the one that is here")
@argument(
    "--family NAME", "the kind of model: sd (default), prx or klein", choices=("sd", "prx", "klein"), default="sd"
)
@argument(
    "--recipe NAME", "two phases with the article's steps, or with fewer (fast; unproven)", choices=tuple(_RECIPES)
)
@argument(
    "--caption-with MODEL",
    "also write caption.yaml: a vision-language model, a folder or hub id, describes the pictures",
)
@argument("--caption TEXT", "the caption of all pictures; {class} in it is the name of a picture's folder")
def init(args: Arguments) -> None:
    """Write a YAML file for each job, with the most important keys, for one machine or a cluster."""
    if args.store and not args.store.startswith(("s3://", "gs://")):
        raise UsageError(f"init: --store: expected s3://… or gs://…, got {args.store!r}")
    local = args.pictures and "://" not in args.pictures
    if local and not Path(args.pictures).is_dir():
        raise UsageError(f"init: --pictures: expected a folder of pictures, got {args.pictures!r}; check the path")
    if local and not _has_pictures(Path(args.pictures)):
        raise UsageError(f"init: --pictures: {args.pictures} has no pictures, tars or Parquet files; check the path")
    if args.urls and _has_pictures(Path(args.urls), tables=False):
        raise UsageError(f"init: --urls: {args.urls} is a folder of pictures; use --pictures {args.urls}")
    words = set(re.findall(r"\{(\w+)\}", args.caption or "")) - {"class"}
    if slip := difflib.get_close_matches("class", words, 1):
        raise UsageError(f"init: --caption: only {{class}} is replaced, not {{{slip[0]}}}; correct it")
    if args.gpu and (args.store or args.family != "sd"):
        raise UsageError("init: --gpu: is for Stable Diffusion 2 on one machine; leave it out, or --store and --family")
    if args.store and local:
        place = f"{args.store.rstrip('/')}/pictures"
        raise UsageError(f"init: --pictures: a cluster cannot read {args.pictures}; copy it to {place}, and give that")
    if args.recipe and not args.store:
        raise UsageError("init: --recipe: is for a cluster; leave it out, or give --store")
    from sdp import config
    from sdp.config import draft_of, dump_yaml
    from sdp.config.yaml_text import parse_document

    gpu = None
    if args.gpu:
        from sdp.plan import one_gpu

        gpu = one_gpu.find(args.gpu)
    folder, text = Path(args.folder), Path(config.__file__).with_name("start.yaml").read_text(encoding="utf-8")
    if args.store:
        place = "cluster"
    else:
        place = "gpu" if args.gpu else "laptop"
    document = parse_document(text, "start.yaml")
    start: dict[str, Any] = document[place]
    if args.pictures:
        del start["download"]
    if not args.caption_with:
        del start["caption"]
    if existing := [str(file) for job in start if (file := folder / f"{job}.yaml").exists()]:
        raise UsageError(f"init: FOLDER: {existing[0]} exists; choose another folder, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        places, own = _prepare(args, folder)
        if gpu:
            keys, summary = one_gpu.settings(gpu, start["train"] | own["train"])
            own["train"] |= keys
            say(f"{summary}, by the estimate of sdp plan --memory")
        if "samples.prompts" in start["train"]:
            own["train"]["samples.prompts"] = (start["generate"] | own["generate"])["prompts"]
        if args.recipe:
            own["train"] |= _phases(_RECIPES[args.recipe])
        several = [job for job in own if job.startswith("process")]
        for name in chain.from_iterable(several if job == "process" else [job] for job in start):
            job, file = name.partition("-")[0], folder / f"{name}.yaml"
            values = {k: value.format(**places) if isinstance(value, str) else value for k, value in start[job].items()}
            values |= own.get(name, {})
            text = dump_yaml(draft_of(job, values).config, only=values)
            if job == "train":
                text += _further(document["further"], values, args.family)
            file.write_text(text, encoding="utf-8")
            command = f"sdp {'submit ' if args.store else ''}{job} --config {shlex.quote(str(file))}"
            say(f"wrote {file}; edit it, then: {command}")
        say(f"run them in this order; {_needs(args, gpu, start['train'] | own['train'])}")
        if not args.store:
            say(f"then look: sdp report {shlex.quote(str(folder / 'run'))}")
    except OSError as error:
        cause = f"{error.filename}: cannot be written ({error.strerror})"
        raise UsageError(f"init: FOLDER: {cause}; choose another folder") from error


def _further(sections: Mapping[str, str], values: Mapping[str, Any], family: str) -> str:
    """Return the sections that train.yaml lacks, as comments with their reasons."""
    present = {key.partition(".")[0] for key in values}
    if family != "sd":  # a flow has no SNR
        present.add("objective")
    if "model.denoiser" not in values:  # a LoRA needs pretrained weights
        present.add("lora")
    lines = [f"# {text}  # {reason}" for text, reason in sections.items() if text.partition(":")[0] not in present]
    return "\n".join(["", "# Often wanted; to use a line, remove its first # and the blank:", *lines, ""])


def _needs(args: Arguments, gpu: "Gpu | None", train: Mapping[str, Any]) -> str:
    """Return the time and memory that training needs, as far as they can be known before it runs."""
    if args.store:
        return "sdp plan --config train.yaml --memory estimates the hours, the cost and the GPUs' memory of training"
    if gpu and gpu.peak_flops:
        from sdp.plan.speeds import Speeds

        speed = Speeds().train(gpu.name, train["data.resolution"])
        minutes = train["max_steps"] * train["data.global_batch_size"] / speed.value / 60
        return f"training takes {minutes:,.0f} minutes or more on an {gpu.name}, by sdp plan ({speed.source})"
    if gpu or args.family != "sd":
        return "how long training takes here cannot be known before it runs: its first line of progress says it"
    return f"training for {train['max_steps']} steps took 2 minutes and 1 GB of memory on two cores"


def _prepare(args: Arguments, folder: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Look at the pictures or URLs and write them in the form that jobs read.

    Return the URIs for start.yaml, and keys of jobs that differ from it.
    """
    store = (args.store or ".").rstrip("/")
    own: dict[str, dict[str, Any]] = {"process": {}, "train": {}, "generate": {}}
    source = args.urls and _beside(args.urls, folder)
    if args.urls and args.urls.endswith((".csv", ".tsv", ".jsonl")):
        from sdp.datasets.url_tables import as_parquet

        target = folder / "urls.parquet"
        rows, url, caption = as_parquet(args.urls, target)
        say(f"{args.urls}: {counted(rows, 'row')}, URLs in {url}, captions in {caption or 'no column'}; wrote {target}")
        source, own["download"] = "urls.parquet", {"source.url_column": url}
        own["download"] |= {"source.caption_column": caption} if caption else {}
        if rows and caption:
            import pyarrow.parquet as pq

            first = next(pq.ParquetFile(target).iter_batches(3, columns=[caption])).column(0).to_pylist()
            own["generate"] = _drawn(filter(None, first))
    by_class = args.caption and "{class}" in args.caption
    if args.pictures and "://" not in args.pictures and not args.store:
        from sdp.sources.captions import gather

        seen = gather(args.pictures, args.caption)
        if seen is not None:
            say(f"{args.pictures}: {seen}")
            own["train"] = {"data.batch_size": max(1, min(16, seen.pictures // 2))}
            if seen.pictures < _HOLD_OUT_FROM:
                own["train"] |= {"data.holdout": 0.0, "evaluate.every_steps": None}
            own["generate"] = _drawn(seen.examples)
            jobs, also = _by_folder(args, folder, seen)
            own |= jobs
            own["train"] |= {"source.also": also} if also else {}
    if by_class and "source.tables" not in own["process"]:
        raise UsageError("init: --caption: {class} stands for folders of pictures, which --pictures does not name here")
    if args.caption_with:
        table = {"uri": f"{store}/captions/parts"}
        own["process"]["source.tables"] = [*own["process"].get("source.tables", []), table]
        own["process"]["source.caption_column"] = "vlm" if args.pictures else {"caption": 1, "vlm": 9}
    if args.caption and not by_class:
        own |= {job: {**own[job], "source.caption": args.caption} for job in own if job.startswith("process")}
        own["generate"] = {"prompts": [args.caption]}
    from sdp.families.sd import PINNED

    tiny, base = {
        "sd": ("tiny", "stable-diffusion-2-base"),
        "prx": ("tiny-prx", "prx"),
        "klein": ("tiny-klein", "FLUX.2-klein-base-4B"),
    }[args.family]
    if args.store:
        model = f"{store}/{base}"
    else:
        model = PINNED if args.gpu else f"builtin:{tiny}"
    places = {
        "store": store,
        "model": model,
        "captioner": args.caption_with or "",
        "source": source or f"{store}/urls.parquet",
        "pictures": _beside(args.pictures, folder) if args.pictures else f"{store}/images",
    }
    return places, own


def _drawn(captions: Iterable[str]) -> dict[str, Any]:
    """Return the key of generate for some captions, cut and without NULs, which it refuses."""
    prompts = [caption[:_PROMPT].replace("\0", " ") for caption in captions if caption.strip()]
    return {"prompts": prompts} if prompts else {}


def _by_folder(args: Arguments, folder: Path, seen: "PictureFolder") -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Return the keys of a process job for each weight of pictures, and the further datasets of train.

    Their captions, unless these are beside pictures, are written to tables.
    """
    from sdp.sources.captions import CLASS, gather

    jobs, also, first = dict[str, dict[str, Any]](), list[Any](), 0
    folders = {"": 1} if args.caption_with else seen.weighted  # that table has the rows of one folder
    for number, (name, repeats) in enumerate(folders.items(), 1):
        place = str(Path(args.pictures, name))
        suffix = "" if number == 1 else f"-{number}"
        keys: dict[str, Any] = {}
        part = gather(place, args.caption) if name else seen
        assert part is not None
        first = first or part.pictures * repeats
        if name:
            keys["source.uri"] = _beside(place, folder)
        if suffix:
            keys["output.uri"] = f"./latents{suffix}"
            also.append({"uri": keys["output.uri"], "weight": round(part.pictures * repeats / first, 4)})
        if part.captions and (not args.caption or CLASS in args.caption):
            import pyarrow as pa
            import pyarrow.parquet as pq

            table = pa.table({"file": [*part.captions], "caption": [*part.captions.values()]})
            pq.write_table(table, folder / f"captions{suffix}.parquet")
            keys["source.tables"] = [{"uri": f"captions{suffix}.parquet", "by": "file"}]
        jobs[f"process{suffix}"] = keys
    return jobs, also


def _has_pictures(folder: Path, *, tables: bool = True) -> bool:
    from sdp.sources.pieces import TAR
    from sdp.sources.tars import PICTURES

    wanted = (*PICTURES, TAR, ".parquet") if tables else PICTURES
    return any(file.suffix.lower() in wanted for file in folder.rglob("*"))


def _beside(uri: str, folder: Path) -> str:
    """Return a path as a file in a folder names it."""
    if "://" in uri or Path(uri).is_absolute():
        return uri
    return os.path.relpath(Path(uri), folder)


def _phases(preset: str) -> dict[str, int]:
    """Return the keys of two phases with the samples of a plan's preset."""
    from sdp.config.train import RECIPE_BATCH
    from sdp.plan.prices import reference

    one, two = reference()["presets"][preset]["rows"][0]["stages"]
    steps = {key: stage["samples"] // RECIPE_BATCH for key, stage in (("max_steps", one), ("phase_2.max_steps", two))}
    return {**steps, "phase_2.resolution": 512}
