"""A checkout works in any folder, even with blanks and non-ASCII letters in its path."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.download_kit import plain_urls, write_urls
from tests.latents import make_latents
from tests.misbehaving.server import ImageServer
from tests.programs import ended

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "jürgen's sdp ü"
    shutil.copytree(ROOT / "sdp", folder / "sdp", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".venv").symlink_to(sys.prefix)  # Python takes its prefix from the path by which it was started
    return folder


@pytest.mark.slow
def test_jobs_run_on_ray_in_a_checkout_with_an_odd_path_to_outputs_with_odd_names(checkout: Path) -> None:
    with ImageServer(images=10, distinct=10) as server:
        write_urls(checkout / "urls", plain_urls(server, 10))
        local = ("fetch.allow_networks=[127.0.0.0/8]", "hosts.per_second=null", "workers.cpus=1")
        done = sdp(checkout, "download", "source.uri=urls", "output.uri=fotos-é", *local)
        assert "10 written" in done
    make_latents(checkout, 16, vocabulary=50)
    (checkout / "latents").rename(checkout / "bilder-ä")
    sizes = ("data.resolution=64", "data.batch_size=4", "data.global_batch_size=4", "max_steps=1")
    sdp(checkout, "train", "source.uri=bilder-ä", "output.uri=lauf-ö", "model.source=builtin:tiny", *sizes)
    assert list((checkout / "lauf-ö" / "checkpoints").iterdir())


def sdp(checkout: Path, job: str, *settings: str) -> str:
    done = ended(
        [str(checkout / ".venv/bin/python"), "-m", "sdp", job, *(f"--set={setting}" for setting in settings)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "RAY_ADDRESS": "local", "RAY_raylet_start_wait_time_s": "150"},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
