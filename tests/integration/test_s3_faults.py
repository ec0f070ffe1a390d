"""Jobs and a storage over a real S3 server behind a proxy that does what object stores do on a bad day."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray._private import worker

from sdp.datasets.manifest import Dataset
from sdp.download import job as download
from sdp.model.sharded import read_tensors
from sdp.model.tensor_index import read_tensor_index
from sdp.process import job as process
from sdp.storage import open_storage, retry
from sdp.train import job as train
from sdp.train.run_folder import RunFolder
from tests.download_kit import check_exactly_once, config_for, write_urls
from tests.integration.s3 import Gateway, be_client, gateway_fixture, upload  # noqa: F401 (fixture)
from tests.kit import accounted, not_none
from tests.local_ray import one_node
from tests.misbehaving.server import ImageServer
from tests.process_kit import config_of, every_tenth, make_images
from tests.s3_faults import BadDay, Faults, bad_day
from tests.training import config, tiny_inputs
from tests.waiting import as_soon_as

pytestmark = pytest.mark.needs("versitygw")

ROWS, UNIT = 80, 10
PAUSES_S = {"_FIRST_PAUSE_S": 0.05, "_LONGEST_PAUSE_S": 1.0}
GONE_S = 3.0  # five retries take less


@pytest.fixture(scope="module")
def day(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BadDay]:
    """A proxy, which is also where this process and Ray's workers find credentials."""
    folder = tmp_path_factory.mktemp("home")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        proxy = stack.enter_context(bad_day(gateway, folder))
        be_client(proxy.env, folder, patch)
        for name, pause_s in PAUSES_S.items():
            patch.setattr(retry, name, pause_s)
        stack.enter_context(one_node(cpus=3, setup=lambda: vars(retry).update(PAUSES_S)))
        yield proxy


@pytest.mark.parametrize(
    ("faults", "happened"),
    [
        (Faults(busy=0.4), "SlowDown"),
        (Faults(reset=0.2), "reset after"),
        (Faults(stale_s=1.0), "stale"),
        (Faults(lasting_s=3.0, delay_s=0.05), "credentials"),
    ],
    ids=["busy", "resets", "stale listings", "credentials that expire"],
)
def test_objects_are_written_and_read_whole(
    day: BadDay, gateway: Gateway, faults: Faults, happened: str, request: pytest.FixtureRequest
) -> None:
    folder = open_storage(f"{gateway.uri}/{request.node.callspec.id.replace(' ', '-')}")
    day.faults = faults
    day.counts.clear()

    def write_and_read(number: int) -> bytes:
        folder.create(f"parts/{number}", bytes([number]) * 3000)
        folder.names()
        return folder.read(f"parts/{number}")

    with ThreadPoolExecutor(8) as executor:
        contents = list(executor.map(write_and_read, range(40)))
    day.faults = Faults()
    assert contents == [bytes([number]) * 3000 for number in range(40)]
    assert len(folder.names("parts")) == 40
    assert day.counts[happened] > 5, day.counts


@contextmanager
def every_fault(day: BadDay, gateway: Gateway, output: str) -> Iterator[None]:
    """Disturb what is done in the block, and be away for a while once an object of this folder is there."""
    day.faults = Faults(delay_s=0.02, busy=0.15, reset=0.05, stale_s=1.0, lasting_s=3.0)
    day.counts.clear()

    def go_and_return(_: bool) -> None:
        day.faults.gone = True
        threading.Timer(GONE_S, lambda: setattr(day.faults, "gone", False)).start()

    leaver = as_soon_as(lambda: any(name.startswith(f"{output}/") for name in gateway.objects()), go_and_return)
    yield
    leaver.join()
    day.faults = Faults()
    assert min(day.counts[what] for what in ("SlowDown", "gone", "credentials")) > 3, day.counts


