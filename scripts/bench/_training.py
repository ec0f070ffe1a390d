"""The trainer of `sdp train` with the full U-Net and random weights, for the benchmarks."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

MODELS = ("sd2", "prx-424m", "prx-1.2b", "klein-4b")
SWITCHES: dict[str, str] = {
    "search": "cuDNN's search for the fastest convolutions",
    "layout": "channels-last for all convolutions of compiled blocks, against Inductor's own choice",
    "fusion": "large kernels, against Inductor's own limits on their size",
    "draw": "random numbers in one compiled function",
    "segments": "expandable segments of the allocator",
}
"""Optimizations that a case can leave out, so that each is measured both ways."""


def environment(case: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a case's processes, as the chart sets it for trainers."""
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    if case.get("without") == "segments":
        del environ["PYTORCH_CUDA_ALLOC_CONF"]
    return environ


def make_model(folder: Path, *, tiny: bool, name: str = "sd2") -> Any:
    """Return a model without weights: a folder with the architectures and the noise schedule."""
    from scripts.published import SCHEDULER
    from sdp.model.sources import LocalModel, parse, resolve

    if tiny:
        return resolve("builtin:tiny")
    family, own = published_model(name)
    files: dict[str, Any] = {
        "model_index.json": {"_class_name": family.pipeline},
        f"{family.denoiser}/config.json": own,
        "scheduler/scheduler_config.json": SCHEDULER,
    }
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(json.dumps(dict(content)))
    return LocalModel(folder, "", parse(str(folder)))


def make_config(case: dict[str, Any], workers: int, source: str = "builtin:tiny") -> Any:
    """Return the configuration of `sdp train` for a case of a benchmark."""
    from sdp.config import parse

    return parse(
        "train",
        {
            "source": {"uri": str(Path(case["folder"]) / "unused")},
            "output": {"uri": str(Path(case["folder"]) / "run")},
            "model": {
                "source": source,
                "train_text_encoder": case.get("train_text_encoder", False),
                "denoiser": "pretrained" if case.get("lora") else "new",
            },
            "lora": {"rank": case.get("lora")},
            "data": {
                "resolution": case["resolution"],
                "batch_size": case["batch"] // case.get("micro_batches", 1),
                "global_batch_size": case["batch"] * workers,
            },
            "objective": {"prediction": "flow" if case.get("model", "sd2") != "sd2" else "epsilon"},
            "precision": "bf16",
            "max_steps": 10**9,
            "strategy": {
                "kind": case["kind"],
                "shard": case["shard"],
                "compile": case["compile"],
                "activation_checkpointing": case["activation_checkpointing"],
            },
        },
    )


def predicted(config: Any, workers: int, gpu: Any, model: str = "sd2") -> Any:
    """Return the memory that `sdp plan` expects, with the text encoder beside the U-Net; others have embeddings."""
    from sdp.plan.memory import estimate

    return estimate(config, gpu, workers, embedded=model != "sd2", family=known_model(model))


def operations(model: str, resolution: int) -> float:
    """Return the operations of a step for one sample."""
    from sdp.families import flops

    family, architecture = published_model(model)
    return flops(family, architecture, side_of(architecture, resolution))


def known_model(model: str) -> Any:
    """Return what is known of the size of one of MODELS."""
    family, architecture = published_model(model)
    return next(each for each in family.known if each.has_size_of(architecture))


def published_model(model: str) -> tuple[Any, Any]:
    """Return the family and the denoiser's configuration of one of MODELS."""
    from scripts.published import TRANSFORMERS
    from sdp.families import every
    from sdp.families.sd import SD, SD2

    own = TRANSFORMERS.get(model)
    if own is None:
        return SD, SD2.unet
    return next(each for each in every() if each.denoiser_class == own["_class_name"]), own


def side_of(architecture: Any, resolution: int) -> int:
    """Return the side of latents; those of FLUX.2 are squares of its VAE's output."""
    return resolution // (16 if architecture["in_channels"] > 32 else 8)


