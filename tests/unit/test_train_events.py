"""The numbers of a metrics line for TensorBoard and W&B."""

from sdp.train.callbacks.tensorboard import numbers


def test_numbers_are_taken_out_of_groups_and_nothing_else_is_a_number() -> None:
    line = {"step": 3, "loss": None, "time": {"data": 0.5}, "slowest": {"rank": 1, "host": "a"}, "ok": True, "lr": 1}
    assert numbers(line) == {"time/data": 0.5, "slowest/rank": 1.0, "lr": 1.0}
