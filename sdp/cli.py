"""The commands. No work is done here, and nothing heavy is imported before a command runs.

argparse rather than a nicer library: importing one of those takes a third of a second on a busy machine, which is all
that `sdp --help`, a mistyped option or a mistyped configuration may take.

To add a command, write a function that takes the parsed arguments, and a line in COMMANDS.
"""

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sdp.errors import SdpError, UserError

JOBS = ("download", "process", "train", "generate", "evaluate", "dreambooth")

_PLANNED = ("train", "process", "download", "dreambooth")
_PRESETS = ("seed-table-2", "seed-table-4")
_HAVE = ("nothing", "images", "latents")

PIPELINE = "The pipeline, in its order"
LOOK = "Look before and after"
CLUSTER = "On Kubernetes"

Arguments = argparse.Namespace
Parser = argparse.ArgumentParser


class UsageError(UserError):
    """A command line that cannot be meant."""


class _HelpPrinted(Exception):
    """--help was asked for, and is on the screen."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a person types after `sdp`, and what happens then."""

    name: str
    group: str
    summary: str
    """One sentence, shown by `sdp --help`."""
    arguments: Callable[[Parser], None]
    run: Callable[[Arguments], int | None]
    example: str = ""
    """What a newcomer would type, without `sdp`."""


# --- looking ---------------------------------------------------------------------------------------------------------


def _config_show(given: Arguments) -> None:
    from sdp.config import draft, dump_yaml

    resolved = draft(given.job, given.config, given.set)
    sys.stdout.write(dump_yaml(resolved.config, missing=resolved.missing))
    if resolved.missing:
        _say(f"still to be set: {', '.join(sorted(resolved.missing))}")


def _config_show_arguments(parser: Parser) -> None:
    _job_argument(parser)
    _settings(parser)


def _config_schema(given: Arguments) -> None:
    import json

    from sdp.config import json_schema

    print(json.dumps(json_schema(given.job), indent=2))


