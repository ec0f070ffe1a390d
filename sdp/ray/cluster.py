"""Connection to a Ray cluster, joined or started on this machine, and placement of work by accelerator type."""

import atexit
import contextlib
import faulthandler
import logging
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sdp import console, hardware
from sdp.config import WorkersConfig
from sdp.errors import RESTARTED, SdpError, UserError
from sdp.leaving import clean_up, cleanups, kill_descendants
from sdp.ray import internals, lost

_REACH_S = 10.0
_ACTOR_START_S = 300.0
"""The longest start of an actor beside the driver."""
_GRACE_S = 5.0
"""Time for the main thread to report the same error and end."""
_KILLED = "ray.kill"
"""Part of Ray's error for an actor that the job itself has killed."""
_AGAIN = "run the same command again"
_HEAD = "node:__internal_head__"
"""The resource by which Ray places actors on the head's node."""
ACCELERATOR_LABEL, NODE_LABEL = "ray.io/accelerator-type", "ray.io/node-id"
_GPU = re.compile(r"GPU(_group_[0-9a-f]+)?")
"""Ray's name of the resource; the longer one is that of an actor in a placement group."""
_SETTINGS = {
    # Train allows one minute, which is too short for a cluster that adds nodes.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1800",
    # A killed driver keeps its share of Ray Data's resources for this long; the default is three minutes.
    "RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S": "30",
    # Ray would print the whole stack of errors that sdp has already reported in one line.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # Ray's core prints harmless notices as errors to this terminal.
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    # A driver would wait for workers that Ray starts early, and for ever if one of them is killed.
    "RAY_prestart_worker_first_driver": "0",
    # A driver that waits for Ray handles a signal only after so long; the default is a second.
    "RAY_get_check_signal_interval_milliseconds": "100",
}


def connect(**local: Any) -> dict[str, float]:
    """Connect this driver to Ray and return the cluster's resources.

    With RAY_ADDRESS set, as in a cluster, join that one; else start a local Ray without a dashboard, with `local` as
    further arguments to ray.init.
    A connected driver stays connected.
    """
    import ray

    if not ray.is_initialized():
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        internals.quieten()
        require_reachable()
        # Without an address, Ray joins any cluster that runs on this machine.
        options: dict[str, Any] = {"address": "local", "include_dashboard": False, **local} if is_local() else {}
        if is_local():
            internals.spare_processes()
            options.setdefault("runtime_env", worker_environment())
        if is_local() and not os.access(os.path.expanduser("~/."), os.W_OK):  # noqa: PTH111
            # Ray stores a token in the home directory, and does not start if it cannot.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        handler = signal.getsignal(signal.SIGTERM)
        lost.expect(local=is_local())
        while not ray.is_initialized():
            stderr = list[bytes]()
            try:
                with _captured_stderr() as stderr, _time_limit(lost.START_S):
                    ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=True, **options)
            except Exception as error:  # Ray raises a plain Exception if its own node does not start in time
                output = b"".join(stderr).decode("utf-8", "replace")
                if not (_is_refusal(output) and internals.adopt_token()):
                    raise _explain_failed_connection(error, output) from error
        os.write(2, b"".join(line for line in stderr if b"RAY_BACKEND_LOG_LEVEL" not in line))
        if threading.current_thread() is threading.main_thread():
            # Ray's own handler aborts the process, which would leave leases and temporary files behind.
            signal.signal(signal.SIGTERM, handler)
    lost.watch(local=is_local(), give_up=give_up)
    offered = internals.resources()
    if _HEAD not in offered:
        # Ray Train and Ray Data wait for ever for a place on the head's node.
        raise SdpError("Ray's head has lost its raylet, so its node is gone; restart the head")
    return offered


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End the process with exit code 1 if the block takes longer, even if it holds Python's lock in native code."""
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def give_up(message: str) -> NoReturn:
    """End this process, whose main thread may hang inside Ray, with an error line and exit code 1."""
    try:
        console.say(f"sdp: {message}", level="error")  # first, since Ray's core may end the process meanwhile
    finally:
        lost.end()
        clean_up()
        kill()
        os._exit(1)


