"""The commands for jobs on a cluster: doctor, submit, status, logs and stop."""

import json
import sys
from pathlib import Path
from typing import Any

from sdp.cli.command import CLUSTER, JOBS, JSON, SET, Arguments, UsageError, all_of, argument, command, say
from sdp.console import table
from sdp.errors import UserError

_ACCESS = all_of(
    argument("--namespace NAME", "the cluster's namespace (default: the context's)"),
    argument("--context NAME", "a context of KUBECONFIG (default: the current one)"),
)
_CLUSTER = argument("--cluster NAME", "the RayCluster (default: `sdp`, or the only one)")


def _api(args: Arguments) -> Any:
    from sdp.kube.access import access
    from sdp.kube.api import Api

    return Api(access(args.context), args.namespace)


@command(CLUSTER, "submit train --set max_steps=1000")
@argument("JOB", f"{', '.join(JOBS)}, or JOB-NAME, such as train-online")
@argument("--config FILE", "the job's YAML file (default: the cluster's configuration of that name)")
@SET
@_CLUSTER
@argument("--name NAME", "the RayJob's name (default: sdp-JOB- and five characters)")
@_ACCESS
@argument("--no-follow", "return as soon as the job is submitted")
@argument("--dry-run", "only print the RayJob, for kubectl create")
def submit(args: Arguments) -> int:
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


@command(CLUSTER, "status sdp-train-x7k2p")
@argument("NAME", "a RayJob or RayCluster (default: all of them)", nargs="?")
@JSON
@_ACCESS
def status(args: Arguments) -> None:
    """Show the clusters and jobs of a namespace, or one of them with its events."""
    from sdp.kube.status import status

    print(status(_api(args), args.name, as_json=args.json))


@command(CLUSTER, "logs sdp-train-x7k2p --follow")
@argument("NAME", "the RayJob")
@argument("--follow", "follow the log until the job ends, and exit with the job's exit code")
@argument("--lines N", "print only the last N lines", type=int, default=-1)
@_ACCESS
def logs(args: Arguments) -> int:
    """Print a job's log, or follow it until the job has ended."""
    if args.lines != -1 and args.lines < 1:
        raise UsageError(f"logs: --lines: expected 1 or more, got {args.lines}")
    if args.follow and args.lines != -1:
        raise UsageError("logs: --lines: not used with --follow, which begins at the first line; leave out one of them")
    from sdp.kube.logs import logs

    return logs(_api(args), args.name, say, following=args.follow, lines=args.lines)


@command(CLUSTER, "stop sdp-train-x7k2p")
@argument("NAME", "the RayJob")
@argument("--no-wait", "do not wait for the job to end")
@argument("--delete", "also delete the RayJob, even if the job does not answer")
@_ACCESS
def stop(args: Arguments) -> None:
    """End a job, with time for a last checkpoint."""
    from sdp.kube.stop import stop

    stop(_api(args), args.name, say, wait=not args.no_wait, delete=args.delete)


@command(CLUSTER, "doctor --namespace sdp")
@_CLUSTER
@argument("--manifest FILE", "check the output of helm template before it is applied; - is stdin")
@argument("--local", "describe this machine instead, for a bug report")
@JSON
@_ACCESS
def doctor(args: Arguments) -> int:
    """Check a cluster for the usual problems, before money is spent."""

    if args.local:
        return _describe_here(as_json=args.json)
    from sdp.kube.doctor import as_json, examine, totals
    from sdp.kube.site import Site, mounted_texts, read_manifests

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
