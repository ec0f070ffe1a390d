"""Helpers for tests of the families of flow matching: inputs, and what one step of training saw."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sdp.config import parse
from sdp.config.train import TrainConfig
from sdp.process.job import run as process
from sdp.train import step
from sdp.train.trainer import StepReport
from tests.process_kit import make_images
from tests.training import Watch, train


def make_inputs(root: Path, model: str, rows: int) -> Path:
    """Write images, and their latents of a model with token ids and with embeddings; return the folder."""
    make_images(root, rows, unit_rows=20)
    for text in ("token_ids", "text_embedding"):
        settings: dict[str, Any] = {
            "source": {"uri": str(root / "images")},
            "output": {"uri": str(root / text)},
            "model": {"source": model},
            "resolutions": [64],
            "encode": {"text": text, "latents": "moments", "dtype": "fp32"},
        }
        process(parse("process", settings))
    return root


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
