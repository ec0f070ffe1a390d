"""The training ledger."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp.datasets.ledger import Ledger
from sdp.errors import DatasetError

ROWS = st.lists(st.integers(0, 2**40), max_size=50)


def array(rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


@given(st.lists(st.tuples(st.integers(0, 3), ROWS), max_size=8))
def test_a_ledger_is_the_union_of_its_workers_in_any_order(adds: list[tuple[int, list[int]]]) -> None:
    workers = []
    for epoch, rows in adds:
        worker = Ledger()
        worker.add(epoch, array(rows))
        workers.append(Ledger.from_bytes(worker.to_bytes()))
    forward, backward = Ledger(), Ledger()
    forward.merge(workers)
    backward.merge(reversed(workers))
    for epoch in range(4):
        expected = {row for e, rows in adds if e == epoch for row in rows}
        assert set(forward.rows(epoch)) == set(backward.rows(epoch)) == expected
        assert forward.consumed(epoch) == len(expected)


def test_the_epochs_of_an_address_are_listed() -> None:
    ledger = Ledger()
    ledger.add(0, array([7]))
    ledger.add(2, array([5, 6, 7, 8]))
    assert ledger.epochs_of(7) == [0, 2]
    assert ledger.epochs_of(9) == []


@pytest.mark.parametrize("damage", [lambda d: d[:-3], lambda d: b"X" + d[1:], lambda _: b"", lambda d: d[:20]])
def test_a_damaged_ledger_is_refused(damage) -> None:  # type: ignore[no-untyped-def]
    ledger = Ledger()
    ledger.add(0, np.arange(100))
    with pytest.raises(DatasetError, match=r"step-5.*not a ledger"):
        Ledger.from_bytes(damage(ledger.to_bytes()), "step-5")
