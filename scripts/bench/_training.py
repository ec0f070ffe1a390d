"""The trainer of `sdp train` with the full U-Net and random weights, for the benchmarks."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock


def make_model(folder: Path, *, tiny: bool) -> Any:
    """Return a model without weights: a folder with the architectures and the noise schedule."""
    from scripts.published import SCHEDULER
    from sdp.model.family import SD2
    from sdp.model.sources import LocalModel, parse, resolve

    if tiny:
        return resolve("builtin:tiny")
    for name, content in (("unet/config.json", SD2.unet), ("scheduler/scheduler_config.json", SCHEDULER)):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(json.dumps(dict(content)))
    return LocalModel(folder, "", parse(str(folder)))


def make_trainer(case: dict[str, Any], model: Any, world: Any, callbacks: Sequence[Any] = ()) -> Any:
    """Return the trainer for a case of a benchmark, over batches of noise."""
    import torch

    from sdp.config import parse
    from sdp.model import load
    from sdp.storage import open_storage
    from sdp.train.assemble import make_conditioning, make_networks, make_objective
    from sdp.train.checkpoint import Checkpointer
    from sdp.train.run_folder import RunFolder
    from sdp.train.trainer import Trainer

    torch.set_float32_matmul_precision("high")
    output = str(Path(case["folder"]) / "run")
    config = parse(
        "train",
        {
            "source": {"uri": "unused"},
            "output": {"uri": output},
            "model": {"source": str(model.source), "train_text_encoder": case.get("train_text_encoder", False)},
            "data": {"resolution": case["resolution"], "batch_size": case["batch"] // case.get("micro_batches", 1)},
            "objective": {"prediction": "epsilon"},
            "precision": "bf16",
            "max_steps": 10**9,
            "strategy": {
                "kind": case["kind"],
                "shard": case["shard"],
                "compile": case["compile"],
                "channels_last": case["channels_last"],
                "activation_checkpointing": case["activation_checkpointing"],
                "fp8": case["fp8"],
            },
        },
    )
    load_text_encoder = load.load_text_encoder if case["tiny"] else _text_encoder
    with mock.patch.object(load, "load_text_encoder", load_text_encoder):
        networks = make_networks(config, model, world)
    return Trainer(
        config=config,
        world=world,
        networks=networks,
        objective=make_objective(config, model, world),
        conditioning=make_conditioning(config, model, world) if case["tiny"] else _conditioning(config, world),
        reader=_Noise(case, world),
        checkpointer=Checkpointer(RunFolder(open_storage(output)), world, {}),
        callbacks=callbacks,
    )


def _text_encoder(*_: Any, device: Any, dtype: Any = None) -> Any:
    """Return Stable Diffusion 2's text encoder with random weights, frozen."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    from sdp.model.family import SD2

    with torch.device(device):
        return CLIPTextModel(CLIPTextConfig(**SD2.text_encoder)).to(dtype or torch.float32).eval().requires_grad_(False)


def _conditioning(config: Any, world: Any) -> Any:
    """Return the conditioning on captions of Stable Diffusion 2's tokens."""
    import torch

    from sdp.model.family import SD2
    from sdp.train.step import Conditioning

    if config.model.train_text_encoder:
        return Conditioning(torch.zeros(77, device=world.device, dtype=torch.int64), lambda ids: ids)
    encoder = _text_encoder(device=world.device, dtype=torch.bfloat16)
    empty = torch.zeros(77, SD2.text_encoder["hidden_size"], device=world.device, dtype=torch.bfloat16)
    return Conditioning(empty, lambda ids: encoder(input_ids=ids).last_hidden_state)


class _Noise:
    """A reader that repeats a few batches of noise from pinned memory."""

    rows = 10**12

    def __init__(self, case: dict[str, Any], world: Any) -> None:
        import torch

        from sdp.train.data.batch import Batch

        side, count = case["resolution"] // 8, case["batch"]
        pin = world.device.type == "cuda"
        generator = torch.Generator().manual_seed(world.rank)

        def pinned(tensor: Any) -> Any:
            return tensor.pin_memory() if pin else tensor

        self._batches = [
            Batch(
                torch.arange(count) + number * count,
                torch.ones(count),
                pinned(torch.randn(count, 4, side, side, generator=generator).half()),
                pinned(torch.randint(0, 500, (count, 77), generator=generator).to(torch.uint16)),
            )
            for number in range(4)
        ]

    def positions(self, _: Any) -> int:
        return self.rows

    def batches(self, *_: Any) -> Iterator[Any]:
        while True:
            yield from self._batches
