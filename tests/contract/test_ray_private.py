"""Every private or developer-level use of Ray is in sdp/ray/internals.py, and does what it is there for."""

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray; make venv")

from ray._common.usage import usage_lib
from ray.data import Dataset

from scripts.import_rules import ROOT, read_sources
from sdp.ray import internals
from tests.programs import ended

DEVELOPERS = {name for name, part in vars(Dataset).items() if "DEVELOPER" in str(getattr(part, "_annotated_type", ""))}


def uses(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and dotted name of each part of Ray that a file imports or reads from a module of Ray's."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ray":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.partition(".")[0] == "ray")
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("ray.") and name.replace(".", "").isidentifier():
                yield node.lineno, name
            elif node.attr in DEVELOPERS:
                yield node.lineno, f"ray.data.Dataset.{node.attr}"


def is_public(name: str) -> bool:
    """Return whether a part of Ray is for its users; names without an annotation are, unless they look private."""
    words = name.split(".")
    if any(word.startswith("_") for word in words) or words[1:2] == ["autoscaler"]:
        return False
    here: Any = None
    for length in range(len(words), 0, -1):
        with suppress(ImportError):
            here = importlib.import_module(".".join(words[:length]))
            break
    for word in words[length:]:
        here = getattr(here, word)
    return "DEVELOPER" not in str(getattr(here, "_annotated_type", ""))


def test_only_one_file_uses_what_is_private_in_ray() -> None:
    private = {
        path: sorted(f"{line}: {name}" for line, name in uses(text) if not is_public(name))
        for path, text in read_sources(ROOT).items()
    }
    assert len(private.pop("sdp/ray/internals.py")) > 10, "the search still sees them"
    assert not {path: names for path, names in private.items() if names}


LOCAL = """
import logging, os, sys
from ray._private import worker
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
from sdp.ray import cluster, internals
from tests.waiting import until
import ray
cluster.connect(num_cpus=2, job_config=ray.job_config.JobConfig(metadata={"job_name": "a-rayjob-x2"}))
print("processes", *sorted(worker._global_node.all_processes))
print("job", internals.job_name())
print("nodes", len(internals.nodes()), internals.nodes()[0]["Alive"], internals.resources()["CPU"])
class Here:
    def number(self):
        return ray.get_runtime_context().get_worker_id()
here = ray.remote(Here).remote()
number = ray.get(here.number.remote())
print("alive", number in internals.live_workers())
ray.kill(here)
until(lambda: number not in internals.live_workers(), "Ray has noticed the death")
class Twice:
    def __call__(self, row):
        return {"n": 2 * row["n"]}
with cluster.data_settings(target_max_block_size=1):
    rows = ray.data.range(8, override_num_blocks=8).rename_columns({"id": "n"})
    rows = rows.map(Twice, compute=ray.data.ActorPoolStrategy(size=1))
print("rows", sum(row["n"] for row in rows.iter_rows()))
from ray._private.state import actors
print("actors", *sorted({actor["ActorClassName"].partition("(")[0] for actor in actors().values()}))
print("spilled", os.path.isdir(worker._global_node._session_dir))
internals.delete_spilled()
worker.print_to_stdstream({"lines": ["A worker died. Lease ID: 1"]}, False)
"""
EXPECTED = """\
processes gcs_server raylet
job a-rayjob-x2
nodes 1 True 2.0
alive True
rows 56
actors ActorLocationTracker Here MapWorker
spilled True
"""


def test_each_private_use_still_works() -> None:
    """If this fails after an update of Ray, the functions of sdp/ray/internals.py say what to do."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = ended([sys.executable, "-c", LOCAL], env=environment)
    assert done.stdout == EXPECTED, done.stderr
    assert "A worker died. Lease ID: 1" in done.stderr, "logged, not printed"
    assert "has changed" not in done.stderr, "without anything that _comfort hides"


def test_ray_train_has_a_cleaner_of_places_and_datasets_which_are_left_out() -> None:
    trainer = internals.trainer_class()(print)
    rays, own = (
        {type(each).__name__ for each in each_of._create_default_callbacks()}
        for each_of in (super(type(trainer), trainer), trainer)
    )
    assert rays - own == {"PlacementGroupCleanerCallback", "DatasetsCallback"}


def test_raylets_notices_go_through_the_function_that_is_replaced() -> None:
    from ray._private import worker

    printing: Any = worker
    assert "print_to_stdstream(" in inspect.getsource(printing.listen_error_messages)
    assert list(inspect.signature(printing.print_to_stdstream).parameters) == ["data", "ignore_prefix"]


def test_a_comfort_that_ray_no_longer_offers_does_not_end_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import node, worker

    monkeypatch.delattr(node.Node, "start_monitor")
    monkeypatch.delattr(worker, "print_to_stdstream")
    monkeypatch.delattr(worker, "_global_node")
    internals.spare_processes()
    internals.hush()
    internals.delete_spilled()


def test_statistics_of_use_that_a_local_ray_never_sends_are_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    internals.spare_processes()
    assert not usage_lib.usage_stats_enabled()
