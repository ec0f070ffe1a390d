"""A cluster that starts from nothing: what workers get is in the configuration, not in what is alive."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from sdp.config import WorkersConfig
from sdp.errors import LeaseLost, UserError
from sdp.ray import cluster, waiting
from sdp.storage import open_storage
from sdp.train.driver import TrainSummary
from sdp.train.job import run
from sdp.train.run_folder import RunFolder
from tests.local_ray import several_nodes
from tests.process_kit import make_images
from tests.training import config
from tests.waiting import as_soon_as, until

DEADLINE_S = 240
A10G = {"ray.io/accelerator-type": "A10G"}
A100 = {"ray.io/accelerator-type": "A100"}


@pytest.fixture(scope="module")
def idle() -> Iterator[Cluster]:
    """A head without work and a node of CPUs: the groups with GPUs are at no pod."""
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")  # as cluster.connect does
    with several_nodes({"num_cpus": 2}) as nodes:
        yield nodes


def bundles() -> list[dict[str, float]]:
    """Return the bundles of placement groups that wait for a place."""
    groups = placement_group_table().values()
    return [bundle for group in groups if group["state"] == "PENDING" for bundle in group["bundles"].values()]


def test_trainers_ask_for_a_gpu_each_though_no_node_has_one_yet(
    idle: Cluster, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "_FIRST_LINE_S", 0.0)
    how = config(root, max_steps=2, scaling__accelerator="A100", scaling__num_workers=2, scaling__can_grow=True)
    summaries: list[TrainSummary] = []
    job = threading.Thread(target=lambda: summaries.append(run(how)), daemon=True)
    job.start()
    assert [bundle.get("GPU") for bundle in until(bundles, "bundles are asked for", DEADLINE_S)] == [1.0, 1.0]
    node = idle.add_node(num_cpus=2, num_gpus=2, labels=A100)
    job.join(DEADLINE_S)
    idle.remove_node(node)
    assert [summary.state.step for summary in summaries] == [2]
    assert "train: waiting for 2 A100 GPUs (0 of 2 ready, " in capsys.readouterr().err


@pytest.mark.usefixtures("idle")
def test_what_does_not_come_is_named_and_nothing_stays_asked_for(root: Path) -> None:
    with pytest.raises(UserError) as refused:
        run(config(root, scaling__accelerator="A1000", scaling__num_workers=4, scaling__wait_s=1.0))
    assert str(refused.value) == (
        "scaling.wait_s: no node offered 4 A1000 GPUs (0 of 4 ready) within 1.0 s; the cluster has 2 CPUs (did you "
        "mean A100?); request what it has, let it grow, or raise scaling.wait_s"
    )
    assert bundles() == []


@pytest.mark.usefixtures("idle")
def test_online_training_asks_for_encoders_transforms_and_trainers_at_once(tmp_path: Path) -> None:
    make_images(tmp_path, 20, unit_rows=20)
    how = config(
        tmp_path, source__uri=str(tmp_path / "images"), model__source="builtin:tiny", data__mode="online",
        encode__accelerator="A10G", encode__num_workers=3, transform__node_labels={"ray.io/node-group": "cpu"},
        scaling__accelerator="A100", scaling__num_workers=2, scaling__can_grow=True, scaling__wait_s=2.0,
    )  # fmt: skip
    asked: list[list[dict[str, float]]] = []
    watch = as_soon_as(lambda: bundles() if len(bundles()) > 5 else [], asked.append)
    with pytest.raises(UserError, match=r"3 A10G GPUs .* and 1 CPU with \{ray.io/node-group: cpu\} .* and 2 A100 GPUs"):
        run(how)
    watch.join()
    assert sorted(bundle.get("GPU", 0) for bundle in asked[0]) == [0, 1, 1, 1, 1, 1]


@pytest.mark.slow
def test_a_run_takes_in_trainers_that_come_and_goes_on_without_those_that_go(
    idle: Cluster, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster with GPUs of another type, too, which Ray's own elasticity would count."""
    monkeypatch.setattr("sdp.lease._BEAT_S", 0.5)
    monkeypatch.setattr(waiting, "_SETTLE_S", 1.0)
    how = config(
        root, max_steps=None, max_epochs=10_000, scaling__accelerator="A100", scaling__num_workers={"min": 1, "max": 3}
    )
    folder = open_storage(how.output.uri)
    nodes = [
        idle.add_node(num_cpus=2, num_gpus=2, labels={"ray.io/accelerator-type": name}) for name in ("A10G", "A100")
    ]
    idle.wait_for_nodes()
    errors: list[Exception] = []

    def train() -> None:
        try:
            run(how)
        except LeaseLost as error:
            errors.append(error)

    def starts() -> list[tuple[str, int]]:
        events = RunFolder(folder).events()
        return [(each["event"], len(each["workers"])) for each in events if each["event"] in ("training", "recovered")]

    job = threading.Thread(target=train)
    job.start()
    until(lambda: starts() == [("training", 2)], "this start", DEADLINE_S)
    more = idle.add_node(num_cpus=1, num_gpus=1, labels=A100)
    until(lambda: starts() == [("training", 2), ("training", 3)], "this start", DEADLINE_S)
    idle.remove_node(more)
    until(lambda: starts() == [("training", 2), ("training", 3), ("recovered", 2)], "this start", DEADLINE_S)
    folder.publish("_lease/0000000002.json", b"another's")  # or it would train on
    job.join(DEADLINE_S)
    assert len(errors) == 1
    for node in nodes:
        idle.remove_node(node)
    events = RunFolder(folder).events()
    _, resized = [event for event in events if event["event"] == "training"]
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    assert resized["from_step"] in saved, "nothing was done again"


@pytest.mark.usefixtures("idle")
def test_on_a_cluster_nobody_guesses_whether_workers_get_gpus(root: Path) -> None:
    says = r"^scaling\.accelerator: expected one on a cluster, got null; "
    with pytest.raises(UserError, match=says):
        run(config(root))
    assert not (root / "run").exists()
    with pytest.raises(UserError, match=r"^encode\.accelerator: "):
        cluster.on_gpus("encode", WorkersConfig())
    assert not cluster.on_gpus("encode", WorkersConfig(accelerator="cpu"))
    assert cluster.on_gpus("encode", WorkersConfig(accelerator="gpu"))
    assert cluster.on_gpus("encode", WorkersConfig(accelerator="A10G"))
