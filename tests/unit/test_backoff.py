"""Pauses before retries."""

from sdp.backoff import backoff


def test_pauses_grow_are_spread_and_have_an_end() -> None:
    for retry in range(40):
        most = min(8.0, 0.25 * 2.0**retry)
        pauses = [backoff(retry, 0.25, 8.0, spread=True) for _ in range(50)]
        assert all(most / 2 <= pause <= most for pause in pauses)
        assert len(set(pauses)) > 1


def test_without_a_spread_a_pause_doubles_exactly_and_never_overflows() -> None:
    assert [backoff(retry, 1.0, 60.0) for retry in (0, 1, 2, 5, 6, 100_000)] == [1, 2, 4, 32, 60, 60]
