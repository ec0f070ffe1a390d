"""The pool's progress, without a cluster."""

import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sdp.config import WorkersConfig
from sdp.pool import WorkerPool
from sdp.ray import waiting


def test_a_pool_shows_its_progress_while_no_worker_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = threading.Event()

    def rows() -> Iterator[dict[str, bytes]]:
        assert shown.wait(20)
        yield {"made": pickle.dumps(4)}

    monkeypatch.setattr(waiting, "_STALLED_S", 1.0)
    monkeypatch.setattr(WorkerPool, "is_local", False)
    monkeypatch.setattr("sdp.ray.cluster.start_beside_driver", lambda *_: None)
    monkeypatch.setattr(WorkerPool, "_place", lambda _: None)
    monkeypatch.setattr(WorkerPool, "_dataset", lambda *_: SimpleNamespace(iter_rows=rows))
    pool = WorkerPool("generate", "generators", WorkersConfig())
    assert list(pool.run(lambda: None, [2], lambda done: None if done else shown.set())) == [4]