def _job_argument(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", choices=JOBS, help=", ".join(JOBS))


def _inspect_arguments(parser: Parser) -> None:
    parser.add_argument(
        "uri", metavar="URI", help="a dataset, a run, a checkpoint, an evaluation, or a folder of Parquet files"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--account", metavar="FILE", help="write each row's outcome to this Parquet file")
    parser.add_argument("--verify", action="store_true", help="read every byte of every part")


def _inspect(given: Arguments) -> int:
    import json
    from pathlib import Path

    if given.account and not Path(given.account).absolute().parent.is_dir():
        raise UsageError(f"inspect: --account: expected a file in a folder that exists, got {given.account!r}")
    from sdp.datasets.inspect import Description, with_problems, write_account
    from sdp.report.inspect import describe, summary
    from sdp.storage import open_storage

    storage = open_storage(given.uri)
    description = describe(storage, verify=given.verify)
    for option in ("account", "verify"):
        if getattr(given, option) and not isinstance(description, Description):
            kind = {"run": "a training run", "evaluation": "an evaluation"}.get(description.kind, "a checkpoint")
            raise UsageError(f"inspect: --{option}: expected a dataset, got {kind}; leave it out")
    if given.account and isinstance(description, Description):
        rows, problems = write_account(storage, Path(given.account))
        description = with_problems(description, problems)
        _say(f"wrote the account of {rows:,} rows to {given.account}")
    print(json.dumps(description.to_json(), indent=2, default=str) if given.json else summary(description))
    return 1 if description.problems else 0


def _audit_arguments(parser: Parser) -> None:
    parser.add_argument("uris", metavar="URI", nargs="+", help="datasets and training runs to search")
    image = parser.add_mutually_exclusive_group(required=True)
    image.add_argument("--row", metavar="N", type=int, help="the image at this address")
    image.add_argument("--url", metavar="URL", help="the image that came from this URL")
    image.add_argument("--sha256", metavar="HASH", help="the image with this content")
    image.add_argument(
        "--takedown", metavar="FILE", help="leave out, from now on, what this list names: `row N`, `url U`, `sha256 H`"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def _audit(given: Arguments) -> None:
    if given.takedown:
        _take_down(given)
        return
    import json
    from dataclasses import asdict

    from sdp.datasets.audit import audit, summary
    from sdp.datasets.tombstones import Takedown

    values = [Takedown(kind, value) for kind in ("url", "sha256") if (value := getattr(given, kind)) is not None]
    value = values[0] if values else None
    traces = audit(given.uris, row=given.row, value=value)
    if given.json:
        print(json.dumps([asdict(trace) for trace in traces], indent=2, default=str))
        return
    print("\n".join(map(summary, traces)))


def _take_down(given: Arguments) -> None:
    from pathlib import Path

    from sdp.console import counted
    from sdp.datasets import tombstones
    from sdp.storage import open_storage

    if len(given.uris) != 1:
        raise UsageError(f"audit: --takedown: expected one dataset to keep the list beside, got {len(given.uris)}")
    try:
        text = Path(given.takedown).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"audit: --takedown: {given.takedown}: cannot be read ({error}); give a text file") from error
    wanted = tombstones.parse_list(text, given.takedown)
    if not wanted:
        raise UsageError(f"audit: --takedown: {given.takedown}: names nothing; write one `url U` or the like a line")
    added = tombstones.add(open_storage(given.uris[0]), wanted)
    rows = sorted({row for some in added.rows.values() for row in some})
    if given.json:
        import json
        from dataclasses import asdict

        told = [asdict(takedown) for takedown in added.unmatched]
        print(json.dumps({"recorded": len(added.recorded), "known": added.known, "rows": rows, "unmatched": told}))
        return
    known = f" ({added.known:,} more were there already)" if added.known else ""
    _say(f"{counted(len(added.recorded), 'takedown')} recorded{known}")
    addresses = counted(len(rows), "address", "addresses")
    _say(f"they mean {addresses} here: every stage and epoch from now on leaves them out")
    for takedown in added.unmatched[:20]:
        _say(f"not in this dataset, and left out if it comes: {takedown.kind} {takedown.value}")
    if more := added.unmatched[20:]:
        _say(f"and {len(more):,} more that are not in this dataset")


def _report_arguments(parser: Parser) -> None:
    parser.add_argument("uris", metavar="URI", nargs="+", help="datasets, training runs and evaluations")
    parser.add_argument("--out", metavar="FILE", help="where to write it (NAME-report.html beside the first of them)")
    parser.add_argument("--pictures", metavar="N", type=int, default=48, help="how many of each dataset to show (48)")
    parser.add_argument("--title", metavar="TEXT", default="sdp report", help="what to call it")


def _report(given: Arguments) -> None:
    from pathlib import Path

    from sdp.console import counted
    from sdp.report.write import write_report

    if given.pictures < 0:
        raise UsageError(f"report: --pictures: expected 0 or more, got {given.pictures}; 0 shows none")
    out = Path(given.out) if given.out else None
    file, count = write_report(given.uris, out, title=given.title, pictures=given.pictures)
    _say(f"wrote {file}: {counted(count, 'section')}; open it in a browser")


def _export_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a run: its newest one")
    parser.add_argument("out", metavar="OUT", help="the folder to write, empty or not there: local, s3:// or gs://")
    parser.add_argument(
        "--single-file", dest="form", action="store_const", const="single-file", default="folder",
        help="write OUT as one .safetensors, as ComfyUI and AUTOMATIC1111 read it",
    )  # fmt: skip
    parser.add_argument(
        "--lora", dest="form", action="store_const", const="lora",
        help="write a run's LoRA alone to OUT, as diffusers' load_lora_weights reads it",
    )  # fmt: skip
    parser.add_argument("--raw", action="store_true", help="the weights themselves, not their moving average")
    parser.add_argument(
        "--dtype", metavar="DTYPE", choices=("fp32", "fp16"), default="fp32", help="fp32 (default) or fp16"
    )


def _export(given: Arguments) -> None:
    try:
        from sdp.model.export import export

        done = export(given.checkpoint, given.out, ema=not given.raw, dtype=given.dtype, form=given.form)
    except ModuleNotFoundError as error:
        raise _without(error, "export") from error
    weights = "averaged" if done.ema else "raw"
    _say(f"wrote step {done.step:,} of {done.checkpoint}, {weights} weights in {given.dtype}, to {done.uri}")
    if done.drawing:
        _say(f"draw with it: {done.drawing}")


def _without(error: ModuleNotFoundError, command: str) -> Exception:
    """What is to be said of a library that is not there; one of our own modules is a bug."""
    missing = (error.name or "").partition(".")[0]
    if missing == "sdp":
        return error
    return UserError(
        f"sdp {command}: expected an installation for workers, got one without {missing}; "
        "pip install 'sdp[worker]', or submit the job to a cluster"
    )


def _plan_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", nargs="?", choices=_PLANNED, default="train", help=", ".join(_PLANNED))
    _settings(parser)
    parser.add_argument("--preset", metavar="NAME", choices=_PRESETS, help=f"a published table: {', '.join(_PRESETS)}")
    parser.add_argument("--trainers", metavar="[Nx]TYPE", help="instances that train: 4xp4de.24xlarge")
    parser.add_argument("--encoders", metavar="[Nx]TYPE", help="instances that encode: 40xg5.2xlarge")
    parser.add_argument("--rows", metavar="N", type=int, help="images of the dataset; else limit, or all samples once")
    parser.add_argument("--have", choices=_HAVE, default="images", help="what is in storage already (images)")
    parser.add_argument("--terms", metavar="TERMS", default="on-demand", help="on-demand, reserved-1y or spot")
    parser.add_argument("--prices", metavar="FILE", help="your prices, in the shape of sdp/plan/prices.yaml")
    parser.add_argument("--run", metavar="URI", help="a run on such GPUs, whose measured speed counts")
    parser.add_argument("--calibrate", action="store_true", help="measure the speed by a short run on the GPUs at hand")
    parser.add_argument("--deadline", metavar="HOURS", type=float, help="name the cheapest plan that is done by then")
    parser.add_argument(
        "--memory", action="store_true", help="say whether it fits the GPU as well (a minute, needs torch)"
    )
    parser.add_argument("--page", metavar="FILE", help="write a page with pictures as well")
    parser.add_argument("--values", metavar="FILE", help="write the worker groups as values of charts/sdp-cluster")
    parser.add_argument("--egress", metavar="GB", type=float, help="gigabytes that leave the store's region")
    parser.add_argument("--budget", metavar="MONEY", type=float, help="name the fastest plan that costs no more")
    parser.add_argument("--json", action="store_true", help="for programs")


def _plan(given: Arguments) -> None:
    import json

    from sdp.plan import presets

    if given.preset:
        print(json.dumps(presets.preset_json(given.preset)) if given.json else presets.preset_text(given.preset))
        return
    from sdp.config import draft
    from sdp.hardware import GPUS
    from sdp.plan import make, show
    from sdp.plan.memory import as_text, encoders
    from sdp.plan.prices import load_prices

    for option in ("rows", "deadline", "budget", "egress"):
        if (value := getattr(given, option)) is not None and not 0 < value < 1e15:
            raise UsageError(f"plan: --{option}: expected more than 0, got {value:g}")
    prices = load_prices(given.prices)
    options = make.Options(given.trainers, given.encoders, given.rows, given.terms, given.have, given.egress or 0.0)
    config: Any = draft(given.job, given.config, given.set).config
    if given.job == "dreambooth":
        from sdp.dreambooth.job import training_of

        config = training_of(config)
    work = make.work_of(config, prices, options)
    speeds = make.speeds_of(config, work, *_measured(given, config, work))
    answer = show.answer(config, work, speeds, prices, deadline_h=given.deadline, budget=given.budget)
    if given.values:
        _write_values(given.values, show.values(config, work, answer.own))
    if given.page:
        from pathlib import Path

        from sdp.report.plan import plan_section
        from sdp.report.write import write_page

        write_page("sdp plan", [plan_section(answer, work, speeds, prices)], Path(given.page))
        _say(f"wrote {given.page}; open it in a browser")
    memories = _memories(config, work) if given.memory and work.trainer_gpus else []
    encoding = list(encoders(config, GPUS[str(work.encoders.gpu)])) if given.memory and given.job != "download" else []
    if given.json:
        from dataclasses import asdict

        rows = [each for some in memories for each in some]
        memory = [asdict(each) | {"total": each.total, "largest_batch": each.largest_batch} for each in rows]
        print(json.dumps(show.as_json(answer, prices) | {"memory": memory, "encoders": encoding}))
        return
    print(show.as_text(answer, prices))
    for phase in memories:
        print("\n".join(["", *as_text(phase)]))
    print("\n".join(["", *encoding]) if encoding else "", end="\n" * bool(encoding))


def _measured(given: Arguments, config: Any, work: Any) -> tuple[Any, str | None]:
    """Return a trainer's measured speeds, and the GPU that they are of; None where nothing is measured."""
    if given.run:
        from sdp.storage import open_storage
        from sdp.train.run_folder import measured_speeds

        return measured_speeds(open_storage(given.run)), None
    if not given.calibrate:
        return None, None
    if given.job != "train":
        raise UsageError("plan: --calibrate: expected the job train; leave it out")
    from sdp.config import load
    from sdp.train.calibrate import calibrate, gpu_at_hand

    gpu = gpu_at_hand(config, str(work.trainers.gpu))
    return calibrate(load(given.job, given.config, given.set)), gpu


def _write_values(file: str, values: Any) -> None:
    from pathlib import Path

    from sdp.kube.rayjob import as_yaml
    from sdp.storage.named import written

    head = "# Made by sdp plan: helm install sdp charts/sdp-cluster -f your-values.yaml -f this-file\n"
    try:
        with written(Path(file)) as sink:
            sink.write((head + as_yaml(values)).encode())
    except OSError as error:
        raise UsageError(f"plan: --values: {file}: cannot be written ({error.strerror}); choose another") from error
    _say(f"wrote {file}")


def _memories(config: Any, work: Any) -> list[list[Any]]:
    try:
        from dataclasses import replace

        from sdp.hardware import GPUS
        from sdp.plan.memory import Place, each_phase, estimate, estimates
        from sdp.train.data.sources import embedded
        from sdp.train.memory import activations

        place = Place(GPUS[work.trainers.gpu], work.trainer_gpus, embedded(config), work.trainers.gpus)
        return [
            [estimate(phase, replace(place, measure=activations)), *estimates(phase, place)[1:]]
            for phase in each_phase(config)
        ]
    except ModuleNotFoundError as error:
        raise _without(error, "plan --memory") from error


# --- jobs ------------------------------------------------------------------------------------------------------------


def _settings(parser: Parser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the job's YAML; without one, the defaults")
    _set_argument(parser)


def _set_argument(parser: Parser) -> None:
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set one key of the configuration by its dotted path; may be given again",
    )


def _job_command(name: str, summary: str, **flags: str) -> Command:
    """The command that runs a job: sdp.NAME.job.run(config, dry_run=…, and each of `flags` by its name).

    `flags` are the job's own switches with what they do: only_failed="fetch again what failed".
    """

    def arguments(parser: Parser) -> None:
        _settings(parser)
        parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
        for flag, what in flags.items():
            parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true", help=what)

    def run(given: Arguments) -> None:
        from importlib import import_module

        from sdp.config import load

        config = load(name, given.config, given.set)
        try:
            job = import_module(f"sdp.{name}.job")
            result = job.run(config, dry_run=given.dry_run, **{flag: getattr(given, flag) for flag in flags})
        except ModuleNotFoundError as error:
            raise _without(error, name) from error
        asked, _, signal_name = str(getattr(result, "reason", "")).partition(": ")
        if asked == "asked to stop" and signal_name in signal.Signals.__members__:
            raise KeyboardInterrupt(signal_name)  # training ended in order, but before its end

    return Command(name, PIPELINE, summary, arguments, run, f"{name} --config {name}.yaml --set limit=1000")


# --- on Kubernetes ---------------------------------------------------------------------------------------------------


def _where(parser: Parser) -> None:
    parser.add_argument("--namespace", metavar="NAME", help="of the cluster; else the context's")
    parser.add_argument("--context", metavar="NAME", help="of KUBECONFIG; else its current one")


def _api(given: Arguments) -> Any:
    from sdp.kube.access import access
    from sdp.kube.api import Api

    return Api(access(given.context), given.namespace)


def _submit_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help=f"{', '.join(JOBS)}, or one of these and -NAME (train-online)")
    parser.add_argument("--config", metavar="FILE", help="the job's YAML, sent along; without one, the cluster's own")
    _set_argument(parser)
    parser.add_argument("--cluster", metavar="NAME", help="the RayCluster; else `sdp`, or the only one there is")
    parser.add_argument("--name", metavar="NAME", help="of the RayJob; else JOB and five letters")
    _where(parser)
    parser.add_argument("--no-follow", action="store_true", help="submit, and be done")
    parser.add_argument("--dry-run", action="store_true", help="print the RayJob, for kubectl create, and do nothing")


def _submit(given: Arguments) -> int:
    from sdp.kube.submit import Submission, dry_run, submit

    submission = Submission(
        job=given.job,
        config=given.config,
        overrides=given.set,
        cluster=given.cluster,
        name=given.name,
        follow=not given.no_follow,
    )
    if given.dry_run:
        sys.stdout.write(dry_run(submission, _say))
        return 0
    return submit(_api(given), submission, _say)


def _status_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="a RayJob or RayCluster; all of them without one")
    parser.add_argument("--json", action="store_true", help="for programs")
    _where(parser)


