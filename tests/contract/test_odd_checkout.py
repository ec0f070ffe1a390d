"""A checkout works in any folder, even with blanks and non-ASCII letters in its path."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.misbehaving.server import ImageServer
from tests.process_kit import write_plain

ROOT = Path(__file__).parents[2]

FETCH_AND_DECODE = """
import functools, json, queue, sys
import certifi
import sdp
from sdp.config.download import FetchConfig, FiltersConfig, HostsConfig, ImageConfig
from sdp.download.fetch import Fetcher
from sdp.download.image import ImageRules, examine
from sdp.download.slot import Buffer
from sdp.sandbox.child import DecoderSettings
from sdp.sandbox.decoders import Decoders
from sdp.urls import parse

urls = sys.argv[1:]
outcomes = queue.Queue()
rules = ImageRules(ImageConfig(size=64), FiltersConfig(), 1 << 24)
settings = DecoderSettings(functools.partial(examine, rules), 1 << 32)
decoders = Decoders(settings, 1)

def take(fetched):
    if fetched.body is None:
        outcomes.put(str(fetched.failure))
    else:
        decoders.put(fetched.body, lambda reply, image: outcomes.put(reply["outcome"]))

fetcher = Fetcher(FetchConfig(allow_networks=("127.0.0.0/8",)), HostsConfig(per_second=None), Buffer(1 << 28), take)
fetcher.submit((number, parse(url)) for number, url in enumerate(urls))
while fetcher.error is None and decoders.error is None and outcomes.qsize() < len(urls):
    fetcher._thread.join(0.05)
errors = [repr(each) for each in (fetcher.error, decoders.error) if each]
fetcher.close()
decoders.close()
print(json.dumps([errors, [outcomes.get() for _ in range(outcomes.qsize())], [certifi.where(), sdp.__file__]]))
"""
"""A program that runs the download stage's image check without Ray."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "jürgen's sdp ü"
    shutil.copytree(ROOT / "sdp", folder / "sdp", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".venv").symlink_to(sys.prefix)  # Python takes its prefix from the path by which it was started
    return folder


def test_jobs_run_on_ray_in_a_checkout_with_an_odd_path_to_outputs_with_odd_names(checkout: Path) -> None:
    write_plain(checkout / "plain", 16, files=1)
    model = "model.source=builtin:tiny"
    assert "16 of 16 rows" in sdp(
        checkout, "process", "source.uri=plain", "output.uri=bilder-ä", model, "resolutions=[64]"
    )
    sizes = ("data.batch_size=4", "data.global_batch_size=4", "max_steps=1")
    sdp(checkout, "train", "source.uri=bilder-ä", "output.uri=lauf-ö", model, "data.resolution=64", *sizes)
    assert list((checkout / "lauf-ö" / "checkpoints").iterdir())


def sdp(checkout: Path, job: str, *settings: str) -> str:
    ended = subprocess.run(
        [str(checkout / ".venv/bin/python"), "-m", "sdp", job, *(f"--set={setting}" for setting in settings)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "RAY_raylet_start_wait_time_s": "150"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_images_are_fetched_and_decoded_in_a_checkout_with_an_odd_path(checkout: Path) -> None:
    with ImageServer(images=10, distinct=10) as server:
        ended = subprocess.run(
            [str(checkout / ".venv/bin/python"), "-c", FETCH_AND_DECODE, *map(server.image_url, range(10))],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    errors, outcomes, where = json.loads(ended.stdout)
    assert all(path.startswith(str(checkout)) for path in where)
    assert errors == []
    assert outcomes == ["written"] * 10
