"""All forms of micro-batches are compiled before the first step, which changes nothing else."""

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdp.families import prx
from sdp.process.job import run as process
from sdp.train import assemble
from sdp.train.callbacks import watchdog
from sdp.train.callbacks.validation import MeasureValidationLoss
from sdp.train.callbacks.watchdog import Watchdog
from sdp.train.strategies import compile_blocks
from sdp.train.trainer import Callback, StepReport, Trainer
from sdp.train.world import World
from tests import latents
from tests.latents import make_latents
from tests.process_kit import config_of, make_images
from tests.training import Watch, config, tiny_inputs, train, weights
from tests.workers import run_workers

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Compiler:
    """A compiler that leaves graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    use(made, monkeypatch)
    return made


def use(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the random numbers and the first block with this: torch takes a second to trace each."""
    monkeypatch.setattr(assemble, "compile_blocks", lambda blocks: compile_blocks(islice(blocks, 1), compiler))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model, latents of one shape and of nine, and PRX's token ids."""
    root = tiny_inputs(tmp_path_factory.mktemp("ahead"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latents, "bucket_of", lambda row: row % 9)
        make_latents(root / "nine", 90, vocabulary=50, buckets=True)
    make_images(root, 24, unit_rows=12)
    process(config_of(root / "images", root / "prx", "builtin:tiny-prx"))
    return root


class Count(Callback):
    """Keeps how many graphs there are before each form is compiled, and after each step."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler, self.compiling, self.steps = compiler, list[int](), list[int]()
        self.lines: list[str] = []

    def on_compile(self, trainer: Trainer, progress: str) -> None:  # noqa: ARG002
        self.compiling.append(self.compiler.graphs)
        self.lines.append(progress)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        self.steps.append(self.compiler.graphs)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "shapes": (9, {"source__uri": "nine/latents", "data__batch_size": 2, "data__global_batch_size": 6}),
    "captions": (4, {"source__uri": "prx", "model__source": "builtin:tiny-prx"}),
    "micro-batches": (1, {"data__batch_size": 3, "data__global_batch_size": 8}),
    "text": (1, {"model__train_text_encoder": True, "strategy__activation_checkpointing": True}),
}


MEASURED: dict[str, Any] = {"data__holdout": 0.25, "evaluate__every_steps": 2, "evaluate__rows": 11}


def settings(root: Path, folder: Path, more: dict[str, Any]) -> Any:
    uri = str(root / more.get("source__uri", "latents"))
    usual = {"model__source": str(root / "model"), "strategy__compile": True, "max_steps": 8, **more}
    return config(folder, **{**usual, "source__uri": uri})


def digest(trainer: Trainer, watch: Watch) -> str:
    parts = hashlib.sha256(repr([(report.loss, report.norm, report.samples) for report in watch.reports]).encode())
    for name, tensor in sorted(weights(trainer).items()):
        parts.update(name.encode() + tensor.numpy().tobytes())
    return parts.hexdigest()


def worker(world: World, root: Path, folder: Path, kind: str, compiles: bool) -> tuple[str, set[int]]:
    """Return the digest of a run, and after which numbers of graphs its steps were."""
    compiler, watch = Compiler(), Watch()
    count = Count(compiler)
    more = {"data__batch_size": 4, "data__global_batch_size": 16, "strategy__kind": kind, "strategy__compile": compiles}
    with pytest.MonkeyPatch.context() as patch:
        use(compiler, patch)
        patch.setattr(prx, "_STEP", 16)
        how = settings(root, folder, {**CASES["captions"][1], **MEASURED, **more})
        trainer = train(how, world, [watch, count, MeasureValidationLoss(how)])
    return digest(trainer, watch), set(count.steps)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_workers_compile_together(root: Path, tmp_path: Path, kind: str) -> None:
    """The first test, since torch cannot fork after a backward pass."""
    ahead, plain = (run_workers(2, worker, root, tmp_path / str(on), kind, on) for on in (True, False))
    assert [result for result, _ in ahead] == [result for result, _ in plain]
    assert all(len(steps) == 1 for _, steps in ahead)


@pytest.mark.parametrize("case", CASES)
def test_no_graph_is_compiled_at_a_step_and_training_is_as_without(
    case: str, root: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms, more = CASES[case]
    monkeypatch.setattr(prx, "_STEP", 8)
    count, watch = Count(compiler), Watch()
    ahead = digest(train(settings(root, tmp_path / "ahead", more), callbacks=[count, watch]), watch)
    assert count.lines == [f"compiling for batches of shape {n} of {forms}" for n in range(1, forms + 1)]
    assert count.compiling[0] == 0
    assert sorted({*count.compiling, count.steps[0]}) == [*count.compiling, count.steps[0]]
    assert set(count.steps) == {compiler.graphs}
    watch, more = Watch(), {**more, "strategy__compile": False}
    assert digest(train(settings(root, tmp_path / "plain", more), callbacks=[watch]), watch) == ahead


def test_what_measures_the_validation_loss_is_compiled_ahead_as_well(
    root: Path, tmp_path: Path, compiler: Compiler
) -> None:
    how = settings(root, tmp_path, MEASURED)
    count, validation = Count(compiler), MeasureValidationLoss(how)
    train(how, callbacks=[count, validation])
    assert set(count.steps) == {compiler.graphs}
    assert compiler.graphs > 2


def test_random_numbers_of_torch_and_the_trainers_state_stay(
    root: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, draws = Trainer._compile, list[torch.Tensor]()

    def checked(trainer: Trainer) -> None:
        trainer.networks.denoiser.register_forward_pre_hook(lambda *_: draws.append(torch.rand(1)))
        before = torch.get_rng_state(), weights(trainer), repr(trainer.state)
        compiled(trainer)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert all(
            torch.equal(one, other) for one, other in zip(weights(trainer).values(), before[1].values(), strict=True)
        )
        assert repr(trainer.state) == before[2]
        assert not trainer.optimizer.gradients()
        assert not trainer.stopwatch.lap()

    monkeypatch.setattr(Trainer, "_compile", checked)
    train(settings(root, tmp_path, {"max_steps": 1}))
    assert compiler.graphs


def test_a_slow_compiler_of_nine_shapes_is_no_hang(
    root: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left = 0.0, []
    dog = Watchdog(600.0)

    class Slow(Compiler):
        """Takes 500 seconds for each graph."""

        def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            nonlocal now
            now += 500.0
            left.append(dog._left())
            return super().__call__(graph, inputs)

    use(Slow(), monkeypatch)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(dog, "_watch", lambda *_: None)
    train(settings(root, tmp_path, CASES["shapes"][1]), callbacks=[dog])
    assert len(left) > 9
    assert set(left) == {100.0}
    assert dog._left() == 600.0
    del compiler