def _status(given: Arguments) -> None:
    from sdp.kube.status import status

    print(status(_api(given), given.name, as_json=given.json))


def _logs_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="the RayJob")
    parser.add_argument("--follow", action="store_true", help="go on until the job has ended; its exit code is ours")
    parser.add_argument("--lines", metavar="N", type=int, default=-1, help="the last N alone")
    _where(parser)


def _logs(given: Arguments) -> int:
    if given.lines != -1 and given.lines < 1:
        raise UsageError(f"logs: --lines: expected 1 or more, got {given.lines}")
    if given.follow and given.lines != -1:
        raise UsageError(
            "logs: --lines: expected without --follow, which begins at the first line; leave out one of them"
        )
    from sdp.kube.logs import logs

    return logs(_api(given), given.name, _say, following=given.follow, lines=given.lines)


def _stop_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="the RayJob")
    parser.add_argument("--no-wait", action="store_true", help="tell it, and be done")
    parser.add_argument("--delete", action="store_true", help="take the RayJob away, too, whether or not it answers")
    _where(parser)


def _stop(given: Arguments) -> None:
    from sdp.kube.stop import stop

    stop(_api(given), given.name, _say, wait=not given.no_wait, delete=given.delete)


def _doctor_arguments(parser: Parser) -> None:
    parser.add_argument("--cluster", metavar="NAME", help="the RayCluster; else `sdp`, or the only one there is")
    parser.add_argument("--manifest", metavar="FILE", help="what helm template wrote, before it is applied; - is stdin")
    parser.add_argument(
        "--all-reduce", metavar="GPU", help="measure between nodes of this accelerator, and nothing else"
    )
    parser.add_argument("--nodes", metavar="N", type=int, default=2, help="how many of them to take whole (2)")
    parser.add_argument("--json", action="store_true", help="for programs")
    _where(parser)


