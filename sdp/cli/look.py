"""The commands for before and after a job: config, init, inspect, audit, report and export."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdp.cli.command import JOB, JSON, LOOK, PIPELINE, SETTINGS, Arguments, UsageError, argument, command, one_of, say
from sdp.console import counted

if TYPE_CHECKING:
    from sdp.sources.captions import PictureFolder

_HOLD_OUT_FROM = 20
"""With fewer pictures, init holds out none: a tenth of them might be none at all."""
_RECIPES = {"article": "seed-table-4", "fast": "fast"}
"""The plan's preset with the samples of each recipe, at 256 px and then at 512 px."""


@command(LOOK, "config show download > download.yaml")
@JOB
@SETTINGS
@argument("--changed", "print only keys that differ from the defaults")
def config_show(args: Arguments) -> None:
    """Print a job's whole configuration as YAML, with a comment on each key."""
    from sdp.config import changed, draft, dump_yaml

    resolved, only = draft(args.job, args.config, args.set), None
    if args.changed:
        only = {*changed(type(resolved.config), resolved.config.model_dump(mode="json"))} - resolved.missing
    sys.stdout.write(dump_yaml(resolved.config, missing=resolved.missing, only=only))
    if resolved.missing:
        say(f"still to be set: {', '.join(sorted(resolved.missing))}")


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
    """Write a YAML file for each job, with the most important keys, for a laptop or a cluster."""
    if args.store and not args.store.startswith(("s3://", "gs://")):
        raise UsageError(f"init: --store: expected s3://… or gs://…, got {args.store!r}")
    if args.pictures and "://" not in args.pictures and not Path(args.pictures).is_dir():
        raise UsageError(f"init: --pictures: expected a folder of pictures, got {args.pictures!r}; check the path")
    if args.pictures and "://" not in args.pictures and not _has_pictures(Path(args.pictures)):
        raise UsageError(f"init: --pictures: {args.pictures} has no pictures, tars or Parquet files; check the path")
    if args.gpu and (args.store or args.family != "sd"):
        raise UsageError("init: --gpu: is for Stable Diffusion 2 on one machine; leave it out, or --store and --family")
    if args.recipe and not args.store:
        raise UsageError("init: --recipe: is for a cluster; leave it out, or give --store")
    from sdp import config
    from sdp.config import draft_of, dump_yaml
    from sdp.config.yaml_text import parse_document

    if args.gpu:
        from sdp.plan import one_gpu

        gpu = one_gpu.find(args.gpu)
    folder, text = Path(args.folder), Path(config.__file__).with_name("start.yaml").read_text(encoding="utf-8")
    place = "cluster" if args.store else "gpu" if args.gpu else "laptop"
    start: dict[str, Any] = parse_document(text, "start.yaml")[place]
    if args.pictures:
        del start["download"]
    if not args.caption_with:
        del start["caption"]
    if existing := [str(file) for job in start if (file := folder / f"{job}.yaml").exists()]:
        raise UsageError(f"init: FOLDER: {existing[0]} exists; choose another folder, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        places, own = _prepare(args, folder)
        if args.gpu:
            keys, summary = one_gpu.settings(gpu, start["train"] | own["train"])
            own["train"] |= keys | {"samples.prompts": (start["generate"] | own["generate"])["prompts"]}
            say(f"{summary}, by the estimate of sdp plan --memory")
        if args.recipe:
            own["train"] |= _phases(_RECIPES[args.recipe])
        several = [job for job in own if job.startswith("process")]
        for name in [name for job in start for name in (several if job == "process" else [job])]:
            job, file = name.partition("-")[0], folder / f"{name}.yaml"
            values = {k: value.format(**places) if isinstance(value, str) else value for k, value in start[job].items()}
            values |= own.get(name, {})
            file.write_text(dump_yaml(draft_of(job, values).config, only=values), encoding="utf-8")
            command = f"sdp {'submit ' if args.store else ''}{job} --config {shlex.quote(str(file))}"
            say(f"wrote {file}; edit it, then: {command}")
    except OSError as error:
        raise UsageError(
            f"init: FOLDER: {error.filename}: cannot be written ({error.strerror}); choose another folder"
        ) from error


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
            own["generate"] = {"prompts": prompts} if (prompts := [text for text in first if text]) else {}
    by_class = args.caption and "{class}" in args.caption
    if args.pictures and "://" not in args.pictures and not args.store:
        from sdp.sources.captions import gather

        seen = gather(args.pictures, args.caption)
        if seen is not None:
            say(f"{args.pictures}: {seen}")
            own["train"] = {"data.batch_size": max(1, min(16, seen.pictures // 2))}
            if seen.pictures < _HOLD_OUT_FROM:
                own["train"] |= {"data.holdout": 0.0, "evaluate.every_steps": None}
            own["generate"] = {"prompts": list(seen.examples)} if seen.examples else {}
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
    places = {
        "store": store,
        "model": f"{store}/{base}" if args.store else PINNED if args.gpu else f"builtin:{tiny}",
        "captioner": args.caption_with or "",
        "source": source or f"{store}/urls.parquet",
        "pictures": _beside(args.pictures, folder) if args.pictures else f"{store}/images",
    }
    return places, own


def _by_folder(args: Arguments, folder: Path, seen: "PictureFolder") -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Return the keys of a process job for each weight of pictures, and the further datasets of train.

    Their captions, unless these are beside pictures, are written to tables.
    """
    from sdp.sources.captions import CLASS, gather

    jobs, also, first = dict[str, dict[str, Any]](), list[Any](), 0
    folders = {"": 1} if args.caption_with else seen.weighted  # that table has the rows of one folder
    for number, (name, repeats) in enumerate(folders.items(), 1):
        place, suffix = str(Path(args.pictures, name)), "" if number == 1 else f"-{number}"
        part, keys = gather(place, args.caption) if name else seen, dict[str, Any]()
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


def _has_pictures(folder: Path) -> bool:
    from sdp.sources.pieces import TAR
    from sdp.sources.tars import PICTURES

    return any(file.suffix.lower() in (*PICTURES, TAR, ".parquet") for file in folder.rglob("*"))


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


@command(LOOK, "config schema train")
@JOB
def config_schema(args: Arguments) -> None:
    """Print the JSON schema of a job's configuration, for editors and charts."""

    from sdp.config import json_schema

    print(json.dumps(json_schema(args.job), indent=2))


@command(LOOK, "inspect s3://bucket/images")
@argument("URI", "a dataset, a run, a checkpoint or an evaluation")
@JSON
@argument("--account FILE", "write each row's outcome to this Parquet file")
@argument("--verify", "read every byte of every part")
@argument("--card FOLDER", "write a dataset card, README.md, and Croissant metadata to this folder")
def inspect(args: Arguments) -> int:
    """Describe a dataset, a training run or a checkpoint, with what is missing or damaged."""
    from sdp.datasets.inspect import write_account
    from sdp.report.page import text_of
    from sdp.report.sections import describe, identify
    from sdp.storage import open_storage

    kind, storage = identify(open_storage(args.uri))
    problems: list[str] = []
    if (option := "account" if args.account else "card" if args.card else "verify" * args.verify) and kind != "dataset":
        raise UsageError(f"inspect: --{option}: expected a dataset, got the {kind} {storage.uri}; leave it out")
    if args.account:
        rows, problems = write_account(storage, Path(args.account))
        say(f"wrote the account of {counted(rows, 'row')} to {args.account}")
    if args.card:
        from sdp.report.card import write_dataset_card

        write_dataset_card(storage, args.card)
        say(f"wrote README.md and croissant.json to {args.card}")
    sections = describe(storage, verify=args.verify, problems=problems)
    if args.json:
        plain = [section.to_json() for section in sections]
        print(json.dumps(plain if len(plain) > 1 else plain[0], indent=2, default=str))
    else:
        print("\n\n".join(map(text_of, sections)))
    return 1 if any(section.problems for section in sections) else 0


@command(LOOK, "audit s3://bucket/images s3://bucket/run --url https://example.org/cat.jpg")
@argument("URI", "datasets and training runs to search, or folders with a card", nargs="+")
@one_of(
    argument("--row N", "the image at this address", type=int),
    argument("--url URL", "the image that came from this URL"),
    argument("--file NAME", "the image file with this name, or the end of it, in the source of the first dataset"),
    argument("--sha256 HASH", "the image with this content"),
    argument(
        "--takedown FILE", "leave out the images in this list from now on: `row N`, `url U`, `sha256 H`, `file NAME`"
    ),
    argument("--card", "compare the card in each folder with the datasets that it names"),
    required=True,
)
@argument("--rewrite", "with --takedown: write the parts again without the content of all rows that are taken down")
def audit(args: Arguments) -> int:
    """Trace one image through datasets and checkpoints, take images down, or check a card."""
    if args.card:
        from sdp.report.card import check_card

        checked = [pair for uri in args.uri for pair in check_card(uri)]
        print("\n".join(problem or f"{dataset}: as the card says" for dataset, problem in checked))
        return 1 if any(problem for _, problem in checked) else 0
    if args.takedown:
        _take_down(args)
        return 0
    if args.rewrite:
        raise UsageError("audit: --rewrite: expected a list of takedowns, got none; add --takedown FILE")

    from sdp.datasets.audit import audit, summary
    from sdp.datasets.tombstones import Takedown

    names = ((kind, getattr(args, kind)) for kind in ("url", "sha256"))
    value = next((Takedown(kind, value) for kind, value in names if value is not None), None)
    row = args.row
    if args.file is not None:
        from sdp.datasets.names import row_of_file
        from sdp.datasets.output import HEAD
        from sdp.storage import open_storage

        folders = [open_storage(uri) for uri in args.uri]
        dataset = next((folder for folder in folders if folder.exists(HEAD)), None)
        if dataset is None:
            raise UsageError(f"audit: --file: expected a dataset among the URIs, got {', '.join(args.uri)}; add one")
        row = row_of_file(dataset, args.file)
    print("\n".join(map(summary, audit(args.uri, row=row, value=value))))
    return 0


def _take_down(args: Arguments) -> None:

    from sdp.datasets import tombstones
    from sdp.datasets.names import row_of_file
    from sdp.storage import open_storage

    if len(args.uri) != 1:
        raise UsageError(f"audit: --takedown: expected one dataset to keep the list beside, got {len(args.uri)}")
    try:
        text = Path(args.takedown).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"audit: --takedown: {args.takedown}: cannot be read ({error}); give a text file") from error
    takedowns = tombstones.parse_list(text, args.takedown)
    if not takedowns:
        raise UsageError(f"audit: --takedown: {args.takedown}: lists nothing; write an image per line, such as `url U`")
    storage = open_storage(args.uri[0])
    takedowns = [
        tombstones.Takedown("row", str(row_of_file(storage, each.value))) if each.kind == "file" else each
        for each in takedowns
    ]
    added = tombstones.add(storage, takedowns)
    if args.rewrite:
        from sdp.datasets.blanking import blank
        from sdp.lease import Lease

        with Lease.acquire(storage, "sdp audit --rewrite") as lease:
            parts, blanked = blank(storage, lease.confirm)
        say(f"{counted(blanked, 'row')} blank now, in {counted(parts, 'part')} that were written again")
    say(f"{counted(len(added.recorded), 'takedown')} recorded, {added.known:,} already listed")
    say(f"they match {counted(len(added.rows), 'address', 'addresses')} here, which are left out from now on")
    for takedown in added.unmatched[:20]:
        say(f"not in this dataset, and left out if it is added: {takedown.kind} {takedown.value}")


@command(LOOK, "report s3://bucket/run --out run.html")
@argument("URI", "datasets, training runs and evaluations", nargs="+")
@argument("--out FILE", "the file to write (default: NAME-report.html beside the first URI)")
@argument("--pictures N", "pictures to show of each dataset (default: 48)", type=int, default=48)
def report(args: Arguments) -> None:
    """Write an HTML report: pictures and failures of datasets, loss and history of runs."""

    from sdp.report.sections import write_report

    if args.pictures < 0:
        raise UsageError(f"report: --pictures: expected 0 or more, got {args.pictures}; 0 shows none")
    out = Path(args.out) if args.out else None
    file, count = write_report(args.uri, out, pictures=args.pictures)
    say(f"wrote {file}: {counted(count, 'section')}; open it in a browser")


@command(PIPELINE, "export s3://bucket/run ./sd2-mine")
@argument("CHECKPOINT", "a checkpoint, or a run, whose newest one is taken")
@argument("OUT", "the folder to write, new or empty, or the file; {step} in it is the step")
@one_of(
    argument("--single-file", "write OUT as one .safetensors file, which ComfyUI and AUTOMATIC1111 read"),
    argument("--lora", "write only a run's LoRA to OUT, which ComfyUI, AUTOMATIC1111 and diffusers read"),
)
@argument("--raw", "export the weights themselves, not their moving average")
@argument("--dtype DTYPE", "fp32 (default) or fp16", choices=("fp32", "fp16"), default="fp32")
@argument("--push REPOSITORY", "then upload OUT to hf://USER/NAME, which is made private if it is new")
@argument("--yes", "with --push: do not ask")
def export(args: Arguments) -> None:
    """Write a checkpoint as a folder that StableDiffusionPipeline.from_pretrained loads."""
    from sdp.model.export import export

    repository = _confirmed(args) if args.push else None
    form: Any = "lora" if args.lora else "single-file" if args.single_file else "folder"
    exported = export(args.checkpoint, args.out, ema=not args.raw, dtype=args.dtype, form=form)
    weights = "averaged" if exported.ema else "raw"
    say(f"wrote step {exported.step:,} of {exported.checkpoint}, {weights} weights in {args.dtype}, to {exported.uri}")
    if exported.newer:
        say(f"{exported.newer} of that run is newer")
    if form == "folder":
        from sdp.report.card import write_model_card

        write_model_card(exported)
    say(exported.hint)
    if repository:
        from sdp.model.hub import push

        say(f"pushed to {push(Path(exported.uri), repository)}")


def _confirmed(args: Arguments) -> str:
    """Return the repository to push to, if the user agrees."""
    match = re.fullmatch(r"hf://(\w[\w.-]*/\w[\w.-]*)", args.push)
    if not match or "://" in args.out:
        raise UsageError(f"export: --push: expected hf://USER/NAME, and a local OUT, got {args.push} and {args.out}")
    if not args.yes:
        say(f"export {args.checkpoint} and upload it to {args.push}? [y/N]", "error")
        if not sys.stdin.isatty() or sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UsageError("export: --push: expected y, got something else; nothing was written (--yes says y)")
    return match[1]
