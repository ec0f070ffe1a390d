"""Garbage collection by steps."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from sdp.train.callbacks.garbage import CollectGarbage


@pytest.mark.own_process
def test_garbage_is_collected_at_some_steps_and_at_no_other_time() -> None:
    steps: list[int] = []
    step = 0

    def collected(phase: str, _: object) -> None:
        if phase == "start":
            steps.append(step)

    trainer: Any = None
    gc.unfreeze()
    callback = CollectGarbage(every_steps=2)
    callback.on_start(trainer)
    gc.callbacks.append(collected)
    try:
        assert not gc.isenabled()
        for step in (1, 2, 3, 4):
            report: Any = SimpleNamespace(step=step)
            callback.on_step(trainer, report)
    finally:
        gc.callbacks.remove(collected)
        callback.close()
    assert steps == [2, 4]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