def _doctor(given: Arguments) -> int:
    from pathlib import Path

    from sdp.kube.doctor import all_reduce, as_json, examine, totals
    from sdp.kube.site import Site, mounted_texts, read_manifests

    if given.all_reduce:
        return all_reduce(_api(given), given.all_reduce, given.nodes, given.cluster, sys.stdout.buffer, _say)

    rendered = []
    if given.manifest:
        try:
            text = sys.stdin.read() if given.manifest == "-" else Path(given.manifest).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"doctor: --manifest: {given.manifest}: cannot be read ({error})") from error
        rendered = read_manifests(text, given.manifest)
    site, why = None, ""
    try:
        site = Site(_api(given), given.cluster, rendered)
    except UserError as error:
        if not mounted_texts():
            raise
        why = str(error)
    findings = []
    for finding in examine(site, why):
        findings.append(finding)
        if not given.json:
            print(finding, flush=True)
    print(as_json(findings) if given.json else totals(findings))
    return int(any(finding.state == "failed" for finding in findings))


# --- the list --------------------------------------------------------------------------------------------------------

COMMANDS: tuple[Command, ...] = (
    _job_command(
        "download",
        "Fetch the images of a metadata table, check them and write them as a dataset.",
        only_failed="fetch again what failed",
    ),
    _job_command(
        "process",
        "Encode the images and captions of a dataset to latents and tokens.",
        only_failed="encode again what failed",
    ),
    _job_command("train", "Train the U-Net from latents or images, and continue from its last checkpoint."),
    _job_command("generate", "Draw pictures for prompts with a trained checkpoint or a model."),
    _job_command("evaluate", "Judge pictures by CLIP score, FID and KID, and a checkpoint by its held-out loss."),
    _job_command("dreambooth", "Teach a model one subject from a handful of pictures, and draw it."),
    Command(
        "export",
        PIPELINE,
        "Write a checkpoint as a folder that StableDiffusionPipeline.from_pretrained loads.",
        _export_arguments,
        _export,
        "export s3://bucket/run ./sd2-mine",
    ),
    Command(
        "config show",
        LOOK,
        "Print a job's whole configuration as YAML, with what each key is for.",
        _config_show_arguments,
        _config_show,
        "config show download > download.yaml",
    ),
    Command(
        "config schema",
        LOOK,
        "Print the JSON schema of a job's configuration, for editors and charts.",
        _job_argument,
        _config_schema,
        "config schema train",
    ),
    Command(
        "plan",
        LOOK,
        "Say what a job takes in hours and money, in each mode and on other GPUs, before it runs.",
        _plan_arguments,
        _plan,
        "plan --config train.yaml --deadline 100",
    ),
    Command(
        "inspect",
        LOOK,
        "Describe a dataset, a training run or a checkpoint, and say what is missing or wrong.",
        _inspect_arguments,
        _inspect,
        "inspect s3://bucket/images",
    ),
    Command(
        "report",
        LOOK,
        "Write a page to look at: pictures and failures of datasets, curves and history of runs.",
        _report_arguments,
        _report,
        "report s3://bucket/run --out run.html",
    ),
    Command(
        "audit",
        LOOK,
        "Tell what became of one image and which checkpoints were trained on it, or take images down.",
        _audit_arguments,
        _audit,
        "audit s3://bucket/images s3://bucket/run --url https://example.org/cat.jpg",
    ),
    Command(
        "doctor",
        CLUSTER,
        "Check what usually goes wrong on a cluster, before money is spent.",
        _doctor_arguments,
        _doctor,
        "doctor --namespace sdp",
    ),
    Command(
        "submit",
        CLUSTER,
        "Run a job on a cluster and follow it; run again, it continues from storage.",
        _submit_arguments,
        _submit,
        "submit train --set max_steps=1000",
    ),
    Command(
        "status",
        CLUSTER,
        "Show the clusters and jobs of a namespace, or what Kubernetes says of one.",
        _status_arguments,
        _status,
        "status sdp-train-x7k2p",
    ),
    Command(
        "logs",
        CLUSTER,
        "Print a job's log, or follow it until the job has ended.",
        _logs_arguments,
        _logs,
        "logs sdp-train-x7k2p --follow",
    ),
    Command(
        "stop",
        CLUSTER,
        "End a job, with time for a last checkpoint.",
        _stop_arguments,
        _stop,
        "stop sdp-train-x7k2p",
    ),
)


