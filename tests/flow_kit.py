"""Helpers for tests of the families of flow matching: inputs, and what one step of training saw."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from sdp.config import parse
from sdp.config.generate import GenerateConfig
from sdp.config.train import TrainConfig
from sdp.dreambooth.job import run as dreambooth
from sdp.generate.painter import load_painter
from sdp.generate.source import choose
from sdp.model.sources import resolve
from sdp.process.job import run as process
from sdp.train import step
from sdp.train.trainer import StepReport
from tests.kit import not_none
from tests.process_kit import config_of, make_images, picture
from tests.training import Watch, train


def make_inputs(root: Path, model: str, rows: int) -> Path:
    """Write images, and their latents of a model with token ids and with embeddings; return the folder."""
    make_images(root, rows, unit_rows=20)
    for text in ("token_ids", "text_embedding"):
        process(config_of(root / "images", root / text, model, f"encode.text={text}", "encode.latents=moments"))
    return root


MODES: dict[str, dict[str, Any]] = {
    "ids": {"source__uri": "token_ids"},
    "embeddings": {"source__uri": "text_embedding"},
    "collocated": {
        "source__uri": "images", "data__mode": "collocated", "data__readers": 1, "encode__dtype": "fp32",
    },
    "text": {"source__uri": "token_ids", "model__train_text_encoder": True},
    "checkpointed": {"source__uri": "token_ids", "strategy__activation_checkpointing": True},
}  # fmt: skip
"""Ways to train on what make_inputs writes."""


def mode(root: Path, name: str) -> dict[str, Any]:
    """Return the settings of a way to train on the inputs in a folder."""
    return {**MODES[name], "source__uri": str(root / MODES[name]["source__uri"])}


def altered(folder: Path, model: str, file: str, **changes: Any) -> Path:
    """Copy a model into a folder with changes to one of its JSON files; return the copy."""
    copy = Path(shutil.copytree(resolve(model).path, folder / "model"))
    (copy / file).write_text(json.dumps({**json.loads((copy / file).read_text()), **changes}))
    return copy


def teach(folder: Path, model: str) -> None:
    """Run `sdp dreambooth` with a LoRA on two pictures in a folder."""
    (folder / "subject").mkdir()
    for number in range(2):
        (folder / f"subject/{number}.jpg").write_bytes(picture(number))
    how: dict[str, Any] = {
        "source": {"uri": str(folder / "subject"), "caption": "a thing"}, "output": {"uri": str(folder / "out")},
        "model": {"source": model}, "lora": {"rank": 2}, "resolution": 64, "max_steps": 2, "batch_size": 2,
        "precision": "fp32", "scaling": {"accelerator": "cpu"},
    }  # fmt: skip
    dreambooth(parse("dreambooth", how))


def painted(how: GenerateConfig, prompts: Sequence[str], seeds: Sequence[int]) -> list[Any]:
    """Return the pictures of a batch that sdp draws, as whole numbers."""
    return [not_none(picture).astype(int) for picture in load_painter(choose(how), how).paint(prompts, seeds)]


def table_of(folder: Path) -> Any:
    """Return the rows of a dataset's first part."""
    return pq.read_table(sorted(folder.rglob("parts/*.parquet"))[0])


def first_step(how: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[StepReport, Any, Any, Any]:
    """Train a step; return its report, and the batch, the random numbers and the text that it computed with."""
    seen: list[Any] = []
    own = step.losses_at

    def spy(networks: Any, objective: Any, batch: Any, draws: Any, text: Any) -> Any:
        seen.extend((batch, draws, text))
        return own(networks, objective, batch, draws, text)

    monkeypatch.setattr(step, "losses_at", spy)
    watch = Watch()
    train(how, callbacks=[watch])
    (report,), (batch, draws, text) = watch.reports, seen
    return report, batch, draws, text


def noisy(batch: Any, draws: Any) -> tuple[Any, Any, Any]:
    """Return a step's noisy latents and their times, by the definition of a flow, and what is to be predicted."""
    mean, log_variance = batch.latents.float().chunk(2, dim=1)
    clean = mean + (log_variance / 2).exp() * draws.vae
    time = (draws.times / 2**24).view(-1, 1, 1, 1)
    return (1 - time) * clean + time * draws.noise, time.flatten(), draws.noise - clean


def check_step(report: StepReport, loss: Any, network: Any) -> None:
    """Check that a step had a loss, and the norm of its gradient in a network."""
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in network.parameters() if p.grad is not None]).norm()
    assert (report.loss, report.norm) == pytest.approx((loss.item(), norm.item()), rel=1e-4)
