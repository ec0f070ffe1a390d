"""Inputs of jobs. A module of training tests that needs others defines its own `inputs`."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tests

if TYPE_CHECKING:
    from tests.misbehaving.server import ImageServer


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and 60 rows of latents, which no test changes."""
    from tests.training import tiny_inputs

    return tiny_inputs(tmp_path_factory.mktemp("inputs"), 60, unit_rows=20, group_rows=5)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The networks that process needs, which no test changes."""
    from tests.process_kit import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def running_server() -> Iterator["ImageServer"]:
    from tests.misbehaving.server import ImageServer

    with ImageServer(images=2000, distinct=40) as server:
        server.warm()
        yield server


@pytest.fixture
def server(running_server: "ImageServer") -> "ImageServer":
    """A server of images that has had no request yet."""
    running_server.reset()
    return running_server


@pytest.fixture
def root(inputs: Path, tmp_path: Path) -> Path:
    """The inputs, and a place for runs."""
    import torch

    from tests.training import linked

    torch.set_num_threads(1)
    return linked(inputs, tmp_path)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Spare each training's garbage collection a scan of all the libraries' objects."""
    gc.unfreeze()  # the trainings of the last module left garbage
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def disconnected() -> Iterator[None]:
    """End a Ray that a module's jobs have started: with one, the next module's would use it."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        from tests.local_ray import shut_down

        shut_down()


def pytest_sessionfinish() -> None:
    """Let the interpreter's end free what was frozen: a library reports what it does not as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def warm_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers of Ray that tests start are forked from a process of tests/warm."""
    if sys.platform != "linux":
        yield
        return
    folder = Path(tests.__file__).parent / "warm"
    at = tmp_path_factory.mktemp("warm") / "workers"
    # One thread: a fork has no other. sdp sees by the raylet's pid, when it is imported, that it is in a worker.
    settings = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false", "RAY_RAYLET_PID": "0"}
    environment = {**os.environ, **settings}
    command = [sys.executable, str(folder / "workers.py"), str(at)]
    with (at.parent / "log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        warm = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 300
            while not at.exists():
                assert warm.poll() is None, (at.parent / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
            patch.setenv("SDP_TESTS_WARM_WORKERS", str(at))
            patch.setenv("SDP_TESTS_WARM_PID", str(warm.pid))
            # Ray's agents end with their raylet, which is not the parent of a fork.
            patch.setenv("RAY_enable_pipe_based_agent_to_parent_health_check", "1")
            yield
            assert warm.poll() is None, (at.parent / "log").read_text()
        finally:
            warm.kill()
            warm.communicate()