def is_local() -> bool:
    """Return whether RAY_ADDRESS names no cluster, so that a job starts its own Ray."""
    return os.environ.get("RAY_ADDRESS", "local") in ("", "local")


def abandon() -> None:
    """Keep Ray's slow shutdown from running at exit, where `kill` ends a local Ray instead."""
    import ray

    if sys.platform == "linux" and is_local():
        atexit.unregister(ray.shutdown)


def kill() -> None:
    """End a local Ray and everything else that this process has started. The caller must exit right after it."""
    if is_local():
        kill_descendants(internals.delete_spilled)


def worker_environment() -> dict[str, str]:
    """Return the runtime environment for workers of a local Ray: Python's path, quoted if necessary.

    Ray puts the path unquoted into a shell command for workers that have an environment, such as Train's.
    """
    python = shlex.quote(sys.executable)
    return {"py_executable": python} if python != sys.executable else {}


def joined() -> bool:
    """Return whether this driver works on a cluster that it joined, rather than on a local Ray."""
    return not is_local() or (_is_connected() and len(nodes_with({})) > 1)


def is_absent() -> bool:
    """Return whether this driver has no Ray: none is named, and it has started none."""
    return "RAY_ADDRESS" not in os.environ and not _is_connected()


def _is_connected() -> bool:
    """Return whether this process has connected to a Ray, without loading it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def is_needless(workers: WorkersConfig) -> bool:
    """Return whether this process alone does as much as Ray here: no cluster is named, and one worker has every GPU."""
    gpus = hardware.local_gpus()
    enough = workers.most == 1 or (workers.least == 1 and gpus <= 1)
    suits = {None: True, True: gpus > 0 and workers.gpu_type is None, False: gpus == 0}
    return is_absent() and enough and suits[workers.gpu_each]


def on_gpus(section: str, workers: WorkersConfig) -> bool:
    """Return whether each worker gets a GPU, by its section of the configuration.

    The GPUs that exist decide only for a local Ray: an idle cluster may have no GPU node yet.
    """
    if workers.gpu_each is not None:
        return workers.gpu_each
    require_gpu_setting(section, workers)
    return internals.resources().get("GPU", 0) > 0


def hide_gpus_unless_granted() -> None:
    """Hide the node's GPUs from this worker if Ray granted it none; Ray leaves them visible."""
    import ray

    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def require_gpu_setting(section: str, workers: WorkersConfig) -> None:
    """Refuse a configuration that does not say whether workers on a cluster get GPUs."""
    if workers.gpu_each is None and joined():
        raise UserError(
            f"{section}.accelerator: expected one on a cluster, got null; name a type, such as A10G, or set it to "
            "gpu or cpu"
        )


def require_reachable() -> None:
    """Refuse an address that does not answer: before anything is written, and sooner than Ray does."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", "local" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last for an empty label
        cause = getattr(error, "strerror", None) or str(error)
        raise _unreachable(f"no Ray cluster answers at {address!r} ({cause})") from error


def _unreachable(what: str) -> SdpError:
    """Return the error of a cluster that cannot be joined; a job that it has run before waits for its return."""
    kind = SdpError if RESTARTED in os.environ else UserError
    return kind(f"RAY_ADDRESS: {what}; unset it or start one")


def _is_refusal(stderr: str) -> bool:
    """Return whether Ray's output says that a cluster refuses the token, or its absence."""
    return "InvalidAuthToken" in stderr or "Unauthenticated" in stderr