# --- running ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] | None = None) -> int:
    """Run one command line and return its exit code: 0, 1 (trying again may help) or 2 (it will not)."""
    if argv is None:
        prepare_process()
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv, COMMANDS if commands is None else commands)
        sys.stdout.flush()
    except SdpError as error:
        for line in str(error).splitlines() or [type(error).__name__]:
            _say(line)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f" for {error.filename}" if error.filename else ""
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and where:
            _say(f"{error.filename}: {error.strerror}; change its permissions, or set HOME to a folder that is yours")
            return UserError.exit_code
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _say(f"there is no space left{where} ({error.strerror}); make room, then run the same command again")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered has no place to go
        return UserError.exit_code
    except KeyboardInterrupt as error:
        number = signal.Signals[str(error) or "SIGINT"]
        job = (sys.argv[1:] if argv is None else argv)[0] in JOBS
        usual = "the same command continues where it stopped" if job else "run it again"
        _say(f"stopped by {number.name}; {'; '.join(getattr(error, '__notes__', [usual]))}")
        return 128 + number
    return code


def prepare_process() -> None:
    """Make this process, and those that it starts, work under any locale and without a home or a user's name."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # read at start only
        os.execv(sys.executable, sys.orig_argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - pathlib's raises
        os.environ["HOME"] = "/nonexistent"  # Ray and PyTorch do not start without one
    os.environ.setdefault("USER", str(os.getuid()))
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    """Raise KeyboardInterrupt with the signal's name; another Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # `ray job stop` sends it to the supervisor, which hands it on, and to us
    raise KeyboardInterrupt(signal.Signals(number).name)


