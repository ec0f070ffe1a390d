"""Helpers for tests of the process stage: images, datasets of them, and a model of random weights."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image as Pillow

from sdp.config import load
from sdp.config.process import ProcessConfig
from sdp.datasets.manifest import Dataset, finish
from sdp.datasets.outcomes import FAILED, WRITTEN, Outcome, account_table
from sdp.datasets.output import Head, open_output
from sdp.datasets.parts import Layout, write_part
from sdp.datasets.source import freeze_source
from sdp.storage import list_source, open_storage


def picture(row: int, height: int = 80, width: int = 96) -> bytes:
    """Return a JPEG that differs for each row: a colour, a gradient and a little noise."""
    draw = np.random.default_rng(row)
    base = draw.integers(40, 216, 3) + np.linspace(-30, 30, width)[None, :, None] + np.zeros((height, width, 3))
    pixels = np.clip(base + draw.normal(0, 3, base.shape), 0, 255).astype(np.uint8)
    sink = io.BytesIO()
    Pillow.fromarray(pixels).save(sink, "JPEG", quality=92)
    return sink.getvalue()


def images_table(rows: Sequence[int], image: Callable[[int], bytes] = picture) -> pa.Table:
    return pa.table(
        {
            "row": pa.array(list(rows), pa.int64()),
            "key": [f"k{row}" for row in rows],
            "caption": [f"picture number {row}" for row in rows],
            "image": pa.array([image(row) for row in rows], pa.binary()),
        }
    )


def write_plain(folder: Path, rows: int, *, files: int = 2, group: int = 16) -> None:
    """Write a plain Parquet source."""
    folder.mkdir(parents=True, exist_ok=True)
    table = images_table(range(rows)).drop_columns(["row", "key"])
    step = -(-rows // files)
    for number in range(files):
        part = table.slice(number * step, step)
        pq.write_table(part, folder / f"p{number:02d}.parquet", row_group_size=group)


def every_tenth(row: int) -> bool:
    return row % 10 == 7


def make_images(
    root: Path,
    rows: int = 100,
    unit_rows: int = 20,
    fails: Callable[[int], bool] = every_tenth,
    image: Callable[[int], bytes] = picture,
    group_rows: int = 8,
) -> Dataset:
    """An images dataset over a source of so many rows; called again with more rows it grows."""
    source = root / "metadata"
    source.mkdir(parents=True, exist_ok=True)
    have = sum(pq.read_metadata(file).num_rows for file in source.iterdir())
    if rows > have:
        table = pa.table({"url": [f"http://host/{n}" for n in range(have, rows)], "caption": ["c"] * (rows - have)})
        pq.write_table(table, source / f"{have:06d}.parquet")
    storage = open_storage(str(root / "images"))
    output = open_output(storage, Head("images", unit_rows, False, {}))
    output = freeze_source(output, list_source(str(source)), ["url", "caption"])
    for work in output.pending():
        addresses = range(work.unit.start, work.unit.stop)
        outcomes = [Outcome(r, FAILED, "http_status", "404") if fails(r) else Outcome(r, WRITTEN) for r in addresses]
        rows_table = images_table([r for r in addresses if not fails(r)], image)
        write_part(
            storage, "images", work, rows_table, account_table(outcomes), layout=Layout(row_group_rows=group_rows)
        )
    return finish(output, input={"uri": str(source)})


def config_of(source: object, output: object, model: object, *settings: str) -> ProcessConfig:
    arguments = [f"source.uri={source}", f"output.uri={output}", f"model.source={model}"]
    usual = ["resolutions=[64]", "encode.dtype=fp32", "encode.batch_size=8"]
    return load("process", None, [*arguments, *usual, *settings])


def write_tokenizer(folder: Path) -> None:
    """CLIP's tokenizer with an alphabet for a vocabulary; pads with 0 as Stable Diffusion 2's does."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {"!": 0}
    for token in [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]:
        vocabulary.setdefault(token, len(vocabulary))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": "!"}
    marks = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **marks}))


def make_vae(seed: int = 0) -> Any:
    """A VAE of Stable Diffusion's shape, narrow and with random weights; its deviations are far from 0."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=0.18215,
    ).eval()


def make_text_encoder(vocabulary: int = 1000) -> Any:
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=vocabulary, max_position_embeddings=77, **shape)).eval()


def write_model(folder: Path, seed: int = 0) -> Path:
    """A model folder with what the process stage needs."""
    write_tokenizer(folder / "tokenizer")
    make_vae(seed).save_pretrained(folder / "vae")
    make_text_encoder().save_pretrained(folder / "text_encoder")
    return folder


def trouble(room: int, faults: str) -> None:
    """Give a worker process, as it starts, an encoder of little memory that turns white pictures into NaN.

    For each of the files `start` and `device` in `faults` it takes one away and fails, as it starts or at work: with
    errors that are not sdp's own.
    """
    import torch

    from sdp.encode import work

    load_encoder = work.EncodeSpec.load_encoder

    def fail(when: str, error: Exception) -> None:
        try:
            (Path(faults) / when).unlink()
        except FileNotFoundError:
            return
        raise error

    class Troubled(torch.nn.Module):
        def __init__(self, inside: Any) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            fail("device", RuntimeError("CUDA error: an illegal memory access was encountered"))
            if len(pixels) > room:
                raise torch.OutOfMemoryError(f"no room for {len(pixels)}")
            moments: torch.Tensor = self.inside(pixels)
            moments[pixels.amin((1, 2, 3)) > 0.99] = float("nan")
            return moments

    def troubled(self: Any, device: str | None = None) -> Any:
        fail("start", torch.OutOfMemoryError("CUDA out of memory"))
        encoder = load_encoder(self, device)
        encoder._moments = Troubled(encoder._moments)
        return encoder

    work.EncodeSpec.load_encoder = troubled  # type: ignore[method-assign]


DEADLY = b"<kill the decoder>"
"""Behind a JPEG's end: a worker that obeys dies of it."""


def follow_instructions(traces: str) -> None:
    """Make a worker process, as it starts, follow a test's instructions.

    It is killed by an image that ends in DEADLY. An encoder leaves a note named PID-TIME in `traces` when it is ready
    and for each chunk, and encodes nothing until as many encoders as the file `wanted` there says are ready.
    """
    import os
    import signal
    import time

    from sdp.encode import transform, work

    spec = work.EncodeSpec
    read_header, load_encoder, encode = transform.read_header, spec.load_encoder, spec.work
    folder = Path(traces)

    def deadly(data: Any, *rest: Any) -> Any:
        if bytes(data[-len(DEADLY) :]) == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return read_header(data, *rest)

    def ready(self: Any, device: str | None = None) -> Any:
        encoder = load_encoder(self, device)
        (folder / f"ready-{os.getpid()}").touch()
        return encoder

    def noted(self: Any, encoder: Any, chunk: Any) -> Any:
        wanted, until = int((folder / "wanted").read_text()), time.monotonic() + 100
        while len(list(folder.glob("ready-*"))) < wanted and time.monotonic() < until:
            time.sleep(0.05)
        (folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        time.sleep(0.1)
        return encode(self, encoder, chunk)

    transform.read_header = deadly
    spec.load_encoder, spec.work = ready, noted  # type: ignore[method-assign]
