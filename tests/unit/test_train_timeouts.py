"""The time-outs on the way of a step, as docs/architecture.md lists them."""

from pathlib import Path
from typing import Any

from ray.train.v2._internal.constants import DEFAULT_WORKER_HEALTH_CHECK_TIMEOUT_S

from sdp.config import parse
from sdp.ray import cluster
from sdp.runners import desk
from sdp.storage import StorageOptions, retry
from sdp.train import group, launch
from sdp.train.callbacks import watchdog
from sdp.train.callbacks.usual import make_callbacks
from sdp.train.callbacks.watchdog import Watchdog

PAGE = Path(__file__).parents[2] / "docs/architecture.md"


def limits(mode: str) -> tuple[float, float | None]:
    """Return the watchdog's limits for the first step and for the others."""
    how: dict[str, Any] = {
        "source": {"uri": "s"}, "output": {"uri": "o"}, "model": {"source": "m"}, "max_steps": 1,
        "data": {"mode": mode},
    }  # fmt: skip
    (dog,) = [callback for callback in make_callbacks(parse("train", how)) if isinstance(callback, Watchdog)]
    return dog.seconds, dog.then


def test_each_time_out_is_as_listed_and_longer_than_those_inside_it() -> None:
    collectives = 1920.0  # as test_train_launch.py finds them
    first, then = limits("offline")
    assert limits("online") == (first, first)
    expected = [
        retry._ATTEMPT_S, watchdog._SAVE_S + watchdog._RECORD_S, group._AFTER_WATCHDOG_S, launch._BEGIN_S,
        StorageOptions().timeout_s, 480, then, DEFAULT_WORKER_HEALTH_CHECK_TIMEOUT_S, desk._SLOWEST_S, first,
        float(cluster._SETTINGS["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"]), collectives,
    ]  # fmt: skip
    _, _, table = PAGE.read_text().partition("### Time-outs")
    rows = [line.split("|") for line in table.partition("\n#")[0].splitlines() if line.startswith("|")][2:]
    assert [float(row[1]) for row in rows] == expected
    for row in rows:
        for shorter in filter(str.strip, row[4].split(",")):
            assert float(shorter) in expected
            assert float(shorter) < float(row[1])