def _say(line: str) -> None:
    print(f"sdp: {line}", file=sys.stderr)


def _dispatch(argv: Sequence[str], commands: Sequence[Command]) -> int:
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(commands), file=sys.stdout if words else sys.stderr)
        return 0 if words else UsageError.exit_code
    if words[0] == "--version":
        from sdp import __version__

        print(f"sdp {__version__}")
        return 0
    command, rest = _find(words, commands)
    if command is None:
        print(_group_help(words[0], commands))
        return 0
    parser = _Parser(command)
    command.arguments(parser)
    try:
        arguments, unknown = parser.parse_known_args(rest)
    except _HelpPrinted:
        return 0
    if unknown:
        raise UsageError(_unknown_argument(unknown[0], parser, command))
    return command.run(arguments) or 0


def _find(words: list[str], commands: Sequence[Command]) -> tuple[Command | None, list[str]]:
    """The command that a line begins with, and the rest of the line; no command where a group's help is asked for."""
    for command in commands:
        name = command.name.split()
        if words[: len(name)] == name:
            return command, words[len(name) :]
    first = words[0]
    seconds = [command.name.split()[1] for command in commands if command.name.startswith(f"{first} ")]
    if seconds:
        if len(words) > 1 and words[1] in ("-h", "--help"):
            return None, []
        got = repr(words[1]) if len(words) > 1 else "nothing"
        near = _nearest(words[1] if len(words) > 1 else "", seconds, f"sdp {first}", f"sdp {first} ")
        raise UsageError(f"{first}: expected {' or '.join(seconds)}, got {got}; {near}")
    names = list(dict.fromkeys(command.name.split()[0] for command in commands))
    what = "option" if first.startswith("-") else "command"
    near = _nearest(first, ["--help", "--version"] if what == "option" else names, "sdp", "sdp ")
    raise UsageError(f"expected a command, got the unknown {what} {first!r}; {near}")


