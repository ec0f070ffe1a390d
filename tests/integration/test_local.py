"""Jobs in this process, without Ray: the same parts, and what happens when something fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import ray
import torch

from sdp.config import dump_yaml
from sdp.datasets import parts
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.download import job as downloading
from sdp.encode.chunk import Chunk, Encoded
from sdp.encode.encoder import Encoder
from sdp.errors import SdpError
from sdp.lease import Record
from sdp.model import load
from sdp.process import job
from sdp.sandbox import decoders
from sdp.storage import open_storage
from tests.download_kit import check_exactly_once, config_for, plain_urls, write_urls
from tests.kit import accounted, not_none, raising
from tests.local_ray import one_node
from tests.misbehaving.server import ImageServer
from tests.process_kit import DEADLY, config_of, make_images, picture, write_plain
from tests.programs import ended, processes_with_variable
from tests.waiting import until


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 60 rows, of which 54 have pictures."""
    root = tmp_path_factory.mktemp("root")
    make_images(root, rows=60, unit_rows=20)
    return root / "images"


def parts_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "parts").iterdir()}


def failing(monkeypatch: pytest.MonkeyPatch, fails: Any) -> None:
    """Have the encoder raise an error for the chunks that hold certain rows."""
    encode = Encoder.__call__

    def call(self: Encoder, chunk: Chunk) -> Encoded:
        if any(fails(row) for row in chunk.rows.tolist()):
            raise ValueError("no such luck")
        return encode(self, chunk)

    monkeypatch.setattr(Encoder, "__call__", call)


def written(settings: Any) -> Dataset:
    return not_none(job.run(settings).dataset)


def process_apart(folder: Path, images: Path, model: Path, before: str = "", *more: str) -> CompletedProcess[str]:
    """Run `process` into folder/out in a process of its own, after some code; it prints whether it has loaded Ray."""
    arguments = [f"source.uri={images}", f"output.uri={folder / 'out'}", f"model.source={model}", "resolutions=[64]"]
    program = (
        f"import sys\nfrom sdp.config import load\nfrom sdp.process import job\n{before}\n"
        f"job.run(load('process', None, {[*arguments, *more]!r}))\nprint('ray' in sys.modules)"
    )
    return ended([sys.executable, "-c", program], timeout=200)


def test_process_writes_the_parts_that_ray_writes_with_two_encoders(tmp_path: Path, model: Path) -> None:
    torch.set_num_threads(1)  # as Ray's workers; more add in another order
    write_plain(tmp_path / "source", 50)
    settings = ("output.rows_per_file=20", "seed=4", "transform.crop=random", "encode.text=text_embedding")
    written(config_of(tmp_path / "source", tmp_path / "here", model, *settings))
    with one_node(cpus=3):
        written(config_of(tmp_path / "source", tmp_path / "on_ray", model, *settings, "encode.num_workers=2"))
    assert parts_in(tmp_path / "here") == parts_in(tmp_path / "on_ray")


def test_a_row_at_which_the_encoder_fails_is_isolated(
    tmp_path: Path, model: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda row: row == 23)
    dataset = written(config_of(images, tmp_path / "out", model, "output.rows_per_file=20"))
    assert (dataset.manifest.counts.written, dict(dataset.manifest.counts.reasons)) == (53, {"crashed": 1})
    account = parts.read_account(dataset.storage, dataset.parts["path"][1].as_py()).to_pylist()
    assert (account[3]["row"], account[3]["detail"], account[3]["attempts"]) == (23, "ValueError: no such luck", 2)
    assert len(accounted(dataset)) == 54


