"""Jobs whose store, a real S3 server, is away for a while; all times are a thirtieth of those in production."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from sdp.config import dump_yaml
from sdp.download import job as download
from sdp.generate import job as generate
from sdp.lease import Lease
from sdp.process import job as process
from sdp.score import job as score
from sdp.storage import StorageOptions, open_storage, retry
from sdp.train import job as train
from sdp.train.run_folder import RunFolder
from tests.download_kit import check_exactly_once, config_for, write_urls
from tests.evaluate_kit import tiny_clip
from tests.generate_kit import generate_config, make_checkpoint, tiny_model
from tests.integration.s3 import Gateway, be_client, gateway_fixture, upload  # noqa: F401 (fixture)
from tests.kit import accounted, not_none
from tests.latents import make_latents
from tests.local_ray import one_node
from tests.misbehaving.server import ImageServer
from tests.process_kit import config_of, every_tenth, make_images, write_model
from tests.score_kit import score_config, write_predictor
from tests.training import config
from tests.waiting import as_soon_as, until

pytestmark = pytest.mark.needs("versitygw")

SCALE = 30
AWAY_S = 300 / SCALE
ROWS, UNIT = 60, 10


def hasten() -> None:
    """Scale the times of this process's stores and leases."""
    for function in (StorageOptions.__init__, Lease.acquire.__func__):  # type: ignore[attr-defined]
        defaults = function.__defaults__
        function.__defaults__ = tuple(value / SCALE if isinstance(value, float) else value for value in defaults)
    retry._LONGEST_PAUSE_S /= SCALE


@pytest.fixture
def store(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    be_client(gateway.env, tmp_path, monkeypatch)
    for function in (StorageOptions.__init__, Lease.acquire.__func__):  # type: ignore[attr-defined]
        monkeypatch.setattr(function, "__defaults__", function.__defaults__)
    monkeypatch.setattr(retry, "_LONGEST_PAUSE_S", retry._LONGEST_PAUSE_S)
    hasten()
    yield gateway
    if gateway.process is None:
        gateway.start()


def run_process(top: str, root: Path, _: pytest.FixtureRequest) -> None:
    make_images(root, rows=ROWS, unit_rows=UNIT)
    images, model = upload(root / "images", f"{top}/images"), upload(write_model(root / "model"), f"{top}/model")
    dataset = not_none(process.run(config_of(images, f"{top}/out", model, f"output.rows_per_file={UNIT}")).dataset)
    assert accounted(dataset) == [row for row in range(ROWS) if not every_tenth(row)]


def run_score(top: str, root: Path, _: pytest.FixtureRequest) -> None:
    make_images(root, rows=ROWS, unit_rows=UNIT)
    write_predictor(root / "predictor.pth", [12, 4, 1])
    networks = f"score.clip_model={tiny_clip(root / 'clip')}", f"score.aesthetics={root / 'predictor.pth'}"
    config = score_config(upload(root / "images", f"{top}/images"), f"{top}/out", *networks)
    dataset = not_none(score.run(config).dataset)
    assert accounted(dataset) == [row for row in range(ROWS) if not every_tenth(row)]


def run_download(top: str, root: Path, request: pytest.FixtureRequest) -> None:
    server: ImageServer = request.getfixturevalue("server")
    urls = [server.image_url(number) for number in range(ROWS)]
    source = upload(write_urls(root / "meta", urls, files=2), f"{top}/meta")
    fetch = {"connections": 4}
    summary = download.run(config_for(source, f"{top}/out", output={"rows_per_file": UNIT}, fetch=fetch))
    assert len(check_exactly_once(not_none(summary).dataset, range(ROWS))) == ROWS


def run_train(top: str, root: Path, _: pytest.FixtureRequest) -> None:
    tiny_model(root / "model")
    make_latents(root, ROWS, uri=f"{top}/latents", vocabulary=50)
    places = {"source__uri": f"{top}/latents", "output__uri": f"{top}/out"}
    summary = train.run(config(root, **places, max_steps=20, checkpoint__every_steps=2))
    assert (summary.state.step, summary.recoveries) == (20, 0)
    assert [event["event"] for event in RunFolder(open_storage(f"{top}/out")).events()].count("training") == 1


def run_generate(top: str, root: Path, _: pytest.FixtureRequest) -> None:
    checkpoint = make_checkpoint(f"{top}/run", tiny_model(root / "model"))
    dataset = not_none(generate.run(generate_config(f"{top}/out", checkpoint, ["a", "b", "c"])))
    assert accounted(dataset) == [0, 1, 2]


JOBS: dict[str, tuple[Callable[[str, Path, pytest.FixtureRequest], None], str]] = {
    "process": (run_process, "parts/"),
    "score": (run_score, "_lease/"),
    "download": (run_download, "parts/"),
    "train": (run_train, "complete.json"),
    "generate": (run_generate, "_lease/"),
}
"""Each job, and a part of the name of the object after which the store goes away."""


@pytest.mark.parametrize(
    ("where", "job"),
    [
        pytest.param(where, job, marks=[] if (where, job) == ("here", "process") else pytest.mark.slow)
        for where in ("here", "on Ray")
        for job in JOBS
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_a_store_that_is_away_for_five_minutes_costs_time_and_not_the_run(
    store: Gateway, request: pytest.FixtureRequest, tmp_path: Path, where: str, job: str
) -> None:
    run, moment = JOBS[job]
    folder = f"{where}-{job}".replace(" ", "-")
    back = threading.Event()

    def go_and_return(_: bool) -> None:
        store.kill()
        time.sleep(AWAY_S)
        store.start()
        back.set()

    def has_come() -> bool:
        return any(name.startswith(f"{folder}/out/") and moment in name for name in store.objects())

    leaver = as_soon_as(has_come, go_and_return)
    with one_node(cpus=3, setup=hasten) if where == "on Ray" else nullcontext():
        run(f"{store.uri}/{folder}", tmp_path, request)
    assert back.is_set(), "the job has ended while its store was away"
    leaver.join()


@pytest.mark.slow
def test_a_job_that_is_stopped_while_its_store_is_away_ends_soon(store: Gateway, tmp_path: Path) -> None:
    make_images(tmp_path, rows=500, unit_rows=UNIT)
    images, job = upload(tmp_path / "images", f"{store.uri}/stopped/images"), tmp_path / "process.yaml"
    model, settings = write_model(tmp_path / "model"), f"output.rows_per_file={UNIT}"
    job.write_text(dump_yaml(config_of(images, f"{store.uri}/stopped/out", model, settings)))
    command = [sys.executable, "-m", "sdp", "process", "--config", str(job)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: any(name.startswith("stopped/out/parts/") for name in store.objects()), "a part")
        store.kill()
        assert any(line.startswith("retrying: ") for line in not_none(process.stderr))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert [line for line in err.splitlines() if "stopped by SIGINT" in line] == err.splitlines()[-1:]
