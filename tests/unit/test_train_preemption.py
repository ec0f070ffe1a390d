"""A checkpoint before a node is taken away."""

from types import SimpleNamespace
from typing import Any

import pytest

from sdp.train.callbacks import checkpoints


@pytest.mark.parametrize(
    ("near_at", "main", "saved"), [(2, True, [10]), (1, False, [5]), (99, True, [])], ids=["once", "worker", "never"]
)
def test_one_checkpoint_is_saved_on_notice_that_a_node_will_be_lost(
    near_at: int, main: bool, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "LOOK_EVERY", 5)
    asked, history, wanted = list[bool](), list[Any](), list[int]()

    def is_near() -> bool:
        asked.append(True)
        return len(asked) >= near_at

    run = SimpleNamespace(record=lambda event, **details: history.append((event, details)))
    trainer: Any = SimpleNamespace(world=SimpleNamespace(is_main=main), checkpointer=SimpleNamespace(run=run))
    callback = checkpoints.SaveBeforePreemption(is_near)
    for step in range(1, 31):
        trainer.save_wanted = False
        report: Any = SimpleNamespace(step=step)
        callback.on_step(trainer, report)
        wanted += [step] * trainer.save_wanted
    assert wanted == saved
    assert history == [("preemption", {"step": step}) for step in saved if main]
    assert len(asked) == min(near_at, 6), "steps in between and after it ask nobody"
