"""Which GPU a process takes, and that each of its threads works on that one, over a double of CUDA that checks them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from sdp.datasets.ledger import Ledger
from sdp.device import choose_device, configure_torch, enter, share_cores
from sdp.encode.encoder import Encoder
from sdp.encode.recipe import TEXT, EncoderSettings
from sdp.errors import UserError
from sdp.hardware import usable_cores
from sdp.model import sharded
from sdp.model.checkpoints import TrainState
from sdp.storage import open_storage
from sdp.train.checkpoint import CheckpointManager
from sdp.train.data.reader import prefetched
from sdp.train.run_folder import RunFolder
from sdp.train.stopwatch import Stopwatch
from sdp.train.world import World
from tests.cuda_double import Gpus, two_gpus
from tests.process_kit import make_vae
from tests.unit.test_encode import chunk_of, encoder_of, latents

SECOND = torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    make_vae()  # what this imports looks for GPUs, too, and must not see these
    with two_gpus(monkeypatch) as both:
        yield both


# --- threads ---------------------------------------------------------------------------------------------------------


def test_an_encoder_works_on_its_gpu_whatever_thread_calls_it(gpus: Gpus) -> None:
    enter(SECOND)
    settings = EncoderSettings(batch_sizes={16: 2, 32: 2, 64: 2, TEXT: 2})
    encoder, chunk = Encoder(make_vae(), settings, device="cuda:1"), chunk_of(list(range(5)))
    with ThreadPoolExecutor(1) as pool:  # a new thread, like those that Ray starts
        encoded = pool.submit(encoder, chunk).result(timeout=60)
    assert np.array_equal(latents(encoded), latents(encoder_of(batch=2)(chunk)))
    assert gpus.contexts == {1}


def test_page_locked_batches_are_made_on_the_gpu_that_they_are_for(gpus: Gpus) -> None:
    def batches() -> Iterator[torch.Tensor]:
        for _ in range(3):
            yield torch.empty(4, pin_memory=True)

    assert len(list(prefetched(batches(), 1, SECOND))) == 3
    assert gpus.contexts == {1}


def test_checkpoints_of_the_second_gpu_make_no_context_on_the_first_and_use_one_stream(
    gpus: Gpus, tmp_path: Path
) -> None:
    enter(SECOND)
    complete = {f"w{n}": torch.randn(6, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)}
    run = RunFolder(open_storage(str(tmp_path)))
    checkpointer = CheckpointManager(run, World(device=SECOND), {})
    for step in (1, 2):
        tensors = {name: (tensor * step).to(SECOND) for name, tensor in complete.items()}
        saving = checkpointer.stage(tensors, TrainState(step=step), Ledger())
        saving.written.result(timeout=60)
        checkpointer.commit(saving)
        stored = sharded.read_tensors(run.checkpoint(step), complete)
        for name, tensor in complete.items():
            assert torch.equal(stored[name], tensor * step)
    checkpointer.close()
    assert gpus.contexts == {1}
    assert len(gpus.streams) == 1


def test_a_checkpoint_is_loaded_by_threads_of_the_gpu_that_it_goes_to(gpus: Gpus, tmp_path: Path) -> None:
    enter(SECOND)
    folder = open_storage(str(tmp_path))
    staged = sharded.stage(folder, {"w": torch.arange(6.0)}, alone=True)
    staged.copy()
    staged.write()
    target = torch.zeros(6).to(SECOND)
    sharded.load(folder, {"w": target})
    assert target.as_subclass(torch.Tensor).tolist() == list(range(6))
    assert gpus.contexts == {1}


def test_the_stopwatch_times_the_stream_of_its_own_gpu(gpus: Gpus) -> None:
    enter(SECOND)
    watch = Stopwatch(SECOND)
    enter(torch.device("cuda", 0))
    with watch.measure("forward"):
        pass
    ((_, began, ended),) = watch._events
    assert began.stream is ended.stream is gpus.current_stream(SECOND)  # type: ignore[attr-defined]


# --- choosing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13\nGCC version: 9\n")
    return file


def test_a_granted_gpu_that_torch_cannot_use_is_refused_with_both_versions(driver: Path) -> None:
    with pytest.raises(UserError) as refused:
        choose_device(environ={"CUDA_VISIBLE_DEVICES": "3"}, driver=driver)
    message = str(refused.value)
    assert message.startswith("GPU 3: granted to this process, but torch cannot use it")
    assert "470.57.02" in message
    assert torch.__version__ in message
    needed = 525 if str(torch.version.cuda).startswith("12.") else 580  # by NVIDIA's table
    assert f"CUDA {torch.version.cuda}, which needs driver {needed} or later" in message
    assert "\n" not in message


@pytest.mark.parametrize("granted", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}])
def test_a_process_without_a_granted_gpu_takes_the_cpu_of_a_gpu_machine(granted: dict[str, str], driver: Path) -> None:
    assert choose_device(environ=granted, driver=driver) == torch.device("cpu")


def test_a_machine_without_a_driver_may_claim_gpus_and_takes_the_cpu(tmp_path: Path) -> None:
    assert choose_device(environ={"CUDA_VISIBLE_DEVICES": "0"}, driver=tmp_path / "none") == torch.device("cpu")


def test_each_local_rank_takes_its_own_gpu(gpus: Gpus) -> None:
    assert [choose_device(rank) for rank in range(3)] == [torch.device("cuda", n) for n in (0, 1, 0)]
    assert gpus.contexts == {0, 1}


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), (None, 8)],
)
def test_a_process_may_use_the_cores_of_its_affinity_and_of_its_containers_quota(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(tmp_path) == cores


LARGE, SMALL = (torch.nn.Linear(side, side, device="meta") for side in (4000, 40))
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "network", "processes", "environ", "threads"),
    [
        (CPU, LARGE, 1, {}, [6]),
        (CPU, LARGE, 4, {}, [1]),
        (CPU, LARGE, 9, {}, [1]),
        (CPU, SMALL, 1, {}, [1]),
        (CPU, LARGE, 1, {"OMP_NUM_THREADS": "2"}, []),
        (SECOND, LARGE, 1, {}, []),
    ],
)
def test_a_large_network_on_cpus_gets_its_processs_share_of_the_cores(
    device: torch.device,
    network: torch.nn.Module,
    processes: int,
    environ: dict[str, str],
    threads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("sdp.device.usable_cores", lambda: 6)
    share_cores(device, network, processes, environ=environ)
    assert chosen == threads


def test_an_encoder_in_a_trainers_process_does_not_end_the_search_for_convolutions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", False)
    monkeypatch.setattr(cudnn, "benchmark_limit", 10)
    configure_torch()
    assert (cudnn.benchmark, cudnn.benchmark_limit) == (False, 10)
    configure_torch(fixed_shapes=True)
    configure_torch()
    assert (cudnn.benchmark, cudnn.benchmark_limit) == (True, 0), "0 is all algorithms"
    assert torch.get_float32_matmul_precision() == "high"
