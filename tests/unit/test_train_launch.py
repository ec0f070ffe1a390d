"""The wait for the first trainer of an attempt, and for encoders."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from sdp import cluster
from sdp.train import launch


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(launch, "say", lines.append)

    def give_up(message: str) -> None:
        raise SystemExit(message)

    monkeypatch.setattr(cluster, "give_up", give_up)
    return lines


def test_trainers_that_have_places_but_never_run_end_the_job(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "own_groups", lambda: {"a": "CREATED"})
    start = launch._Start(0.0)
    for now in range(301):
        start.check(now, begun=False)
    assert said == [f"train: no trainer runs yet ({minute}:01); all have places" for minute in range(1, 5)]
    with pytest.raises(SystemExit, match=r"^train: no trainer ran within 5:00; run the same command again"):
        start.check(301, begun=False)


def test_trainers_whose_places_were_taken_meanwhile_are_waited_for(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "own_groups", lambda: {"a": "PENDING"})
    start = launch._Start(0.0)
    for now in range(1000):
        start.check(now, begun=False)
    assert said[0] == "train: no trainer runs yet (1:01); their places are in use"
    monkeypatch.setattr(launch, "own_groups", dict)
    start.check(1299, begun=False)
    start.check(5000, begun=True)
    with pytest.raises(SystemExit):
        start.check(5000, begun=False)


def test_lines_about_encoders_are_asked_for_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [["one"], RayActorError(), ["two"], []]
    asked, ready = itertools.count(), [True, True, True, False]

    def get(reference: int) -> Any:
        if isinstance(answers[reference], RayActorError):
            raise answers[reference]
        return answers[reference]

    monkeypatch.setattr(launch.ray, "get", get)
    monkeypatch.setattr(launch.ray, "wait", lambda references, timeout: ([r for r in references if ready[r]], timeout))
    stalls = launch._Stalls(SimpleNamespace(stalls=SimpleNamespace(remote=lambda: next(asked))))
    taken = [stalls.take() for _ in range(6)]
    assert taken == [[], ["one"], [], ["two"], [], []]
    assert next(asked) == 4, "the last one has not been answered"
