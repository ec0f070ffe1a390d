"""The commands for before and after a job: config, inspect, audit, report and export."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from sdp.cli.command import JOB, JSON, LOOK, PIPELINE, SETTINGS, Arguments, UsageError, argument, command, one_of, say
from sdp.console import counted, starting, visible


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


@command(LOOK, "config schema train")
@JOB
def config_schema(args: Arguments) -> None:
    """Print the JSON schema of a job's configuration, for editors and charts."""

    from sdp.config import json_schema

    print(json.dumps(json_schema(args.job), indent=2))


@command(LOOK, "inspect s3://bucket/images")
@argument("URI", "a dataset, a run, a checkpoint or an evaluation")
@JSON
@argument("--account FILE", "write each row's outcome to this file, as Parquet or, if its name ends in .csv, as CSV")
@argument("--verify", "read every byte of every part")
@argument("--trainer-hour PRICE", "of a run: the price of a trainer's hour, for the cost so far", type=float)
@argument("--card FOLDER", "write a dataset card, README.md, and Croissant metadata to this folder")
def inspect(args: Arguments) -> int:
    """Describe a dataset, a training run or a checkpoint, with what is missing or damaged."""
    from sdp.datasets.inspect import write_account
    from sdp.report.page import text_of
    from sdp.report.sections import describe, identify
    from sdp.storage import open_storage

    kind, storage = identify(open_storage(args.uri))
    problems: list[str] = []
    for option in ("account", "card", "verify"):
        if getattr(args, option) and kind != "dataset":
            raise UsageError(f"inspect: --{option}: expected a dataset, got the {kind} {storage.uri}; leave it out")
    if args.account:
        rows, problems = write_account(storage, Path(args.account))
        say(f"wrote the account of {counted(rows, 'row')} to {args.account}")
    if args.card:
        from sdp.report.card import write_dataset_card

        write_dataset_card(storage, args.card)
        say(f"wrote README.md and croissant.json to {args.card}")
    prices = {"trainer_hour": args.trainer_hour} if args.trainer_hour else None
    sections = describe(storage, verify=args.verify, problems=problems, prices=prices)
    if kind in ("run", "checkpoint") and not any("cost " in value for each in sections for _, value in each.figures):
        say("inspect: the cost is not known, since the run was given no prices; --trainer-hour PRICE counts it")
    if args.json:
        plain = [section.to_json() for section in sections]
        print(json.dumps(plain if len(plain) > 1 else plain[0], indent=2, default=str))
    else:
        print(visible("\n\n".join(map(text_of, sections))))
    return 1 if any(section.problems for section in sections) else 0


@command(LOOK, "audit s3://bucket/images s3://bucket/run --url https://example.org/cat.jpg")
@argument("URI", "datasets and training runs to search, or folders with a card", nargs="+")
@one_of(
    argument("--row N", "the image at this address", type=int),
    argument("--url URL", "the image that came from this URL"),
    argument("--file NAME", "the image file with this name, or with this end of its path (whole names), in the source"),
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
        print(visible("\n".join(problem or f"{dataset}: as the card says" for dataset, problem in checked)))
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
    print(visible("\n".join(map(summary, audit(args.uri, row=args.row, value=value, file=args.file)))))
    return 0


def _take_down(args: Arguments) -> None:

    from sdp.datasets import tombstones
    from sdp.datasets.audit import RUN, datasets_of
    from sdp.datasets.names import finder
    from sdp.storage import open_storage

    if len(args.uri) != 1:
        raise UsageError(f"audit: --takedown: expected one dataset to keep the list beside, got {len(args.uri)}")
    try:
        text = Path(args.takedown).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"audit: --takedown: {args.takedown}: cannot be read ({error}); give a text file") from error
    storage = open_storage(args.uri[0])
    if storage.exists(RUN):
        own = " or ".join(datasets_of(storage))
        raise UsageError(f"audit: --takedown: {storage.uri} is a run; name the dataset that it trains on: {own}")
    rows_of = finder(storage)
    if not (takedowns := tombstones.parse_list(text, args.takedown, lambda name: rows_of(name)[-1])):
        raise UsageError(f"audit: --takedown: {args.takedown}: lists nothing; write an image per line, such as `url U`")
    added = tombstones.add(storage, takedowns)
    if args.rewrite:
        from sdp.datasets.blanking import blank
        from sdp.lease import Lease

        with Lease.acquire(storage, "sdp audit --rewrite") as lease:
            parts, blanked = blank(storage, lease.confirm)
        say(f"{counted(blanked, 'row')} blank now, in {counted(parts, 'part')} that were written again")
    say(f"{counted(len(added.recorded), 'takedown')} recorded, {added.known:,} already listed")
    say(f"they match {counted(len(added.rows), 'address', 'addresses')} here, which are left out from now on")
    if not args.rewrite:
        say("a run leaves them out from its next epoch on; --rewrite also wipes their content from the parts")
    for takedown in added.unmatched[:20]:
        say(f"not in this dataset, and left out if it is added: {takedown.kind} {takedown.value}")


@command(LOOK, "report s3://bucket/run --out run.html")
@argument("URI", "datasets, training runs and evaluations", nargs="+")
@argument("--out FILE", "the file to write (default: NAME-report.html beside the first URI)")
@argument("--pictures N", "pictures to show of each dataset (default: 48)", type=int, default=48)
@argument("--watch", "serve a page of one run's pictures, loss and speed that reloads itself, until Ctrl-C")
@argument("--port N", "with --watch: the port on 127.0.0.1 (default: 8100)", type=int, default=8100)
def report(args: Arguments) -> None:
    """Write an HTML report on datasets and runs, or show a run while it trains."""

    if args.watch:
        if len(args.uri) != 1 or args.out:
            raise UsageError("report: --watch: expected one training run and no --out; write a report of others")
        from sdp.report.watch import WatchServer

        with WatchServer(args.uri[0], args.port) as server:
            say(f"open {server.link} in a browser; Ctrl-C ends this")
            server.serve_forever()
        return
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
    """Write a checkpoint as a folder for diffusers, as one file for ComfyUI, or as a LoRA."""
    repository = _confirmed(args) if args.push else None
    form: Any = "lora" if args.lora else "single-file" if args.single_file else "folder"
    with starting("export", "reading the checkpoint and writing it"):
        from sdp.model.export import export

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
