"""The wait for the first trainer of an attempt."""

import pytest

from sdp import cluster
from sdp.train import launch
from sdp.waiting import Place, Stall


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> tuple[Stall, list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(cluster, "nodes_with", lambda _: [{"Resources": {"CPU": 1}}])

    def give_up(message: str) -> None:
        raise SystemExit(message)

    monkeypatch.setattr(cluster, "give_up", give_up)
    return Stall("train", [Place("scaling", {"CPU": 1.0}, 1, 1)], notify=lines.append), lines


def test_trainers_that_have_places_but_never_run_end_the_job(
    stall: tuple[Stall, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "own_groups", lambda: {"a": "CREATED"})
    start, lines = stall
    for now in range(330):
        launch._check_start(start, now)
    assert [line.partition(";")[0] for line in lines] == [
        f"train: no progress for {seconds // 60}:{seconds % 60:02} (no trainer runs yet"
        for seconds in range(60, 301, 30)
    ]
    assert all("; all have places); needs 1 CPU" in line for line in lines)
    with pytest.raises(SystemExit, match=r"^train: no progress for 5:30; needs 1 CPU .*; run the job again$"):
        launch._check_start(start, 330)


def test_trainers_whose_places_were_taken_meanwhile_are_waited_for(
    stall: tuple[Stall, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "own_groups", lambda: {"a": "PENDING"})
    start, lines = stall
    for now in range(1000):
        launch._check_start(start, now)
    assert lines[0].startswith(
        "train: no progress for 1:00 (no trainer runs yet; their places are in use); needs 1 CPU"
    )
    monkeypatch.setattr(launch, "own_groups", dict)
    for now in range(1000, 1330):
        launch._check_start(start, now)
    with pytest.raises(SystemExit):
        launch._check_start(start, 1330)
