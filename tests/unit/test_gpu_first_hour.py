"""The rows of the first hour up to their first CUDA call, by their own arguments, for every GPU of the catalogue."""

from argparse import Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from scripts.bench import _gpu_checks, _training, gpu_encode, gpu_first_hour, gpu_train, kernels, tables
from scripts.demo import __main__ as demo
from sdp import config
from sdp.encode.encoder import Encoder
from sdp.families.classes import network_class
from sdp.hardware import GPUS, TERA, Gpu
from sdp.train.world import World
from tests.training import Crash, CrashAt

VAE_FLOPS, REAL = gpu_encode._vae_flops, gpu_encode._real


class Reached(Exception):
    """Raised where a row would use a GPU, or start another program."""


def reached(*call: Any, **_: Any) -> Any:
    raise Reached(*call)


def train(arguments: list[str], gpu: Gpu, folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpu_train, "run", lambda case: case)
    options = gpu_train._arguments(arguments)
    source = str(_training.make_model(folder / "model", tiny=False, name=options.model).source)
    for workers in (1, 8):
        (case,) = gpu_train.cases(options, workers)  # one process a GPU in the row's time
        for product in gpu.products:
            first = gpu_train._first_batch(case, [product])
            parts = case["micro_batches"]
            trial = _training.make_config({**case, "batch": first, "folder": str(folder)}, workers)
            memory = _training.predicted(trial, workers, gpu, options.model)
            assert gpu.memory_bytes < memory.total + first // parts * memory.per_sample
            if memory.total > gpu.memory_bytes:  # the row says so
                assert (options.model, first) == ("prx-1.2b", 1)
            assert (first // parts).bit_count() == 1
            chosen = gpu_train._measure(case, options.batch, options.largest, [product])
            final = _training.make_config({**chosen, "folder": str(folder)}, workers, source)
            assert final.data.batch_size * parts * workers == final.data.global_batch_size
            assert _training.predicted(final, workers, gpu, options.model).total <= max(memory.total, gpu.memory_bytes)
        allocator = _training.environment(case).get("PYTORCH_CUDA_ALLOC_CONF")
        assert (allocator is None) == (case["without"] == "segments")


@cache
def vae_flops(side: int) -> float:
    """Count the full network's operations, on tensors without memory."""
    vae, text = REAL()

    def on_meta() -> Any:
        with torch.device("meta"):
            return vae()

    return VAE_FLOPS(gpu_encode.Networks(on_meta, text, torch.device("meta"), 0.0), side)


def encode(arguments: list[str], gpu: Gpu, _: Path, patch: pytest.MonkeyPatch) -> None:
    sides: list[int] = []

    def row(networks: gpu_encode.Networks, case: gpu_encode.Case, flops: float) -> list[str]:
        sides.append(case.side)
        assert flops > 0
        assert gpu_encode._share(networks, gpu.peak_flops / 2) == "50.0%"
        return ["", f"{case.batch}", "1.0", "", "", "", "-"]

    def encoder(*networks: Any, device: str | None = None, **how: Any) -> Callable[[Any], Any]:
        return (lambda _: None) if device == "cpu" else Encoder(*networks, device=device, **how)

    patch.setattr(torch.cuda, "set_device", lambda _: None)
    patch.setattr(gpu_encode, "_real", lambda: (lambda: None, lambda: None))
    with patch.context() as check:
        check.setattr(gpu_encode, "Encoder", encoder)
        check.setattr(torch.cuda, "Stream", reached)
        with pytest.raises(Reached) as error:
            gpu_encode.main(arguments)
        assert error.value.args == (torch.device("cuda", 0),)  # CUDA takes no device without its number
    patch.setattr(gpu_encode, "_check", lambda _: True)  # on the CPU, in full size
    patch.setattr(gpu_encode, "_vae_flops", lambda _, side: vae_flops(side))
    patch.setattr(gpu_encode, "_images_row", row)
    patch.setattr(gpu_encode, "_reference_row", lambda networks, *how: row(networks, gpu_encode.Case(*how[:2]), how[2]))
    patch.setattr(gpu_encode, "_captions", lambda _: None)
    patch.setattr(gpu_encode, "_batch_differences", lambda _: None)
    for product in gpu.products:
        patch.setattr(torch.cuda, "get_device_name", lambda product=product: product)
        assert gpu_encode.main(arguments) == 0
    expected = {int(arguments[1])} if arguments[0] == "--sides" else set()
    assert set(sides) == expected


def check(arguments: list[str], _: Gpu, __: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("subprocess.Popen", reached)
    patch.setattr("sdp.train.assemble.make_reader", reached)
    if arguments[0] == "latents":
        patch.setattr(torch.cuda, "set_device", lambda _: None)
    with pytest.raises(Reached) as error:
        _gpu_checks.main(arguments)
    if arguments[0] == "checkpoint":
        (command,) = error.value.args
        settings = [word for word in command if "=" in word]
        assert config.load("train", None, settings).scaling.num_workers == 2


def test_a_driver_that_lists_no_processes_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed, reason in (([], False), (["GPU-1"], False), (["GPU-1", "GPU-1"], True)):
        job = MagicMock(returncode=0, **{"poll.side_effect": [None, 0]})
        job.__enter__.return_value = job
        monkeypatch.setattr("subprocess.Popen", lambda _, job=job: job)
        monkeypatch.setattr(_gpu_checks, "_nvidia_smi", lambda _, listed=listed: listed)
        monkeypatch.setattr("time.sleep", lambda _: None)
        options = Namespace(latents="latents", work="work")
        assert ("reason" in _gpu_checks.checkpoint(options)) is reason


def run_demo(arguments: list[str], _: Gpu, __: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(demo, "_SIGNALS", ())
    patch.setattr(demo, "run", reached)
    with pytest.raises(Reached) as error:
        demo.main(arguments)
    assert error.value.args == (gpu_first_hour.WORK, 400)


def compare(arguments: list[str], _: Gpu, folder: Path, __: pytest.MonkeyPatch) -> None:
    options = tables._arguments(arguments)
    for resolution in options.resolutions:
        for case in tables.cases_of(options.only, resolution, efa=options.efa).values():
            config.load("train", None, tables.settings_of(options, case, str(folder / "run")))


BEFORE_CUDA: dict[str, Callable[[list[str], Gpu, Path, pytest.MonkeyPatch], None]] = {
    "scripts.bench.gpu_train": train,
    "scripts.bench.gpu_encode": encode,
    "scripts.bench._gpu_checks": check,
    "scripts.bench.tables": compare,
    "scripts.demo": run_demo,
}


@pytest.mark.parametrize("row", gpu_first_hour.ROWS, ids=lambda row: row.name)
def test_a_row_reaches_its_first_cuda_call_on_every_gpu_of_the_catalogue(
    row: gpu_first_hour.Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *arguments = row.command.split()
    for gpu in GPUS.values():
        with monkeypatch.context() as patch:
            for name, value in {
                "is_available": lambda: True,
                "device_count": lambda: 2,
                "set_device": reached,
                "get_device_name": lambda gpu=gpu: gpu.products[0],
                "get_device_properties": lambda _, gpu=gpu: SimpleNamespace(total_memory=gpu.memory_bytes),
            }.items():
                patch.setattr(torch.cuda, name, value)
            BEFORE_CUDA[module](arguments, gpu, tmp_path, patch)
        if module == "scripts.bench.gpu_encode":
            assert f"{gpu.peak_flops / TERA:g} TFLOP/s dense bf16" in capsys.readouterr().out


@pytest.mark.parametrize("name", _training.MODELS)
def test_batches_of_noise_fit_the_network_that_a_row_trains(name: str) -> None:
    family, architecture = _training.published_model(name)
    with torch.device("meta"):
        denoiser = network_class(family.denoiser_class).from_config(dict(architecture))
    networks = SimpleNamespace(family=family, denoiser=denoiser)
    batch = next(_training._Noise({"resolution": 512, "batch": 2, "model": name}, networks, World()).batches())
    assert batch.latents.shape[2:] == (64, 64) if name != "klein-4b" else (32, 32)
    text = torch.empty(2, 77, 1024) if batch.text is None else batch.text
    latents, times = batch.latents.float().to("meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    assert family.predict(denoiser, latents, times, text.float().to("meta")).shape == batch.latents.shape
    assert _training.operations(name, 512) > _training.operations(name, 256) > 1e11


def test_steps_of_a_row_are_trained_on_its_noise(tmp_path: Path) -> None:
    words = ["--tiny", "--strategies", "ddp", "--compile", "off"]
    case = next(gpu_train.cases(gpu_train._arguments(words), 1)) | {"batch": 2, "folder": str(tmp_path)}
    trainer = _training.make_trainer(case, _training.make_model(tmp_path / "model", tiny=True), World(), [CrashAt(2)])
    with pytest.raises(Crash):
        trainer.train()


def test_one_gpu_updates_all_weights_where_the_prediction_shares_them_out() -> None:
    figures = {"row": "train-256", "gpu": "1 × NVIDIA A100-SXM4-80GB", "batch": 64, "per_s": 300.0, "workers": 1}
    step_s = 64 / gpu_first_hour.PREDICTED["sd2-256-fsdp"]["A100-80G"] + 31 / 32 * 865.9e6 * 40 / 2.039e12
    assert gpu_first_hour._limit(figures) == f"{64 / step_s:.1f}"
    assert gpu_first_hour._limit(figures | {"per_s": 200.0}) == f"{64 / step_s:.1f}, 1.9 times slower"


def test_no_row_begins_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, begun = [0.0], list[str]()

    def measure(row: gpu_first_hour.Row, _: object) -> None:
        begun.append(row.name)
        clock[0] += 500

    monkeypatch.setattr(gpu_first_hour.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_first_hour.Machine, "lacks", lambda *_: [])
    monkeypatch.setattr(gpu_first_hour, "_measure", measure)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_first_hour.main([]) == 0
    assert begun == [row.name for row in gpu_first_hour.ROWS[:8]]
    assert "train-256: can run, in at most 9 minutes" in capsys.readouterr().out
    left = gpu_first_hour.ROWS[8].name
    assert f"not run: the hour is over; gpu_first_hour.sh {left}" in (tmp_path / "gpu-results.md").read_text()
    assert gpu_first_hour.main([left]) == 0
    assert begun[8:] == [left]


def test_nccl_uses_the_gpu_of_a_worker_s_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def init_process_group(backend: str, **how: Any) -> None:
        made.append({**how, "backend": backend})
        raise Reached

    monkeypatch.setattr(gpu_train, "take_stdout", lambda: None)
    monkeypatch.setattr("torch.distributed.init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for available in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        with pytest.raises(Reached):
            gpu_train.worker({"rank": 3, "workers": 8, "folder": str(tmp_path)})
    assert [how["backend"] for how in made] == ["cpu:gloo,cuda:nccl", "gloo"]
    assert [how["device_id"] for how in made] == [torch.device("cuda", 3), None]


def test_a_figure_that_the_kernels_of_a_row_do_not_explain_is_marked() -> None:
    most = gpu_first_hour.PREDICTED["sd2-256-ddp"]["A100-80G"]
    figures = {"row": "train-ddp", "gpu": "8 × NVIDIA A100-SXM4-80GB"}
    assert gpu_first_hour._limit({**figures, "workers": 8, "per_s": most}) == f"{8 * most:,.1f}, 8.0 times slower"
    assert gpu_first_hour._limit({**figures, "per_s": most / 2}) == f"{most:,.1f}, 2.0 times slower"
    assert gpu_first_hour._limit({**figures, "per_s": most / 1.2}) == f"{most:,.1f}"
    assert gpu_first_hour._limit({**figures, "gpu": "1 × Radeon", "per_s": 1.0}) == "-"
    used = {row.kernels for row in gpu_first_hour.ROWS} - {""}
    assert used <= kernels.CASES.keys() & gpu_first_hour.PREDICTED.keys()
