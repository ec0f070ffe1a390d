"""Connecting to a Ray cluster that is missing or refuses us."""

import re
import sys

import pytest
import ray

from sdp.errors import RESTARTED, SdpError, UserError
from sdp.ray import cluster, lost
from tests.programs import ended, free_port


def test_an_address_without_a_listener_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=rf"^RAY_ADDRESS: no Ray cluster answers at '{address}' \(Connection refused\)"):
        cluster.require_reachable()


@pytest.mark.parametrize("host", ["my..head", "x" * 64])
def test_a_host_that_no_name_server_can_know_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"{host}:6379")
    with pytest.raises(UserError, match=rf"^RAY_ADDRESS: no Ray cluster answers at '{host}:6379' \(.*label"):
        cluster.require_reachable()


def test_a_job_that_has_run_on_a_cluster_before_is_retried_until_the_cluster_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv(RESTARTED, "1")
    with pytest.raises(SdpError, match=r"^RAY_ADDRESS: no Ray cluster answers") as caught:
        cluster.require_reachable()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_an_address_that_is_a_word_is_left_to_ray(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    cluster.require_reachable()


@pytest.mark.parametrize(
    ("wanted", "values"),
    [
        ("cpu", {"cpu"}), ("!cpu", {"gpu", "spot", None}), ("in(cpu,spot)", {"cpu", "spot"}),
        ("in(cpu, spot)", {"cpu", "spot"}), ("!in(cpu,spot)", {"gpu", None}), ("in()", set()),
    ],
)  # fmt: skip
def test_labels_select_the_same_nodes_as_ray(wanted: str, values: set[str | None]) -> None:
    assert {value for value in ("cpu", "gpu", "spot", None) if cluster._selects(wanted, value)} == values


def test_a_path_with_a_blank_is_quoted_for_the_shell_that_starts_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my sdp/bin/python")
    assert cluster.worker_environment() == {"py_executable": "'/my sdp/bin/python'"}


def test_a_refused_token_is_reported_in_one_line() -> None:
    error = ConnectionError("Could not read 'session_name' from GCS")
    message = "gcs_client.cc:210: Failed: Unauthenticated: RPC error: InvalidAuthToken"
    assert str(cluster._explain_failed_connection(error, message)).endswith(
        "refuses this token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
    )


def _wrapped(cause: Exception) -> Exception:
    """Return the error by which Ray reports that it cannot join a cluster."""
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    error.__cause__ = cause
    return error


LOST_RAYLET = RuntimeError("No node info found matching attributes: '10.0.0.1' when trying to resolve node")
LATE_NODE = Exception("The current node timed out during startup. This could happen because the raylet failed")


@pytest.mark.parametrize("address", ["", "local"])
@pytest.mark.parametrize("error", [LATE_NODE, LOST_RAYLET, ConnectionError("Could not read 'session_name' from GCS")])
def test_a_local_ray_that_does_not_start_may_be_tried_again(
    address: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    failure = cluster._explain_failed_connection(error, "")
    assert (failure.exit_code, str(failure).partition(" (")[0]) == (1, "Ray does not start on this machine")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionError("Could not find any running Ray instance."), 2),
        (_wrapped(ConnectionError("Could not read 'session_name' from GCS. Did GCS start successfully?")), 2),
        (_wrapped(RuntimeError("Version mismatch: The cluster was started with: Ray: 2.9")), 2),
        (ValueError("Malformed address"), 2),
        (_wrapped(LOST_RAYLET), 1),
        (LATE_NODE, 1),
    ],
)
def test_a_cluster_that_loses_a_node_meanwhile_may_be_joined_again(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    failure = cluster._explain_failed_connection(error, "")
    assert failure.exit_code == code
    assert str(failure).startswith(("RAY_ADDRESS: cannot join a Ray cluster", "cannot join a Ray cluster")[code == 1])


def test_what_is_written_to_stderr_is_held_back() -> None:
    script = (
        "import os, sys\n"
        "from sdp.ray.cluster import _captured_stderr\n"
        "with _captured_stderr() as lines:\n"
        "    os.write(2, b'one\\n')\n"
        "    print('two', file=sys.stderr)\n"
        "print(lines)\n"
    )
    done = ended([sys.executable, "-c", script], check=True)
    assert (done.stdout, done.stderr) == ("[b'one\\n', b'two\\n']\n", "")


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        # Ray waits for a worker that was killed: in native code that holds Python's lock.
        ("lost.START_S = 0.5; ray.init = lambda **_: ctypes.PyDLL(None).sleep(60)", "0.5 s"),
        # The raylet dies meanwhile. Ray's core then ends the process, whose stderr is being captured.
        ("ray.init = lambda **_: os._exit(1)", "3:00"),
    ],
    ids=["never", "it ends the driver"],
)
def test_a_ray_that_does_not_start_ends_the_job_in_one_line(change: str, limit: str) -> None:
    script = (
        "import ctypes, os, ray\n"
        "from sdp.ray import cluster, lost\n"
        f"{change}\n"
        "with lost.explained('train'):\n"
        "    cluster.connect()\n"
    )
    program = ended([sys.executable, "-c", script])
    assert program.returncode == 1
    says = f"sdp: train: the driver was killed, or Ray ended it or did not start within {limit} (see"
    assert program.stderr.startswith(says)
    assert program.stderr.count("\n") == 1


def test_a_cluster_without_its_heads_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(lost, "watch", lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    with pytest.raises(SdpError, match=r"^Ray's head has lost its raylet, so its node is gone; restart the head$"):
        cluster.connect()


NONE = r"Ray has not started Hub on this node within 5.0 s; see /tmp/ray/session_latest/logs, then"
FAILED = r"Ray could not start Hub on this node \(ModuleNotFoundError: No module named 'no'\); mend that, then"


@pytest.mark.parametrize(
    ("environment", "limits", "patience_s", "last"),
    [
        ({"py_executable": "/no/such/python"}, {}, 5.0, NONE),
        ({"worker_process_setup_hook": "no.such.module"}, {"max_restarts": 2, "max_task_retries": -1}, 90.0, FAILED),
    ],
)
def test_a_ray_that_cannot_start_workers_ends_the_job(
    environment: dict[str, str], limits: dict[str, int], patience_s: float, last: str
) -> None:
    """Even if the job waits for something else than the actor."""
    script = (
        "import ray, threading\n"
        "from sdp.ray import cluster, lost\n"
        "class Hub: ...\n"
        f"cluster._ACTOR_START_S, cluster._GRACE_S = {patience_s}, 0.1\n"
        "with lost.explained('download'):\n"
        f"    cluster.connect(num_cpus=1, runtime_env={environment})\n"
        f"    hub = cluster.start_beside_driver(Hub, **{limits})\n"
        "    threading.Event().wait(100)\n"
    )
    program = ended([sys.executable, "-c", script])
    assert program.returncode == 1
    assert re.fullmatch(f"sdp: {last} run the same command again\n", program.stderr)


def test_an_actor_that_its_job_ends_before_it_has_started_is_no_failure() -> None:
    script = (
        "import ray, threading\n"
        "from sdp.ray import cluster\n"
        "class Hub: ...\n"
        "cluster._GRACE_S = 0.1\n"
        "cluster.connect(num_cpus=1)\n"
        "ray.kill(cluster.start_beside_driver(Hub))\n"
        "for thread in threading.enumerate():\n"
        "    if thread.name == 'sdp-await-start':\n"
        "        thread.join(60)\n"
    )
    program = ended([sys.executable, "-c", script])
    assert (program.returncode, program.stderr) == (0, "")
