"""A checkpoint before a node is taken away."""

from types import SimpleNamespace
from typing import Any

from sdp.train.callbacks.preemption import SaveBeforePreemption


def steps(callback: SaveBeforePreemption, count: int, main: bool = True) -> tuple[list[int], list[Any]]:
    """Return the steps with a requested checkpoint, and the history's events."""
    history: list[Any] = []
    run = SimpleNamespace(record=lambda event, **details: history.append((event, details)))
    trainer: Any = SimpleNamespace(
        save_wanted=False, world=SimpleNamespace(is_main=main), checkpointer=SimpleNamespace(run=run)
    )
    wanted = []
    for step in range(1, count + 1):
        report: Any = SimpleNamespace(step=step)
        callback.on_step(trainer, report)
        if trainer.save_wanted:
            wanted.append(step)
            trainer.save_wanted = False
    return wanted, history


def test_one_checkpoint_is_made_when_a_node_is_to_go_and_not_another() -> None:
    asked: list[bool] = []

    def is_near() -> bool:
        asked.append(True)
        return len(asked) >= 2

    wanted, history = steps(SaveBeforePreemption(is_near, every_steps=5), 30)
    assert wanted == [10]
    assert history == [("preemption", {"step": 10})]
    assert len(asked) == 2, "steps in between and after it ask nobody"


def test_every_worker_saves_and_one_writes_it_down() -> None:
    wanted, history = steps(SaveBeforePreemption(lambda: True, every_steps=5), 6, main=False)
    assert (wanted, history) == ([5], [])


def test_nothing_is_saved_while_no_node_is_to_go() -> None:
    assert steps(SaveBeforePreemption(lambda: False), 100) == ([], [])
