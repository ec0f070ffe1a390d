"""The choice of where a job's stages run, and of how many workers a cluster gives them."""

import pytest

from sdp.config import WorkersConfig
from sdp.ray import cluster
from sdp.ray.waiting import Place
from sdp.runners import placement
from sdp.runners.where import works_here


def test_a_run_after_one_that_was_killed_is_on_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "is_absent", lambda: True)
    one, two = WorkersConfig(), WorkersConfig(num_workers=2)
    assert works_here(one, isolate=False)
    assert not works_here(two, isolate=True)
    assert capsys.readouterr().err == ""
    assert not works_here(one, isolate=True)
    assert "the run before ended without a word, so Ray runs this one" in capsys.readouterr().err


@pytest.mark.parametrize(("items", "least", "most"), [(3, 3, 3), (6, 4, 6), (50, 4, 8), (0, 1, 1)])
def test_a_job_takes_no_more_workers_than_it_has_items(
    items: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[Place]()
    monkeypatch.setattr(cluster, "connect", lambda: {})
    monkeypatch.setattr(placement, "place_of", lambda *_: Place("scaling", {"CPU": 1.0}, 4, 8, {"zone": "a"}))
    monkeypatch.setattr(placement, "wait_for", lambda _job, places, _wait_s: waited.extend(places))
    joined = placement.join("generate", "generator", WorkersConfig(), "out", items)
    assert (joined.least, joined.most, joined.at_once) == (least, most, 1)
    assert waited == [Place("scaling", {"CPU": 1}, least, least, {"zone": "a"})], "the fewest, with whole CPUs"
