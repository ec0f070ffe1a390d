"""The commands for a cluster, against the job API of a real Ray with token authentication.

The API server is a double, and so is the operator: it submits to Ray what KubeRay would, and copies what Ray says into
the RayJob's status.
"""

import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdp.cli import main
from sdp.datasets.inspect import describe
from sdp.kube.rayjob import make_rayjob
from sdp.kube.submit import Submission
from sdp.ray.cluster import worker_environment
from sdp.storage import open_storage
from tests.download_kit import plain_urls, write_urls
from tests.kube_server import CORE, RAY, KubeServer, running
from tests.misbehaving.server import ImageServer
from tests.programs import ROOT, ended, free_port, processes_with
from tests.waiting import until

START_S = 180.0
STOPS_SLOWLY = """
import pathlib, signal, sys, threading
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
print("ready", flush=True)
told.wait(120)
threading.Event().wait(6)
pathlib.Path(sys.argv[1]).write_text("a last checkpoint")
print("saved", flush=True)
"""


@dataclass
class Ray:
    """A Ray of one node, with a dashboard that asks for a token."""

    port: int
    gcs: int
    token: str

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    """Started as KubeRay starts a head."""
    if worker_environment():
        pytest.skip("`ray start` puts Python's path into a shell without quotes")
    folder = tempfile.mkdtemp(prefix="sdp-ray-", dir="/tmp")  # Ray's sockets bear no long paths
    cluster = Ray(free_port(), free_port(), secrets.token_hex(16))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": cluster.token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "150",  # Ray's own 30 s are few on a busy machine
    }
    words = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=2", "--num-gpus=1"]
    words += [f"--port={cluster.gcs}", f"--dashboard-port={cluster.port}", "--dashboard-host=127.0.0.1"]
    words += [f"--ray-client-server-port={free_port()}", "--node-ip-address=127.0.0.1", "--labels=sdp/group=a10g"]
    words += [f"--dashboard-agent-listen-port={free_port()}"]  # jobs are submitted through the agent
    words += ["--object-store-memory=200000000", f"--temp-dir={folder}", "--disable-usage-stats"]
    words += ["--include-dashboard=true"]
    with Path(folder, "start.log").open("wb") as log:
        process = subprocess.Popen(words, env=environ, stdout=log, stderr=log, start_new_session=True, cwd=ROOT)
    try:

        def answers() -> bool:
            assert process.poll() is None, Path(folder, "start.log").read_text()
            try:
                nodes = cluster.ask("GET", "/nodes?view=summary")["data"]["summary"]
                return any(node["raylet"].get("state") == "ALIVE" for node in nodes)
            except (urllib.error.URLError, OSError, ValueError):
                return False

        until(answers, "Ray's dashboard answers", START_S)
        yield cluster
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        for pid in processes_with(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def kube(ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    """An API server in front of that Ray, and an operator behind it."""
    with running() as (kube, double):
        kube.dashboard_port = ray.port
        kube.put(f"{CORE}/secrets/sdp", {"data": {"auth_token": base64.b64encode(ray.token.encode()).decode()}})
        monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
        assert double.jobs == {}, "the double of a dashboard is not asked"
        kube.on_create = lambda path, item: operate(kube, ray, path, item)
        yield kube


def operate(kube: KubeServer, ray: Ray, path: str, item: dict[str, Any]) -> None:
    """Act on a RayJob in HTTPMode with a clusterSelector, as KubeRay does."""
    submission = f"{item['metadata']['name']}-{secrets.token_hex(3)}"
    request = {
        "entrypoint": item["spec"]["entrypoint"],
        "submission_id": submission,
        "runtime_env": yaml.safe_load(item["spec"]["runtimeEnvYAML"]),
    }
    kube.update_status(path, jobId=submission, rayClusterName="sdp", jobDeploymentStatus="Running", jobStatus="")

    def follow() -> None:
        until(submit, f"Ray takes {submission}", 60)
        until(once, f"the end of {submission}", 280)

    def submit() -> bool:
        try:
            ray.ask("POST", "/api/jobs/", request)
        except urllib.error.HTTPError as error:
            return "Please use a different submission_id" in error.read().decode()
        return True

    def once() -> bool:
        if path not in kube.objects:
            return True
        job = ray.ask("GET", f"/api/jobs/{submission}")
        ended = job["status"] in ("SUCCEEDED", "FAILED", "STOPPED")
        state = "Failed" if job["status"] == "FAILED" else "Complete" if ended else "Running"
        about = {"message": job["message"], "startTime": "2026-11-21T07:30:00Z"}
        kube.update_status(path, jobStatus=job["status"], jobDeploymentStatus=state, **about)
        return ended

    threading.Thread(target=follow, daemon=True).start()


def test_a_job_runs_by_the_configuration_that_was_sent_along_and_its_log_arrives(
    kube: KubeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    config = tmp_path / "download.yaml"
    with ImageServer() as server:
        source = write_urls(tmp_path / "in", plain_urls(server, 4))
        config.write_text(
            f"source: {{uri: {source}}} # ours\noutput: {{uri: {output}}}\n"
            "fetch: {allow_networks: [127.0.0.0/8]}\nhosts: {at_once: 8, per_second: null}\nworkers: {cpus: 1}\n"
        )
        code = main(["submit", "download", "--config", str(config), "--set", "limit=3", "--name", "fetch"])
    out, err = capfd.readouterr()
    assert code == 0, f"{out}\n{err}"
    assert "fetch: succeeded" in err
    assert out, "the driver says what it does"
    assert describe(open_storage(str(output))).to_json()["rows"] == 3
    # The log is the driver's, each byte once, and can be read again.
    assert main(["logs", "fetch"]) == 0
    assert capfd.readouterr().out == out
    assert main(["status", "--all"]) == 0
    assert "succeeded" in capfd.readouterr().out
    assert kube.asked("GET", "portforward") > 0


def begun(kube: KubeServer, name: str, entrypoint: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a program as a RayJob; return its log once that says `ready`."""
    job = make_rayjob(Submission(job="train", name=name))
    job["spec"]["entrypoint"] = entrypoint
    kube.on_create(f"{RAY}/rayjobs/{name}", kube.put(f"{RAY}/rayjobs/{name}", job))

    def log() -> str:
        return capfd.readouterr().out if main(["logs", name]) == 0 else ""

    return until(lambda: text if "ready" in (text := log()) else "", "the driver has begun")


HOLDS_A_GPU = """
import ray
from ray.util.state import list_actors
ray.init()
@ray.remote(num_gpus=1)
class Trainer:
    def begun(self): return True
trainer = Trainer.remote()
ray.get(trainer.begun.remote())
from sdp.ray import internals
from sdp.ray.cluster import holders
actors, jobs = internals.actors_and_jobs()
nodes = {node["NodeID"]: "A100" for node in ray.nodes()}
this_job = ray.get_runtime_context().get_job_id()
print("in the driver:", holders(actors, jobs, nodes), holders(actors, jobs, nodes, this_job))
print("train: step 1 of 2 · ETA 0:01")
print("ready", flush=True)
import time
time.sleep(120)
"""


def test_status_shows_a_jobs_progress_and_like_its_driver_who_holds_a_gpu(
    kube: KubeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "driver.py").write_text(HOLDS_A_GPU)
    log = begun(kube, "holder", f"python {tmp_path / 'driver.py'}", capfd)
    (line,) = [line for line in log.splitlines() if line.startswith("in the driver: ")]
    assert re.fullmatch(r"in the driver: \['holder holds 1 A100 GPU \(job begun \S+ \S+Z\)'\] \[\]", line)
    assert main(["status"]) == 0
    text = capfd.readouterr().out
    assert re.search(r"^sdp: holder holds 1 a10g GPU \(job begun 20\S+ \S+Z\)$", text, re.MULTILINE)
    assert "holder: train: step 1 of 2 · ETA 0:01\n" in text
    assert main(["stop", "holder"]) == 0


def test_a_job_that_is_stopped_has_the_time_for_a_last_checkpoint(
    kube: KubeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, saved = tmp_path / "driver.py", tmp_path / "saved"
    script.write_text(STOPS_SLOWLY)
    begun(kube, "slow", f"python {script} {saved}", capfd)
    assert main(["stop", "slow"]) == 0
    assert "slow: stopped" in capfd.readouterr().err
    assert saved.read_text() == "a last checkpoint"
    assert main(["logs", "slow"]) == 0
    assert capfd.readouterr().out.endswith("saved\n")


@pytest.mark.parametrize(
    ("token", "expected"), [("its own", "CPU"), ("another", "refuses this token; set RAY_AUTH_MODE")]
)
def test_a_driver_joins_with_the_token_that_it_finds(ray: Ray, tmp_path: Path, token: str, expected: str) -> None:
    """As `ray start --head` on a laptop makes it, once a token is in the home directory."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text(ray.token if token == "its own" else secrets.token_hex(16))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"HOME": str(tmp_path), "RAY_ADDRESS": f"127.0.0.1:{ray.gcs}"}
    program = "from sdp.ray.cluster import connect; print(connect())"
    done = ended([sys.executable, "-c", program], env=environ)
    assert expected in done.stdout + done.stderr
