"""Assembles a worker's trainer from the configuration: models, data and strategy."""

import io
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.config.train import TrainConfig
from sdp.device import DTYPES, configure_torch, enter, out_of_memory, share_cores
from sdp.encode.table import EMPTY_TEXT
from sdp.errors import OutOfMemory, UserError, one_line
from sdp.families import ALL_TOKENS, TextSpace, patch_of
from sdp.families.classes import import_compiler
from sdp.families.tokenizer import load_tokenizer, token_ids
from sdp.model import load
from sdp.model.checkpoints import find_checkpoint
from sdp.model.schedule import Flow, Process, from_alphas_cumprod
from sdp.model.sources import LocalModel, resolve
from sdp.model.trained import TrainedNetworks, load_networks, read_lora
from sdp.sources.joined import contents_of
from sdp.train.checkpoint import CheckpointManager
from sdp.train.data.columns import TEXT
from sdp.train.data.encoded import EncodedRows, Engine, Submit, online
from sdp.train.data.images import open_columns, open_images, slices_ahead
from sdp.train.data.latents import refuse_another_encoder
from sdp.train.data.mixture import MixturePlan
from sdp.train.data.order import Shuffle
from sdp.train.data.pinned import open_pinned
from sdp.train.data.reader import Reader
from sdp.train.data.sources import Sources, open_sources
from sdp.train.data.stored import StoredRows
from sdp.train.data.weights import row_weights
from sdp.train.run_folder import RunFolder
from sdp.train.step import Conditioning, Objective, draw
from sdp.train.stopwatch import Stopwatch
from sdp.train.strategies import compile_blocks
from sdp.train.trainer import Callback, StopRequest, Trainer
from sdp.train.world import World

_PIXELS = 256
"""The resolution that a flow's `objective.shift` is for: more pixels hide more noise, in proportion to their side."""

Empty = Callable[[], NDArray[np.float16]]
"""Returns the empty caption's embedding, of one row."""


def assemble(
    config: TrainConfig,
    world: World,
    *,
    submit: Submit | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopRequest | None = None,
    check: Callable[[], None] = lambda: None,
) -> Trainer:
    """Return the trainer of this worker.

    `submit`, for mode online, submits slices to encoders elsewhere; `check` raises if the run's lease is lost.
    """
    configure_torch(fixed_shapes=True)
    options = config.storage.options()
    model = resolve(config.model.source, storage=options)
    stopwatch = Stopwatch(world.device)
    reader, datasets, empty = make_reader(config, model, world, submit, stopwatch)
    plan = reader.plan
    metadata = {"model": {"source": str(model.source), "digest": model.digest}, **datasets, "epoch_rows": plan.rows}
    if plan.granule is not None:
        metadata["granule"] = plan.granule
    begin_from = config.model.start_from
    try:
        return Trainer(
            config=config,
            world=world,
            networks=make_networks(config, model, world),
            objective=make_objective(config, model, world),
            conditioning=make_conditioning(config, model, world, empty),
            reader=reader,
            checkpointer=CheckpointManager(
                RunFolder.of(config, check), world, config.model_dump(mode="json"), config.checkpoint, metadata
            ),
            stopwatch=stopwatch,
            begin_from=find_checkpoint(begin_from, options) if begin_from else None,
            callbacks=callbacks,
            stop=stop or StopRequest(),
        )
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemory(
            f"strategy.kind: {world.device} has no memory for the model and its optimizer ({one_line(error, 200)}); "
            "use a larger GPU (scaling.accelerator), or shard the model with fsdp over more workers"
        ) from error


def make_reader(
    config: TrainConfig, model: LocalModel, world: World, submit: Submit | None = None, watch: Stopwatch | None = None
) -> tuple[Reader, dict[str, Any], Empty | None]:
    """Return the reader for data.mode, the datasets' lineage for checkpoints, and the empty caption's embedding.

    The embedding is None unless captions reach the trainers as embeddings.
    """
    text = model.family.text(model.path, embedded=False)
    if config.data.mode == "offline":
        sources = open_sources(config)
        for source in sources.all:
            refuse_another_encoder(config, source.written, source.dataset, model)
        embedded = sources.all[0].dataset.text.name == TEXT
        empty_text = partial(_stored_empty, sources, model, world) if embedded else None
        return latents_reader(config, sources, world, text), sources.metadata, empty_text
    dataset = open_pinned(config, 0, config.source.uri, "images")
    collocated = config.data.mode == "collocated"
    columns = open_columns(config, dataset) if collocated else None
    if columns and columns.tables:  # a table may have been replaced since the job began
        RunFolder.of(config).refuse_another({"identity": {"source.tables": contents_of(columns.tables)}})
    images = open_images(config, dataset, model, columns)
    if collocated:
        from sdp.train.data.collocated import Collocated

        encoder = images.load(str(world.device))
        engine: Engine = Collocated(images, encoder, config.data.readers, watch or Stopwatch(world.device))
        empty: Empty | None = partial(images.spec.embed_empty, encoder) if config.text_encoded else None
    else:
        if submit is None:
            raise UserError("data.mode: expected offline or collocated without Ray, got 'online'; train on Ray")
        engine = online(submit, slices_ahead(config, images, world.size))
        empty = submit(None) if config.text_encoded else None
    rows = EncodedRows(images, engine, partial(row_weights, images.storage, config.data.holdout, config.limit))
    ahead = 0 if collocated else 4  # or a thread would encode while a step computes
    plan = MixturePlan((images.row_groups,), config.seed, Shuffle())
    return Reader(plan, rows, world.rank, world.size, ahead, world.device, text), {"dataset": dataset.lineage}, empty