def _explain_failed_connection(error: Exception, stderr: str) -> SdpError:
    address = os.environ.get("RAY_ADDRESS", "")
    if _is_refusal(stderr):
        return UserError(
            f"RAY_ADDRESS: the Ray cluster at {address!r} refuses this token; set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
        )
    cause = lost.reason_of(error)
    if is_local():
        return SdpError(f"Ray does not start on this machine ({cause}); see {lost.LOGS}")
    what = f"cannot join a Ray cluster at {address!r} ({cause})"
    origin = error.__cause__ or error  # Ray raises a ConnectionError in place of a RuntimeError, too
    if isinstance(origin, ConnectionError | ValueError) or "Version mismatch" in str(origin):
        return _unreachable(what)
    return SdpError(f"{what}; see {lost.LOGS} on its head")  # as when a node or its raylet is lost meanwhile


@contextlib.contextmanager
def data_settings(**settings: Any) -> Iterator[None]:
    """Apply settings of Ray Data to the datasets built inside the block, and to no others in this process."""
    # Ray Data logs the errors that it raises, too; sdp reports those in one line.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    settings = {
        "enable_progress_bars": False,
        "raise_original_map_exception": True,
        # It would fail a pipeline that has waited half an hour for trainers or nodes; jobs have rules of their own.
        "execution_no_progress_timeout_s": -1,
        **settings,
    }
    with internals.data_context(settings, on_cluster=joined):
        yield


@contextlib.contextmanager
def _captured_stderr() -> Iterator[list[bytes]]:
    """Hold back what the block and native libraries write to stderr: the list gets the lines when the block ends."""
    lines: list[bytes] = []
    sys.stderr.flush()
    terminal = os.dup(2)
    restore = partial(os.dup2, terminal, 2)
    cleanups.append(restore)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            restore()
            cleanups.remove(restore)
            os.close(terminal)
            file.seek(0)
            lines += file


