"""The commands for jobs on a cluster: doctor, submit, status, logs and stop."""

import sys
from collections import Counter
from functools import partial
from typing import Any

from sdp.cli.command import CLUSTER, JOBS, JSON, SET, Arguments, all_of, argument, command, say
from sdp.console import counted, visible

_ACCESS = all_of(
    argument("--namespace NAME", "the cluster's namespace (default: the context's)"),
    argument("--context NAME", "a context of KUBECONFIG (default: the current one)"),
)
_CLUSTER = argument("--cluster NAME", "the RayCluster (default: `sdp`, or the only one)")


def _api(args: Arguments) -> Any:
    from sdp.kube.access import connect

    return connect(args.context, args.namespace)


@command(CLUSTER, "submit train --set max_steps=1000")
@argument("JOB", f"{', '.join(JOBS)}, or JOB-NAME, such as train-online")
@argument("--config FILE", "the job's YAML file (default: the cluster's configuration of that name)")
@SET
@_CLUSTER
@argument("--name NAME", "the RayJob's name (default: sdp-JOB- and five characters)")
@_ACCESS
@argument("--only-failed", "retry the rows that failed, in download, score, caption and process")
@argument("--own-cluster", "run it on a cluster made for it like the RayCluster, and deleted after it")
@argument("--no-follow", "return as soon as the job is submitted")
@argument("--dry-run", "only print the RayJob, for kubectl create")
@argument("--manifest FILE", "print the RayJob for what helm template printed, without a cluster; - is stdin")
def submit(args: Arguments) -> int:
    """Run a job on a cluster and follow it; a repeated job continues from storage."""
    from sdp.kube.clusters import read_manifests, release_in
    from sdp.kube.rayjob import as_yaml
    from sdp.kube.submit import Submission, rayjob_of, submit

    submission = Submission(
        job=args.job,
        config=args.config,
        overrides=args.set,
        cluster=args.cluster,
        name=args.name,
        own_cluster=args.own_cluster,
        follow=not args.no_follow,
        only_failed=args.only_failed,
    )

    if args.dry_run or args.manifest:
        release = release_in(read_manifests(args.manifest), args.cluster) if args.manifest else None
        sys.stdout.write(as_yaml(rayjob_of(submission, (lambda: release) if release else None, say)))
        return 0
    return submit(_api(args), submission, say)


@command(CLUSTER, "status sdp-train-x7k2p")
@argument("NAME", "a RayJob or RayCluster (default: all of them)", nargs="?")
@argument("--all", "also jobs that ended more than a day ago")
@argument("-A", "all namespaces", dest="everywhere")
@JSON
@_ACCESS
def status(args: Arguments) -> None:
    """Show the clusters and jobs of a namespace, or one of them."""
    from sdp.kube.status import status

    print(status(_api(args), args.name, as_json=args.json, ended=args.all, everywhere=args.everywhere))


@command(CLUSTER, "logs sdp-train-x7k2p --follow")
@argument("NAME", "the RayJob")
@argument("--follow", "follow the log until the job ends, and exit with the job's exit code")
@_ACCESS
def logs(args: Arguments) -> int:
    """Print a job's log, or follow it until the job has ended."""
    from sdp.kube.logs import follow, log_text

    api = _api(args)
    if args.follow:
        return follow(api, args.name, say)
    sys.stdout.write(log_text(api, args.name))
    return 0


@command(CLUSTER, "stop sdp-train-x7k2p")
@argument("NAME", "the RayJob")
@argument("--delete", "also delete the RayJob, even if the job does not answer")
@_ACCESS
def stop(args: Arguments) -> None:
    """End a job, with time for a last checkpoint."""
    from sdp.kube.stop import stop

    stop(_api(args), args.name, say, delete=args.delete)


@command(CLUSTER, "doctor --namespace sdp")
@_CLUSTER
@argument("--manifest FILE", "check the output of helm template before it is applied; - is stdin")
@_ACCESS
def doctor(args: Arguments) -> int:
    """Check a cluster for the usual problems, before money is spent."""
    from sdp.kube.clusters import made_in, read_manifests, release_in
    from sdp.kube.doctor import examine, examine_pod, mounted_texts

    texts = mounted_texts()
    if texts and not args.manifest:
        findings = examine_pod(texts)
    else:
        objects = read_manifests(args.manifest) if args.manifest else []
        rendered = release_in(objects, args.cluster) if args.manifest else None
        findings = examine(partial(_api, args), args.cluster, rendered, made_in(objects))
    counts = Counter[str]()
    for finding in findings:
        counts[finding.state] += 1
        print(visible(str(finding)), flush=True)
    print(f"{counts['ok']} ok, {counted(counts['warning'], 'warning')}, {counts['failed']} failed")
    return int(counts["failed"] > 0)