def check_equal(remote: Dataset, local: Dataset, gateway: Gateway) -> None:
    """The parts in the bucket are those on the disk, byte by byte."""
    names = remote.storage.names("parts")
    assert names == local.storage.names("parts")
    assert len(names) == ROWS // UNIT
    for name in names:
        assert remote.storage.read(name) == local.storage.read(name)
    assert gateway.pending_uploads() == []


def test_latents_from_and_to_a_bucket_with_every_fault_are_those_on_a_disk(
    day: BadDay, gateway: Gateway, model: Path, tmp_path: Path
) -> None:
    make_images(tmp_path, rows=ROWS, unit_rows=UNIT)
    settings = f"output.rows_per_file={UNIT}"
    local = process.run(config_of(tmp_path / "images", tmp_path / "out", model, settings))
    images, far_model = upload(tmp_path / "images", f"{gateway.uri}/images"), upload(model, f"{gateway.uri}/model")
    with every_fault(day, gateway, "latents/parts"):
        remote = not_none(process.run(config_of(images, f"{gateway.uri}/latents", far_model, settings)).dataset)
    check_equal(remote, not_none(local.dataset), gateway)
    assert accounted(remote) == [row for row in range(ROWS) if not every_tenth(row)]


@pytest.mark.slow
def test_images_to_a_bucket_with_every_fault_are_those_on_a_disk(
    day: BadDay, gateway: Gateway, server: ImageServer, tmp_path: Path
) -> None:
    settings = {"fetch": {"connections": 4}, "output": {"rows_per_file": UNIT}, "concurrency": 1}
    urls = [server.image_url(n, "404" if n % 9 == 4 else "") for n in range(ROWS)]
    source = write_urls(tmp_path / "meta", urls, files=2)
    far = upload(source, f"{gateway.uri}/meta")
    with every_fault(day, gateway, "out/parts"):
        remote = not_none(download.run(config_for(far, f"{gateway.uri}/out", **settings))).dataset
    local = not_none(download.run(config_for(source, tmp_path / "out", **settings))).dataset
    check_equal(remote, local, gateway)
    assert sorted(check_exactly_once(remote, range(ROWS))) == [n for n in range(ROWS) if n % 9 != 4]


@pytest.mark.slow
def test_trainers_of_a_bucket_with_every_fault_learn_the_same_and_write_and_log_no_key(
    day: BadDay, gateway: Gateway, tmp_path: Path
) -> None:
    tiny_inputs(tmp_path)
    far = upload(tmp_path / "latents", f"{gateway.uri}/training/latents")
    how = {"scaling__num_workers": 2, "max_steps": 12, "checkpoint__every_steps": 2, "data__batch_size": 4}
    how |= {"samples__every_steps": 3, "samples__prompts": ["a"], "samples__steps": 2}
    train.run(config(tmp_path, "run", **how))
    with every_fault(day, gateway, "training/run/checkpoints/step-000000002"):
        day.faults.busy = 0.25
        summary = train.run(config(tmp_path, source__uri=far, output__uri=f"{gateway.uri}/training/run", **how))
    assert (summary.state.step, summary.recoveries) == (12, 0)
    remote, local = (RunFolder(open_storage(uri)) for uri in (f"{gateway.uri}/training/run", str(tmp_path / "run")))
    names = read_tensor_index(local.checkpoint(12)).tensors
    assert names
    expected = read_tensors(local.checkpoint(12), names)
    for name, tensor in read_tensors(remote.checkpoint(12), names).items():
        assert tensor.equal(expected[name]), name
    assert [[*remote.samples(step)] for step in remote.sample_steps()] == [
        [*local.samples(step)] for step in local.sample_steps()
    ]
    assert gateway.pending_uploads() == []
    written = [file for file in (gateway.root / gateway.bucket / "training").rglob("*") if file.is_file()]
    assert len(written) > 20
    node: Any = worker._global_node
    logs = [file for file in Path(node._session_dir, "logs").rglob("*") if file.is_file()]
    assert len(logs) > 10
    for file in (*written, *logs):
        content = file.read_bytes()
        assert gateway.secret_key.encode() not in content, file
        assert gateway.access_key.encode() not in content, file
