"""The start of several workers, and the end of all when one cannot start."""

import time
from pathlib import Path

import pytest

from sdp.model import load
from sdp.model.sources import resolve
from sdp.train.assemble import make_networks
from sdp.train.world import World
from tests.training import config
from tests.workers import run_workers


def failure(world: World, root: Path) -> tuple[str, float]:
    """Return a worker's error if the main worker cannot load the model, and the seconds until then."""
    if world.is_main:
        load._diffusers = lambda *_: 1 / 0
    how, began = config(root, model__unet="pretrained"), time.monotonic()
    with pytest.raises(Exception) as caught:
        make_networks(how, resolve(how.model.source), world)
    return str(caught.value), time.monotonic() - began


def test_all_workers_end_with_the_main_workers_reason_if_it_cannot_load_the_model(inputs: Path) -> None:
    (main, _), (other, seconds) = run_workers(2, failure, inputs)
    assert main == "division by zero"
    assert other == f"ZeroDivisionError: {main}"
    assert seconds < 30, "the process group waits for 60 s"