def latents_reader(config: TrainConfig, sources: Sources, world: World, text: TextSpace = ALL_TOKENS) -> Reader:
    """Return the reader of this worker's share of the latents."""
    rows = StoredRows(sources.datasets, config.data.readers, mixed=len(sources.all) > 1)
    return Reader(sources.plan(config), rows, world.rank, world.size, device=world.device, space=text)


def make_networks(config: TrainConfig, model: LocalModel, world: World) -> TrainedNetworks:
    """Return the networks to train, on this worker's device, ready to be wrapped; the same on all workers.

    What is trained is in fp32. Beside a LoRA the denoiser's matrices are in the dtype to which each step rounds them.
    """
    if config.strategy.compile:
        import_compiler()
    torch.manual_seed(config.seed)
    make = partial(
        load_networks,
        model.path,
        text_encoder=config.model.train_text_encoder,
        pretrained=config.model.denoiser == "pretrained",
        device=world.device,
        empty=not world.is_main,  # or each worker of a node would first have a U-Net in host memory
        matrices=DTYPES[config.precision] if config.lora.rank is not None else None,
    )
    networks = world.together(make)
    share_cores(world.device, networks, world.size)
    denoiser = networks.denoiser
    for weights in denoiser.parameters():
        world.copy_main(weights.data)
    if config.lora.rank is not None:
        torch.manual_seed(config.seed)  # loading draws a varying number of random numbers
        networks.add_lora(config.lora)
        if config.lora.start_from is not None:
            networks.begin_lora(read_lora(config.lora, model.source, config.storage.options()), config.lora.scale)
    if config.strategy.activation_checkpointing:
        networks.recompute_activations()
    if config.strategy.compile:
        compile_blocks(model.family.blocks(denoiser))
    return networks


def make_objective(config: TrainConfig, model: LocalModel, world: World) -> Objective:
    """Return the training objective; a diffusion's noise schedule is the model's own."""
    objective = config.objective
    process: Process = Flow(objective.times == "logit_normal", objective.shift * config.data.resolution / _PIXELS)
    assert objective.prediction is not None, "resolved when the run began"
    if objective.prediction != "flow":
        alphas = load.load_noise_schedule(model.path).alphas_cumprod
        schedule = from_alphas_cumprod(alphas, objective.prediction, zero_terminal_snr=objective.zero_terminal_snr)
        process = schedule.to(world.device)
    numbers = torch.compile(draw, dynamic=False) if config.strategy.compile else draw
    return Objective(process, objective, patch_of(model.path), numbers)


def make_conditioning(config: TrainConfig, model: LocalModel, world: World, empty: Empty | None = None) -> Conditioning:
    """Return the conditioning: text embeddings, or token ids if the text encoder is trained.

    With `empty`, the empty caption's embedding, captions are embeddings already, and no text encoder is loaded.
    """
    if config.model.train_text_encoder:
        return Conditioning(_empty_ids(model).to(world.device)[0], lambda ids: ids)
    half = config.precision != "fp32" and world.device.type == "cuda"
    dtype = DTYPES[config.precision] if half else torch.float32

    @cache
    def encoder() -> torch.nn.Module:
        return load.load_text_encoder(model.path, dtype=dtype, device=world.device)

    def encode(ids: Tensor) -> Tensor:
        return model.family.encode_text(encoder(), ids)

    with torch.no_grad():
        if empty is not None:
            states = torch.from_numpy(empty()).to(world.device, dtype)
            enter(world.device)  # the encoder may have made another device current
        else:
            states = encode(_empty_ids(model).to(world.device))
    return Conditioning(states[0], encode)


def _stored_empty(sources: Sources, model: LocalModel, world: World) -> NDArray[np.float16]:
    """Return the dataset's embedding of the empty caption; if it has none, the main worker encodes one on the CPU."""

    def own() -> Any:
        if not world.is_main:
            return None
        dataset = sources.all[0].written
        if dataset is not None and dataset.storage.exists(EMPTY_TEXT):
            return np.load(io.BytesIO(dataset.storage.read(EMPTY_TEXT)), allow_pickle=False)
        with torch.no_grad():
            encoder = load.load_text_encoder(model.path, dtype=torch.float32, device="cpu")
            return model.family.encode_text(encoder, _empty_ids(model)).half().numpy()

    embedding: NDArray[np.float16] = world.broadcast(world.together(own))
    return embedding


def _empty_ids(model: LocalModel) -> Tensor:
    return token_ids(load_tokenizer(model.path), [""])