def make_trainer(case: dict[str, Any], model: Any, world: Any, callbacks: Sequence[Any] = ()) -> Any:
    """Return the trainer for a case of a benchmark, over batches of noise."""
    import torch

    from sdp.device import configure_torch
    from sdp.model import load
    from sdp.storage import open_storage
    from sdp.train import assemble, strategies
    from sdp.train.assemble import make_conditioning, make_networks, make_objective
    from sdp.train.checkpoint import CheckpointManager
    from sdp.train.run_folder import RunFolder
    from sdp.train.step import draw
    from sdp.train.stopwatch import Stopwatch
    from sdp.train.trainer import Trainer

    configure_torch(fixed_shapes=case.get("without") != "search")
    config = make_config(case, world.size, str(model.source))
    load_text_encoder = load.load_text_encoder if case["tiny"] else _text_encoder
    load_networks = assemble.load_networks

    def new_networks(*arguments: Any, **options: Any) -> Any:  # LoRA needs weights, and these are random
        return load_networks(*arguments, **{**options, "pretrained": False})

    with (
        mock.patch.object(load, "load_text_encoder", load_text_encoder),
        mock.patch.object(assemble, "load_networks", new_networks),
        mock.patch.dict(strategies.LARGER_KERNELS, clear=case.get("without") == "fusion"),
    ):
        networks = make_networks(config, model, world)
    if case.get("without") == "layout":
        torch._inductor.config.force_layout_optimization = False
    objective = make_objective(config, model, world)
    if case.get("without") == "draw":
        objective = replace(objective, draw=draw)
    return Trainer(
        config=config,
        world=world,
        networks=networks,
        objective=objective,
        conditioning=make_conditioning(config, model, world)
        if case["tiny"]
        else _conditioning(config, networks, world),
        reader=_Noise(case, networks, world),
        checkpointer=CheckpointManager(RunFolder(open_storage(config.output.uri)), world, {}),
        stopwatch=Stopwatch(world.device),
        callbacks=callbacks,
    )


def _text_encoder(*_: Any, device: Any, dtype: Any = None) -> Any:
    """Return Stable Diffusion 2's text encoder with random weights, frozen."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    from sdp.families.sd import SD2

    with torch.device(device):
        return CLIPTextModel(CLIPTextConfig(**SD2.text_encoder)).to(dtype or torch.float32).eval().requires_grad_(False)


def _conditioning(config: Any, networks: Any, world: Any) -> Any:
    """Return the conditioning on captions of Stable Diffusion 2's tokens, or on embeddings."""
    import torch

    from sdp.families.sd import SD2
    from sdp.train.step import Conditioning

    if config.objective.prediction == "flow":
        *_, text = networks.family.flops_inputs(networks.denoiser, 8)
        empty = torch.zeros(1024, text.shape[2], device=world.device, dtype=torch.bfloat16)  # cut to a batch's text
        return Conditioning(empty, lambda ids: ids)
    if config.model.train_text_encoder:
        return Conditioning(torch.zeros(77, device=world.device, dtype=torch.int64), lambda ids: ids)
    encoder = _text_encoder(device=world.device, dtype=torch.bfloat16)
    empty = torch.zeros(77, SD2.text_encoder["hidden_size"], device=world.device, dtype=torch.bfloat16)
    return Conditioning(empty, lambda ids: encoder(input_ids=ids).last_hidden_state)


class _Noise:
    """A reader that repeats a few batches of noise from pinned memory."""

    plan = SimpleNamespace(rows=10**12, positions=lambda _: 10**12)

    def __init__(self, case: dict[str, Any], networks: Any, world: Any) -> None:
        import torch

        from sdp.train.data.batch import Batch

        example, _, states = networks.family.flops_inputs(networks.denoiser, 8)
        channels, size = example.shape[1], case["batch"]
        side = side_of(networks.denoiser.config, case["resolution"])
        pin = world.device.type == "cuda"
        generator = torch.Generator().manual_seed(world.rank)

        def pinned(tensor: Any) -> Any:
            return tensor.pin_memory() if pin else tensor

        if case.get("model", "sd2") == "sd2":
            ids = torch.randint(0, 500, (size, 77), generator=generator).to(torch.uint16)
            text = {"token_ids": pinned(ids)}
        else:
            tokens = case.get("tokens") or states.shape[1]
            text = {"text": pinned(torch.ones(size, tokens, states.shape[2], dtype=torch.float16))}
        self._batches = [
            Batch(
                torch.arange(size) + number * size,
                torch.ones(size),
                pinned(torch.randn(size, channels, side, side, generator=generator).half()),
                **text,
            )
            for number in range(4)
        ]

    forms = (None,)

    def blank(self, *_: Any) -> Any:
        """Return a batch to compile on."""
        return self._batches[0]

    def batches(self, _: int = 0, position: int = 0, size: int = 1, *_more: Any) -> Iterator[Any]:
        """Yield the batches from a position on, so that a resumed run repeats those of the first."""
        for number in count(position // size):
            yield self._batches[number % len(self._batches)]
