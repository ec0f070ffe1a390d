"""Joining a Ray cluster, or starting one on this machine, and placing work by accelerator type."""

import contextlib
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from sdp.config import WorkersConfig
from sdp.errors import SdpError, UserError

_REACH_S = 10.0
ACCELERATOR_LABEL = "ray.io/accelerator-type"
_TALKATIVE = ("ray._private.authentication", "ray.data._internal.progress")
"""Loggers of Ray that warn of what is as it should be."""


def connect(**local: Any) -> dict[str, float]:
    """Connect this driver to Ray and return the cluster's resources.

    Inside a cluster, or with RAY_ADDRESS set, it joins that one; elsewhere it starts a Ray of its own, with `local` as
    arguments to ray.init. A driver that is connected already stays so.
    """
    import ray

    if not ray.is_initialized():
        # A worker group's first start on a cluster that scales up takes longer than Train's minute.
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1800")
        # A killed driver keeps its share of Ray Data's resources for so long, by default for three minutes.
        os.environ.setdefault("RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S", "30")
        # What fails and is asked for no more would be told with its whole stack: we have told it already, in one line.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        # Ray's core writes to this terminal, too: as an error, for one, that actors are given what they are made from.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        require_reachable()
        # Without an address Ray would join whatever cluster it finds running on this machine.
        where: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"address": "local", **local}
        if where and (python := shlex.quote(sys.executable)) != sys.executable:
            # Ray puts this path as it is into a shell's command for workers that have an environment, as Train's have.
            where["runtime_env"] = {"py_executable": python}
        if not os.environ.get("RAY_ADDRESS") and not os.access(os.path.expanduser("~"), os.W_OK):  # noqa: PTH111
            # Ray keeps its token in the home, and does not start where it cannot write one.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        held, before = _Held(), signal.getsignal(signal.SIGTERM)
        try:
            with held:
                ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=True, **where)
        except Exception as error:  # Ray raises a plain Exception where its own node does not start in time
            raise _not_joined(error, held.text) from error
        held.hand_on(but="RAY_BACKEND_LOG_LEVEL")
        if threading.current_thread() is threading.main_thread():
            # Ray's own handler aborts the process: nothing would be let go of, no lease, no temporary file.
            signal.signal(signal.SIGTERM, before)
    return {name: float(count) for name, count in ray.cluster_resources().items()}  # type: ignore[no-untyped-call]  # Ray's


def joined() -> bool:
    """Whether this driver works on a cluster that it joined, rather than on a Ray of this machine alone."""
    ray = sys.modules.get("ray")
    if os.environ.get("RAY_ADDRESS", "local") not in ("", "local"):
        return True
    return ray is not None and ray.is_initialized() and len(nodes_with({})) > 1


def on_gpus(section: str, workers: WorkersConfig) -> bool:
    """Whether each worker gets a GPU, by its section of the configuration.

    An idle cluster may have no GPU node yet, so GPUs that are alive decide only where no cluster was joined.
    """
    if workers.gpu_each is not None:
        return workers.gpu_each
    require_gpu_setting(section, workers)
    import ray

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray's
    return resources.get("GPU", 0) > 0


def hide_gpus_unless_granted() -> None:
    """Hide the node's GPUs from this worker if Ray granted it none: Ray itself leaves them visible."""
    import ray

    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def require_gpu_setting(section: str, workers: WorkersConfig) -> None:
    """Refuse a configuration that leaves open whether workers on a cluster get GPUs."""
    if workers.gpu_each is None and joined():
        raise UserError(
            f"{section}.use_gpu: expected true or false on a cluster where {section}.accelerator is null, got null; "
            f"name the accelerator, or set {section}.use_gpu to false to run on CPUs"
        )