class _Parser(argparse.ArgumentParser):
    """argparse with our errors: one line, the nearest thing that exists, and no usage dump."""

    def __init__(self, command: Command) -> None:
        self._command = command
        super().__init__(
            prog=f"sdp {command.name}",
            description=command.summary,
            epilog=f"example: sdp {command.example}" if command.example else None,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self._command.name}: {message}; see {self.prog} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:  # noqa: ARG002 - argparse's signature
        raise _HelpPrinted

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            *most, last = choices
            words = f"{', '.join(most)} or {last}"
            name = action.metavar or action.dest
            near = _nearest(str(value), choices, self.prog)
            raise UsageError(f"{self._command.name}: {name}: expected {words}, got {value!r}; {near}")


def _unknown_argument(unknown: str, parser: _Parser, command: Command) -> str:
    options = [option for action in parser._actions for option in action.option_strings if option[:2] == "--"]
    if unknown.startswith("-"):
        near = _nearest(unknown.partition("=")[0], options, parser.prog)
        return f"{command.name}: expected an option it has, got {unknown!r}; {near}"
    known = "=" in unknown and "--set" in options
    hint = f"did you mean --set {unknown}?" if known else f"see {parser.prog} --help"
    return f"{command.name}: expected no further argument, got {unknown!r}; {hint}"


def _nearest(word: str, known: Sequence[str], program: str, prefix: str = "") -> str:
    import difflib

    near = difflib.get_close_matches(word, known, 1, 0.6)
    return f"did you mean {prefix}{near[0]}?" if near else f"see {program} --help"


# --- help ------------------------------------------------------------------------------------------------------------


def _help(commands: Sequence[Command]) -> str:
    width = max(len(command.name) for command in commands) + 2
    lines = ["sdp: pre-train Stable Diffusion on Ray and Kubernetes", "", "usage: sdp COMMAND [options]"]
    for group in dict.fromkeys(command.group for command in commands):
        lines += ["", f"{group}:"]
        lines += [f"  {command.name:{width}}{command.summary}" for command in commands if command.group == group]
    lines += ["", "Examples:"]
    lines += [f"  sdp {command.example}" for command in commands if command.example]
    lines += ["", "sdp COMMAND --help says more about a command; sdp --version prints the version."]
    return "\n".join(lines)


def _group_help(first: str, commands: Sequence[Command]) -> str:
    inner = [command for command in commands if command.name.startswith(f"{first} ")]
    width = max(len(command.name) for command in inner) + 2
    return "\n".join(
        [f"usage: sdp {first} COMMAND [options]", "", *(f"  {each.name:{width}}{each.summary}" for each in inner)]
    )


if __name__ == "__main__":
    sys.exit(main())
