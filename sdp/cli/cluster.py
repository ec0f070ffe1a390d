"""The commands for jobs on a cluster: doctor, submit, status, logs and stop."""

import json
import sys
from pathlib import Path
from typing import Any

from sdp.cli.command import JOBS, Arguments, Parser, UsageError, say, set_argument
from sdp.console import table
from sdp.errors import UserError


def _access_arguments(parser: Parser) -> None:
    parser.add_argument("--namespace", metavar="NAME", help="the cluster's namespace (default: the context's)")
    parser.add_argument("--context", metavar="NAME", help="a context of KUBECONFIG (default: the current one)")


def _cluster_argument(parser: Parser) -> None:
    parser.add_argument("--cluster", metavar="NAME", help="the RayCluster (default: `sdp`, or the only one)")


def _api(args: Arguments) -> Any:
    from sdp.kube.access import access
    from sdp.kube.api import Api

    return Api(access(args.context), args.namespace)


def submit_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help=f"{', '.join(JOBS)}, or JOB-NAME, such as train-online")
    parser.add_argument(
        "--config", metavar="FILE", help="the job's YAML file (default: the cluster's configuration of that name)"
    )
    set_argument(parser)
    _cluster_argument(parser)
    parser.add_argument("--name", metavar="NAME", help="the RayJob's name (default: sdp-JOB- and five characters)")
    _access_arguments(parser)
    parser.add_argument("--no-follow", action="store_true", help="return as soon as the job is submitted")
    parser.add_argument("--dry-run", action="store_true", help="only print the RayJob, for kubectl create")


def run_submit(args: Arguments) -> int:
    """Run a job on a cluster and follow it; a repeated job continues from storage."""
    from sdp.kube.submit import Submission, dry_run, submit

    submission = Submission(
        job=args.job,
        config=args.config,
        overrides=args.set,
        cluster=args.cluster,
        name=args.name,
        follow=not args.no_follow,
    )
    if args.dry_run:
        sys.stdout.write(dry_run(submission, say))
        return 0
    return submit(_api(args), submission, say)


def status_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="a RayJob or RayCluster (default: all of them)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _access_arguments(parser)


def run_status(args: Arguments) -> None:
    """Show the clusters and jobs of a namespace, or one of them with its events."""
    from sdp.kube.status import status

    print(status(_api(args), args.name, as_json=args.json))


def logs_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="the RayJob")
    parser.add_argument(
        "--follow", action="store_true", help="follow the log until the job ends, and exit with the job's exit code"
    )
    parser.add_argument("--lines", metavar="N", type=int, default=-1, help="print only the last N lines")
    _access_arguments(parser)


def run_logs(args: Arguments) -> int:
    """Print a job's log, or follow it until the job has ended."""
    if args.lines != -1 and args.lines < 1:
        raise UsageError(f"logs: --lines: expected 1 or more, got {args.lines}")
    if args.follow and args.lines != -1:
        raise UsageError("logs: --lines: not used with --follow, which begins at the first line; leave out one of them")
    from sdp.kube.logs import logs

    return logs(_api(args), args.name, say, following=args.follow, lines=args.lines)


def stop_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="the RayJob")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the job to end")
    parser.add_argument("--delete", action="store_true", help="also delete the RayJob, even if the job does not answer")
    _access_arguments(parser)


def run_stop(args: Arguments) -> None:
    """End a job, with time for a last checkpoint."""
    from sdp.kube.stop import stop

    stop(_api(args), args.name, say, wait=not args.no_wait, delete=args.delete)


def doctor_arguments(parser: Parser) -> None:
    _cluster_argument(parser)
    parser.add_argument(
        "--manifest", metavar="FILE", help="check the output of helm template before it is applied; - is stdin"
    )
    parser.add_argument(
        "--all-reduce", metavar="GPU", help="only measure an all-reduce between nodes with this accelerator"
    )
    parser.add_argument(
        "--nodes", metavar="N", type=int, default=2, help="whole nodes that --all-reduce uses (default: 2)"
    )
    parser.add_argument("--local", action="store_true", help="describe this machine instead, for a bug report")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _access_arguments(parser)


def run_doctor(args: Arguments) -> int:
    """Check a cluster for the usual problems, before money is spent."""

    if args.local:
        return _describe_here(as_json=args.json)
    from sdp.kube.doctor import all_reduce, as_json, examine, totals
    from sdp.kube.site import Site, mounted_texts, read_manifests

    if args.all_reduce:
        return all_reduce(_api(args), args.all_reduce, args.nodes, args.cluster, sys.stdout.buffer, say)

    rendered = []
    if args.manifest:
        try:
            text = sys.stdin.read() if args.manifest == "-" else Path(args.manifest).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"doctor: --manifest: {args.manifest}: cannot be read ({error})") from error
        rendered = read_manifests(text, args.manifest)
    site, why = None, ""
    try:
        site = Site(_api(args), args.cluster, rendered)
    except UserError as error:
        if not mounted_texts():
            raise
        why = str(error)
    findings = []
    for finding in examine(site, why):
        findings.append(finding)
        if not args.json:
            print(finding, flush=True)
    print(as_json(findings) if args.json else totals(findings))
    return int(any(finding.state == "failed" for finding in findings))


def _describe_here(*, as_json: bool) -> int:

    from sdp.cli.machine import describe

    lines = list(describe())
    print(json.dumps([list(line) for line in lines], indent=2) if as_json else table(lines))
    return 0