def nodes_with(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the nodes of the connected cluster that a label selector of Ray matches."""
    return [
        node
        for node in internals.nodes()
        if node["Alive"] and all(_selects(wanted, node.get("Labels", {}).get(name)) for name, wanted in labels.items())
    ]


def _selects(wanted: str, value: str | None) -> bool:
    """Return whether a label's value matches a selector in Ray's syntax: value, !value, in(a,b) or !in(a,b)."""
    selector = wanted.removeprefix("!")
    values = selector[3:-1].split(",") if selector.startswith("in(") and selector.endswith(")") else [selector]
    return (value in [item.strip() for item in values]) != wanted.startswith("!")


def holders(
    actors: Iterable[Mapping[str, Any]], jobs: Iterable[Mapping[str, Any]], nodes: Mapping[str, str], besides: str = ""
) -> list[str]:
    """Return a line for each job with actors on GPUs, and each kind of its nodes: how many it holds, and when it began.

    `nodes` has the kind of each node that counts, and `besides` the job that does not.
    """
    held: Counter[tuple[str, str]] = Counter()
    for actor in actors:
        if actor["state"] == "ALIVE" and actor["node_id"] in nodes and actor["job_id"] != besides:
            gpus = [amount for name, amount in (actor["required_resources"] or {}).items() if _GPU.fullmatch(name)]
            held[actor["job_id"], nodes[actor["node_id"]]] += int(sum(gpus))
    known = {job["job_id"]: job for job in jobs}
    lines = []
    for (number, kind), count in sorted((+held).items()):
        job = known.get(number, {})
        # A RayJob's name and a suffix make its submission.
        name = str(job.get("submission_id") or "").rpartition("-")[0] or f"Ray's job {number}"
        began = datetime.fromtimestamp((job.get("start_time") or 0) / 1000, UTC)
        lines.append(f"{name} holds {count} {kind} GPU{'s' if count != 1 else ''} (job begun {began:%Y-%m-%d %H:%MZ})")
    return lines


def format_labels(labels: Mapping[str, str]) -> str:
    """Return labels as YAML."""
    return "{" + ", ".join(f"{name}: {value}" for name, value in labels.items()) + "}"


def this_node() -> Any:
    """Return the scheduling strategy for this node.

    It is not soft: Ray would then place actors that reserve nothing on any node, and lose them with it.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def start_beside_driver(kind: type, *arguments: Any, watched: bool = True, **options: Any) -> Any:
    """Start an actor that reserves nothing on this node, so that it is not lost with another one.

    Ray's head does not record its calls: there are several for each piece of work, and the head remembers 100,000.
    If it is watched and cannot start, a driver ends.
    """
    import ray

    actor: Any = ray.remote(kind)
    place = {"num_cpus": 0, "scheduling_strategy": this_node(), "enable_task_events": False}
    handle = actor.options(**place, **options).remote(*arguments)
    if watched and ray.get_runtime_context().get_actor_id() is None:
        work = partial(_await_start, kind.__name__, handle)
        threading.Thread(target=work, name="sdp-await-start", daemon=True).start()
    return handle


def _await_start(name: str, actor: Any) -> None:
    """End this process if an actor does not start: where Ray finds no Python, for example, it tries for ever."""
    import ray

    began = time.monotonic()
    try:
        ready = actor.__ray_ready__.remote()
        while ray.is_initialized() and not ray.wait([ready], timeout=1.0)[0]:
            if time.monotonic() - began > _ACTOR_START_S:
                limit = console.duration(_ACTOR_START_S)
                give_up(f"Ray has not started {name} on this node within {limit}; see {lost.LOGS}, then {_AGAIN}")
        if ray.is_initialized():  # otherwise `get` would start another Ray
            ray.get(ready)
    except (ray.exceptions.RayActorError, ray.exceptions.RuntimeEnvSetupError) as error:
        if _KILLED not in str(error):
            main = threading.main_thread()
            main.join(_GRACE_S)
            if main.is_alive():  # otherwise it has reported the error itself
                reason = lost.reason_of(error)
                give_up(f"Ray could not start {name} on this node ({reason}); mend that, then {_AGAIN}")
    except ray.exceptions.RayError:  # Ray is lost, which others notice
        return


def accelerator_labels(accelerator: str | None) -> dict[str, str]:
    """Return the labels of nodes with this type of GPUs; none if any will do."""
    return {ACCELERATOR_LABEL: accelerator} if accelerator else {}


def worker_options(labels: Mapping[str, str], gpus: float) -> dict[str, Any]:
    """Return the options of an actor that needs a node with these labels and this many GPUs; either may be absent."""
    options: dict[str, Any] = {"num_gpus": gpus} if gpus else {}
    return {**options, "label_selector": dict(labels) or None}


def require_labels(key: str, labels: Mapping[str, str]) -> None:
    """Refuse labels that no node of a local Ray has; on a cluster, a node that has them may still join."""
    if joined() or nodes_with(labels):
        return
    raise UserError(
        f"{key}: no node has {format_labels(labels)} ({format_values(labels)}); use those of a node, or {{}}"
    )


def require_accelerator(key: str, accelerator: str | None) -> None:
    """Refuse an accelerator type that no node of a local Ray offers; on a cluster, a node that has it may still join.

    The head that replaces a lost one has no other nodes at first.
    """
    if accelerator is None or joined() or accelerator in (offered := values_of(ACCELERATOR_LABEL)):
        return
    have = ", ".join(offered) or "no accelerators"
    raise UserError(
        f"{key}: expected an accelerator type that a node offers, got {accelerator!r}; the cluster has {have}"
    )


def format_values(labels: Iterable[str]) -> str:
    """Return the values that the cluster's nodes have of some labels: `zone is a or b`."""
    return ", ".join(f"{name} is {' or '.join(values_of(name)) or 'nowhere'}" for name in labels)


def values_of(label: str) -> list[str]:
    """Return the values of a label on the cluster's nodes."""
    return sorted({node["Labels"][label] for node in nodes_with({}) if label in node.get("Labels", {})})
