"""Images, transform, encoders and training on one node: `data.mode: collocated`."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from transformers import CLIPTokenizer

from sdp.config import TrainConfig
from sdp.datasets.ledger import Ledger
from sdp.errors import UserError
from sdp.imaging import centre_box, cut, decode
from sdp.model.latents import to_pixels
from sdp.model.sources import resolve
from sdp.storage import open_storage
from sdp.train.assemble import assemble, make_reader
from sdp.train.data.batch import PAD, Batch
from sdp.train.job import run
from sdp.train.run_folder import RunFolder
from sdp.train.world import World
from tests.process_kit import images_table, make_images, picture
from tests.training import Watch, config, train

ROWS = 72
BAD = 13


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, one of which cannot be decoded."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("collocated")
    make_images(root, 80, unit_rows=20, fails=lambda row: row % 10 == 0)
    broken = root / "images/parts/000000000.parquet"
    table = pq.read_table(broken)
    spoilt = [b"no picture" if row == BAD else picture(row) for row in table["row"].to_pylist()]
    metadata = pq.read_schema(broken).metadata
    changed = table.set_column(table.column_names.index("image"), "image", [spoilt]).replace_schema_metadata(metadata)
    pq.write_table(changed, broken, row_group_size=8)
    return root


def how(root: Path, run: str = "run", **changes: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "source__uri": str(root / "images"), "model__source": "builtin:tiny", "data__mode": "collocated",
        "data__readers": 2, "encode__dtype": "fp32", "encode__batch_size": 8,
    }  # fmt: skip
    return config(root, run, **{**usual, **changes})


def batches(root: Path, **changes: Any) -> list[Batch]:
    settings = how(root, **changes)
    reader, *_ = make_reader(settings, resolve("builtin:tiny"), World())
    return list(reader.batches(0, 0, 16))


def test_a_rows_moments_are_those_that_diffusers_computes_and_its_tokens_its_captions(root: Path) -> None:
    moments: dict[int, tuple[Tensor, Tensor]] = {}
    for batch in batches(root):
        assert batch.token_ids is not None
        moments |= dict(zip(batch.rows.tolist(), zip(batch.latents, batch.token_ids, strict=True), strict=True))
    moments.pop(PAD, None)
    assert sorted(moments) == [row for row in range(80) if row % 10]
    model = resolve("builtin:tiny")
    kind: Any = AutoencoderKL
    vae = kind.from_pretrained(model.path / "vae").eval()
    tokenizer = CLIPTokenizer.from_pretrained(model.path / "tokenizer")
    table = images_table(range(80))
    for row in (1, 14, 57, 79):
        image = decode(picture(row), min_side=64, max_pixels=10**8)
        pixels = to_pixels(torch.from_numpy(cut(image, centre_box(96, 80, 1.0), 64, 64))[None])
        with torch.no_grad():
            posterior = vae.encode(pixels).latent_dist
        scale = vae.config.scaling_factor
        expected = torch.cat([posterior.mean * scale, posterior.logvar + 2 * np.log(scale)], dim=1)[0]
        assert torch.allclose(moments[row][0].float(), expected, atol=5e-3), row
        ids = tokenizer(table["caption"][row].as_py(), padding="max_length", max_length=77, truncation=True).input_ids
        assert moments[row][1].tolist() == ids


def test_a_training_run_takes_each_good_row_once_and_keeps_why_the_bad_one_was_left_out(root: Path) -> None:
    watch = Watch()
    trainer = train(how(root, max_steps=None, max_epochs=1), callbacks=[watch])
    good = [row for row in range(80) if row % 10 and row != BAD]
    folder = RunFolder(open_storage(str(root / "run")))
    ledger = Ledger.from_bytes((root / f"run/checkpoints/step-{trainer.state.step:09d}/ledger.roaring").read_bytes())
    assert list(ledger.rows(0)) == good
    assert trainer.state.samples == len(good)
    assert folder.bad_rows() == {BAD: "not_an_image"}
    assert all(np.isfinite(watch.losses))


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(root: Path) -> None:
    whole, first, second = Watch(), Watch(), Watch()
    train(how(root, "whole", max_steps=12), callbacks=[whole])
    train(how(root, "parts", max_steps=5), callbacks=[first])
    train(how(root, "parts", max_steps=12), callbacks=[second])
    assert first.losses + second.losses == whole.losses


def test_embeddings_by_the_encoder_train_as_tokens_do(root: Path) -> None:
    tokens, embedded = Watch(), Watch()
    train(how(root, "tokens", max_steps=2), callbacks=[tokens])
    train(how(root, "embedded", max_steps=2, encode__text="text_embedding"), callbacks=[embedded])
    assert embedded.losses == pytest.approx(tokens.losses, abs=1e-3)


def test_the_job_trains_collocated_without_ray(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.cluster.connect", lambda **_: pytest.fail("Ray was asked for"))
    done = run(how(root, "job", max_steps=2, scaling__in_driver=True))
    assert done.state.step == 2


def test_online_without_a_cluster_is_refused(root: Path) -> None:
    with pytest.raises(UserError, match=r"data\.mode: expected offline or collocated without Ray"):
        assemble(how(root, data__mode="online"), World())