@pytest.mark.parametrize("at", ["load", "encode"])
def test_an_encoder_that_always_fails_ends_the_job(
    tmp_path: Path, model: Path, images: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    if at == "load":
        write_plain(tmp_path / "one", 1)  # which is not to blame
        monkeypatch.setattr(load, "load_vae", raising(ValueError("CUDA error: no such luck")))
    else:
        failing(monkeypatch, lambda _: True)
    source, message = {
        "load": (tmp_path / "one", "encode: the encoder does not load.*ValueError: CUDA error: no such luck"),
        "encode": (images, "10 pieces failed in a row.*ValueError: no such luck"),
    }[at]
    with pytest.raises(SdpError, match=message):
        job.run(config_of(source, tmp_path / "out", model, "output.rows_per_file=20"))
    assert not (tmp_path / "out/parts").exists()


def test_a_decoder_that_does_not_start_ends_the_job_and_fails_no_row(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plain(tmp_path / "source", 20)
    monkeypatch.setattr("sdp.sandbox.decoders.subprocess.Popen", raising(BlockingIOError("no more processes")))
    with pytest.raises(SdpError, match=r"decoding has stopped \(BlockingIOError: no more processes\)"):
        job.run(config_of(tmp_path / "source", tmp_path / "out", model))
    assert not (tmp_path / "out/parts").exists()


def test_each_core_has_one_decoder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plain(tmp_path / "source", 60)
    started, start = [], decoders._Child.__init__

    def noted(*arguments: Any) -> None:
        started.append(arguments)
        start(*arguments)

    monkeypatch.setattr(decoders._Child, "__init__", noted)
    monkeypatch.setattr("sdp.runners.here.usable_cores", lambda: 2)
    written(config_of(tmp_path / "source", tmp_path / "out", model, "output.rows_per_file=4"))
    assert 1 <= len(started) <= 2


def test_a_fault_of_the_gpu_ends_the_process_and_keeps_its_lease(tmp_path: Path, model: Path, images: Path) -> None:
    fails = (
        "from sdp.encode.encoder import Encoder\nfrom tests.kit import raising\n"
        "Encoder.__call__ = raising(RuntimeError('CUDA error: an illegal memory access'))"
    )
    done = process_apart(tmp_path, images, model, fails)
    assert done.returncode == 1
    assert "CUDA error: an illegal memory access; run the same command again" in done.stderr
    record = Record.load((tmp_path / "out/_lease/0000000001.json").read_bytes())
    assert not not_none(record).released


def test_download_writes_the_parts_that_ray_writes(tmp_path: Path) -> None:
    with ImageServer(images=200, distinct=20) as server:
        source = write_urls(tmp_path / "urls", [*plain_urls(server, 60), f"{server.url}/missing"], files=2)
        here, on_ray = (config_for(source, tmp_path / name, workers={"cpus": 4}) for name in ("here", "on_ray"))
        assert downloading.run(here) is not None
        assert not ray.is_initialized()
        with one_node(cpus=2):
            assert downloading.run(on_ray) is not None
    assert parts_in(tmp_path / "here") == parts_in(tmp_path / "on_ray")
    dataset = open_dataset(open_storage(here.output.uri))
    assert len(check_exactly_once(dataset, range(61))) == 60


@pytest.mark.slow
def test_the_run_after_one_that_a_row_has_killed_is_on_ray(tmp_path: Path, model: Path) -> None:
    def image(row: int) -> bytes:
        return picture(row) + (DEADLY if row == 23 else b"")

    make_images(tmp_path, rows=40, unit_rows=20, fails=lambda _: False, image=image)
    (tmp_path / "wanted").write_text("1")
    follows = f"from tests.process_kit import follow_instructions\nfollow_instructions({str(tmp_path)!r})"
    arguments = (tmp_path, tmp_path / "images", model, follows, "output.rows_per_file=20")
    runs = [process_apart(*arguments) for _ in range(2)]
    assert runs[0].returncode == -signal.SIGKILL
    assert "the run before ended without a word" not in runs[0].stderr
    # Ray's workers do not follow the instructions.
    assert (runs[1].returncode, runs[1].stdout.splitlines()[-1]) == (0, "True"), runs[1].stderr
    assert "the run before ended without a word" in runs[1].stderr
    assert open_dataset(open_storage(str(tmp_path / "out"))).manifest.counts.written == 40


def test_no_job_on_this_machine_imports_ray(tmp_path: Path, model: Path, images: Path) -> None:
    done = process_apart(tmp_path, images, model)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["False"]), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_that_is_stopped_ends_with_its_decoders_and_goes_on(tmp_path: Path, model: Path) -> None:
    write_plain(tmp_path / "source", 400)
    (tmp_path / "process.yaml").write_text(
        dump_yaml(config_of(tmp_path / "source", tmp_path / "out", model, "output.rows_per_file=10"))
    )
    command = [sys.executable, "-m", "sdp", "process", "--config", str(tmp_path / "process.yaml")]
    environment = {**os.environ, "SDP_TEST_MARK": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(open_storage(str(tmp_path / "out")).names("parts")) > 1, "two parts", 100)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (
        130, "sdp: stopped by SIGINT; the same command continues where it stopped",
    )  # fmt: skip
    until(lambda: not processes_with_variable("SDP_TEST_MARK", tmp_path), "all have ended", 10)
    done = ended(command, env=environment, check=True)
    assert "ended without a word" not in done.stderr, "the lease was released"
    assert open_dataset(open_storage(str(tmp_path / "out"))).manifest.counts.written == 400


def test_process_that_is_stopped_does_not_wait_for_its_pieces(tmp_path: Path, model: Path) -> None:
    write_plain(tmp_path / "source", 20)
    config = config_of(tmp_path / "source", tmp_path / "out", model)
    (tmp_path / "process.yaml").write_text(dump_yaml(config))
    program = (
        "import pathlib, sys, time\nfrom sdp.cli import main\nfrom sdp.encode.work import EncodeSpec\n"
        f"begun = pathlib.Path({str(tmp_path / 'begun')!r})\n"
        "EncodeSpec.prepare = lambda *_: (begun.touch(), time.sleep(100))\n"
        f"sys.argv = ['sdp', 'process', '--config', {str(tmp_path / 'process.yaml')!r}]\nsys.exit(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as process:
        until((tmp_path / "begun").exists, "a piece has begun", 100)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
