"""The exchange of shares by tasks, on a Ray of two nodes; a third one is lost."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from ray.cluster_utils import Cluster

from sdp.errors import DatasetError, LeaseLost, NotFound
from sdp.runners.exchange import exchange
from tests.local_ray import several_nodes
from tests.waiting import until

PIECES, PARTITIONS = list("abcd"), 6
OPTIONS: dict[str, Any] = {"labels": {}, "check": lambda: None}


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Cluster]:
    with several_nodes(*({"num_cpus": 1, "labels": {"disk": disk}} for disk in ("fast", "slow"))) as cluster:
        yield cluster


def this_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def read(piece: str, partitions: int) -> list[str]:
    return [f"{piece}{number}" for number in range(partitions)]


def read_node(piece: str, partitions: int) -> list[str]:  # noqa: ARG001
    return [this_node()] * partitions


def joined(*shares: str) -> str:
    return "-".join(shares)


def with_node(*shares: str) -> set[str]:
    return {*shares, this_node()}


@pytest.mark.parametrize("partitions", [1, PARTITIONS])
def test_partitions_and_their_shares_come_in_order(partitions: int, capsys: pytest.CaptureFixture[str]) -> None:
    results = exchange("looking", 1_000, read, PIECES, joined, partitions, **OPTIONS)
    assert list(results) == [f"a{n}-b{n}-c{n}-d{n}" for n in range(partitions)]
    assert capsys.readouterr().err == "looking: 250 of 1,000 rows\nlooking: 1,000 of 1,000 rows\n"


def test_tasks_run_on_nodes_with_the_labels() -> None:
    (slow,) = (node["NodeID"] for node in ray.nodes() if node["Labels"].get("disk") == "slow")  # type: ignore[no-untyped-call]
    results = exchange("looking", 4, read_node, PIECES, with_node, 2, **OPTIONS | {"labels": {"disk": "slow"}})
    assert list(results) == [{slow}, {slow}]


def fail(error: Exception, *_: object) -> Any:
    raise error


@pytest.mark.parametrize("error", [NotFound("s3://bucket/a: not there"), DatasetError("a/b.parquet: damaged")])
@pytest.mark.parametrize("stage", ["read", "reduce"])
def test_an_error_of_ours_is_raised_as_it_is(stage: str, error: Exception) -> None:
    functions = {"read": read, "reduce": joined, stage: partial(fail, error)}
    with pytest.raises(type(error)) as raised:
        list(exchange("looking", 4, functions["read"], PIECES, functions["reduce"], PARTITIONS, **OPTIONS))
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)


@pytest.mark.parametrize("calls", [0, 2, 5])
def test_a_lost_lease_ends_it_before_the_next_result(calls: int) -> None:
    left, results = iter(range(calls)), list[str]()

    def check() -> None:
        if next(left, None) is None:
            raise LeaseLost("another job writes")

    with pytest.raises(LeaseLost):
        results.extend(exchange("looking", 4, read, PIECES, joined, PARTITIONS, **OPTIONS | {"check": check}))
    assert len(results) == max(0, calls - len(PIECES))


def read_large(folder: Path, piece: str, partitions: int) -> list[NDArray[np.int64]]:
    """Return shares that are too large to travel with a task's reply."""
    with (folder / piece).open("a") as file:
        file.write("1")
    return [np.full(50_000, 10 * ord(piece) + number) for number in range(partitions)]


def first_of_each(folder: Path, *shares: NDArray[np.int64]) -> list[int]:
    until((folder / "go").exists, "a node is gone")
    return [int(share[0]) for share in shares]


def test_shares_of_a_lost_node_are_made_again(tmp_path: Path, nodes: Cluster) -> None:
    place: dict[str, Any] = {"num_cpus": 1, "labels": {"disk": "lost"}}
    doomed = nodes.add_node(**place)

    calls = count()

    def lose_the_node() -> None:
        if next(calls) == len(PIECES):  # before the first result, when all pieces have been read
            nodes.remove_node(doomed, allow_graceful=False)
            nodes.add_node(**place)
            (tmp_path / "go").touch()

    reading, reducing = partial(read_large, tmp_path), partial(first_of_each, tmp_path)
    options = {"labels": place["labels"], "check": lose_the_node}
    results = exchange("looking", 4, reading, PIECES, reducing, PARTITIONS, **options)
    assert list(results) == [[10 * ord(piece) + number for piece in PIECES] for number in range(PARTITIONS)]
    assert all(len((tmp_path / piece).read_text()) == 2 for piece in PIECES), "read again"
