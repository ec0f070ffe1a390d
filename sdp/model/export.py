"""From a checkpoint to what others load: a folder in diffusers layout, or a single file."""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from sdp.datasets.output import read_json
from sdp.errors import ModelError, UserError, one_line
from sdp.model import family, load, sources
from sdp.model.checkpoints import CONFIG, find_checkpoint, read_marker, read_weights
from sdp.model.layout import INDEX, PARTS
from sdp.storage import Storage, StorageOptions, open_storage

SCHEDULER = "scheduler/scheduler_config.json"
Dtype = Literal["fp32", "fp16"]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    uri: str
    checkpoint: str
    step: int
    ema: bool
    files: int


def export(
    checkpoint: str,
    out: str,
    *,
    ema: bool = True,
    dtype: Dtype = "fp32",
    one_file: bool = False,
    options: StorageOptions | None = None,
) -> Exported:
    """Write the model of a checkpoint (or of a run's newest): averaged weights, or the raw ones.

    `out` is an empty folder, or with `one_file` the name of a file that is not there. All networks are stored in
    `dtype`, also those that were not trained.
    """
    folder = find_checkpoint(checkpoint, options)
    config = read_json(folder, CONFIG)
    step = int(read_marker(folder)["state"]["step"])
    if not step:
        raise UserError(f"export: CHECKPOINT: {folder.uri}: step 0, which has learned nothing; train first")
    parent, _, file = out.rpartition("/") if one_file else (out, "", "")
    target = open_storage(parent or ".", options)
    if one_file and not file.endswith(".safetensors"):
        raise UserError(f"export: OUT: expected the name of a file that ends with .safetensors, got {out}; name one")
    if one_file and target.exists(file):
        raise UserError(f"export: OUT: {target.uri_of(file)}: is there already; choose another name")
    if not one_file and target.names():
        raise UserError(f"export: OUT: {target.uri}: there are files in it already; choose an empty folder")
    source = _source(folder, config, options)
    unet: Any = _with_weights(load.load_unet_config(source), read_weights(folder, ema=ema), folder)
    if one_file:
        from sdp.model.single_file import single_file

        tensors = single_file(unet, load.load_vae(source), load.load_text_encoder(source))
        target.publish(file, _serialised(tensors, dtype))
        return Exported(target.uri_of(file), folder.uri, step, ema, 1)
    with TemporaryDirectory(prefix="sdp-export-") as scratch:
        unet.save_pretrained(Path(scratch) / "unet", safe_serialization=True)
        made = {path.relative_to(scratch).as_posix(): path for path in Path(scratch).rglob("*") if path.is_file()}
        copied = {name: source / name for name in sources.present(source) if not name.startswith("unet/")}
        # What a folder is known by comes last: without it the folder is visibly unfinished.
        names = sorted({**copied, **made}, key=lambda name: (name == INDEX, name))
        for name in names:
            data = {**copied, **made}[name].read_bytes()
            if name.endswith(".safetensors"):
                data = _in_dtype(data, dtype)
            elif name in (SCHEDULER, INDEX):
                data = _scheduler(data, config) if name == SCHEDULER else _index(data)
            target.publish(name, data)
    return Exported(target.uri, folder.uri, step, ema, len(names))


def _source(folder: Storage, config: dict[str, Any], options: StorageOptions | None) -> Path:
    """The model that was trained, still with the content that it had then."""
    named = config["model"]["source"]
    sources.check(named, storage=options)
    model = sources.resolve(named, storage=options)
    digest = read_marker(folder).get("model", {}).get("digest")
    if digest is not None and digest != model.digest:
        raise ModelError(
            f"model source {named}: its content has changed since {folder.uri} was trained with it: "
            f"then {digest[:12]}…, now {model.digest[:12]}…; restore it"
        )
    return model.path


def _with_weights(architecture: dict[str, Any], weights: dict[str, Any], folder: Storage) -> Any:
    unet = family.unet_class().from_config(architecture)
    try:
        unet.load_state_dict(weights)
    except RuntimeError as error:
        cause = one_line(error, 160)
        raise ModelError(f"{folder.uri}: of another architecture than its model source ({cause})") from error
    return unet.eval()


def _in_dtype(data: bytes, dtype: Dtype) -> bytes:
    """A file of weights with its floating-point numbers in a dtype."""
    from safetensors.torch import load as load_tensors

    return _serialised(load_tensors(data), dtype)


def _serialised(tensors: dict[str, Any], dtype: Dtype) -> bytes:
    import torch
    from safetensors.torch import save as save_tensors

    wanted = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
    cast = {name: tensor.to(wanted) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return save_tensors({name: tensor.contiguous() for name, tensor in cast.items()}, {"format": "pt"})


def _index(data: bytes) -> bytes:
    """The source's index, without the networks that were not exported, such as a safety checker."""
    index = json.loads(data)
    for name, entry in index.items():
        if isinstance(entry, list) and name not in PARTS:
            index[name] = [None, None]
    return _json({**index, "requires_safety_checker": False})


def _scheduler(data: bytes, config: dict[str, Any]) -> bytes:
    """The source's sampler, told what the model has learned to predict."""
    objective = config["objective"]
    prediction = {"epsilon": "epsilon", "v": "v_prediction"}[objective["prediction"]]
    told = {**json.loads(data), "prediction_type": prediction}
    if objective["zero_terminal_snr"]:
        told |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return _json(told)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