def require_reachable() -> None:
    """Refuse an address at which nobody listens: before anything is written, and sooner than Ray would."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", "local" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"RAY_ADDRESS: no Ray cluster answers at {address!r} ({cause}); unset it or start one"
        ) from error


def _not_joined(error: Exception, told: str) -> SdpError:
    address = os.environ.get("RAY_ADDRESS", "")
    if "InvalidAuthToken" in told or "Unauthenticated" in told:
        return UserError(
            f"RAY_ADDRESS: the Ray cluster at {address!r} refuses this token; set RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH to the cluster's own"
        )
    cause = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__).strip()
    if address:
        return UserError(f"RAY_ADDRESS: no Ray cluster can be joined at {address!r} ({cause}); unset it or start one")
    return SdpError(f"Ray does not start on this machine ({cause}); see /tmp/ray/session_latest/logs")


@contextlib.contextmanager
def data_settings(**settings: Any) -> Iterator[None]:
    """Settings of Ray Data for the datasets that are made meanwhile, and for no others in this process."""
    from ray.data import DataContext

    # What goes wrong there is raised as well, and told by us in one line.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = DataContext.get_current().copy()
    for name, value in {"enable_progress_bars": False, **settings}.items():
        setattr(context, name, value)
    with DataContext.current(context):
        yield


class _Held:
    """Holds back what is written to stderr meanwhile, by libraries too."""

    def __init__(self) -> None:
        self.text = ""

    def __enter__(self) -> None:
        sys.stderr.flush()
        self._file = tempfile.TemporaryFile()
        self._terminal = os.dup(2)
        os.dup2(self._file.fileno(), 2)

    def __exit__(self, *_: object) -> None:
        sys.stderr.flush()
        os.dup2(self._terminal, 2)
        os.close(self._terminal)
        with self._file as file:
            file.seek(0)
            self.text = file.read().decode("utf-8", "replace")

    def hand_on(self, but: str) -> None:
        """All lines but those on something."""
        os.write(2, "".join(line for line in self.text.splitlines(True) if but not in line).encode())


def nodes_with(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The nodes of the connected cluster that Ray would place something with these labels on."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's
    return [
        node
        for node in nodes
        if node["Alive"] and all(_selects(wanted, node.get("Labels", {}).get(name)) for name, wanted in labels.items())
    ]


def _selects(wanted: str, value: str | None) -> bool:
    """Whether a label's value is the one, !another, in(some,values) or !in(others), as Ray says it."""
    among = wanted.removeprefix("!")
    values = among[3:-1].split(",") if among.startswith("in(") and among.endswith(")") else [among]
    return (value in [one.strip() for one in values]) != wanted.startswith("!")


def require_labels(key: str, labels: Mapping[str, str], *, can_grow: bool = False) -> None:
    """Refuse labels that no node has, before anything waits for it for ever."""
    if can_grow or nodes_with(labels):
        return
    have = {name: sorted({n["Labels"][name] for n in nodes_with({}) if name in n.get("Labels", {})}) for name in labels}
    there = ", ".join(f"{name} is {' or '.join(values) or 'nowhere'}" for name, values in have.items())
    raise UserError(f"{key}: no node has {told_labels(labels)} ({there}); take those of a node, or {{}}")


def told_labels(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in labels.items()) + "}"


def accelerators() -> set[str]:
    """The accelerator types that the nodes of the connected cluster have, by their label or resource."""
    import ray

    found = set()
    for node in ray.nodes():  # type: ignore[no-untyped-call]  # Ray's
        if node["Alive"]:
            found |= {
                n.removeprefix("accelerator_type:") for n in node["Resources"] if n.startswith("accelerator_type:")
            }
            found |= {value for key, value in node.get("Labels", {}).items() if key == ACCELERATOR_LABEL}
    return found


def this_node() -> Any:
    """Return the strategy that places something on this node.

    Not softly: Ray would then put what reserves nothing on any node, whose end would be ours.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def placement(accelerator: str | None, gpus: float) -> dict[str, Any]:
    """Resource options for an actor that wants `gpus` of an accelerator type; none of either on a laptop."""
    options: dict[str, Any] = {"num_gpus": gpus} if gpus else {}
    if accelerator:
        options["label_selector"] = {ACCELERATOR_LABEL: accelerator}
    return options


def require_accelerator(key: str, accelerator: str | None, *, can_grow: bool = False) -> None:
    """Refuse an accelerator type that no node offers, before anything waits for it."""
    if accelerator is None or can_grow:
        return
    there = accelerators()
    if accelerator not in there:
        have = ", ".join(sorted(there)) or "no accelerators"
        raise UserError(
            f"{key}: expected an accelerator type that a node offers, got {accelerator!r}; the cluster has {have}"
        )
