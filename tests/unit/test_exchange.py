"""The exchange of shares in this process, where a piece is alone."""

import pytest

from sdp.ray import cluster
from sdp.runners.exchange import exchange


def read(piece: str, partitions: int) -> list[str]:
    return [f"{piece}{number}" for number in range(partitions)]


@pytest.mark.parametrize(("pieces", "results"), [(["a"], [("a0",), ("a1",)]), ([], [])])
def test_a_piece_that_is_alone_starts_no_ray(
    monkeypatch: pytest.MonkeyPatch, pieces: list[str], results: list[tuple[str, ...]]
) -> None:
    monkeypatch.setattr(cluster, "connect", lambda: pytest.fail("Ray is started"))
    reduced = exchange("looking", 1, read, pieces, lambda *shares: shares, 2, labels={}, check=list)
    assert list(reduced) == results
