"""Headers and indexes of tensors, and configurations of networks."""

import json
from collections.abc import Callable
from pathlib import Path

from sdp.config.yaml_text import parse_document
from sdp.families.sd import SD
from sdp.model import layout, sharded
from sdp.model.tensor_index import INDEX, read_tensor_index
from sdp.storage import open_storage
from tests.growth import Case

Reading = Callable[[], object]


def _index(folder: Path, tensors: dict[str, object]) -> Reading:
    storage = open_storage(str(folder))
    storage.publish(INDEX, json.dumps({"format": 1, "tensors": tensors}).encode())
    return lambda: read_tensor_index(storage)


def _tensors(pieces: int, folder: Path) -> Reading:
    entry = {"dtype": "uint8", "size": [1], "chunks": [[[0], [1], "f", 0]]}
    return _index(folder, {f"{number}.weight": entry for number in range(pieces)})


def _chunks(pieces: int, folder: Path) -> Reading:
    chunks = [[[number], [1], "f", number] for number in reversed(range(pieces))]
    return _index(folder, {"weight": {"dtype": "uint8", "size": [pieces], "chunks": chunks}})


def _empty_chunks(pieces: int, folder: Path) -> Reading:
    return _index(folder, {"weight": {"dtype": "uint8", "size": [1], "chunks": [[[0], [0], "f", 0]] * pieces}})


def _dimensions(pieces: int, folder: Path) -> Reading:
    return _index(folder, {"weight": {"dtype": "uint8", "size": [2**50] * pieces, "chunks": []}})


def _weights(pieces: int, folder: Path) -> Reading:
    """Read tensors of one byte, each by a request of its own."""
    storage = open_storage(str(folder))
    tensors = {
        f"{number}.weight": {"dtype": "uint8", "size": [1], "chunks": [[[0], [1], "f", 2 * number]]}
        for number in range(pieces)
    }
    storage.publish("f", bytes(2 * pieces))
    storage.publish(INDEX, json.dumps({"format": 1, "tensors": tensors}).encode())
    return lambda: sharded.read_tensors(storage, tensors)


def _config(pieces: int, _: Path) -> Reading:
    content = json.dumps({"_class_name": "AutoencoderKL", "latent_channels": 4, "channels": [1] * pieces}).encode()
    return lambda: layout.contradiction(lambda _: content, ("vae",), SD)


def _yaml(pieces: int, _: Path) -> Reading:
    text = "".join(f"key{number}: [1, {{a: 'b'}}]\n" for number in range(pieces))
    return lambda: parse_document(text, "a.yaml")


def _nested_yaml(pieces: int, _: Path) -> Reading:
    return lambda: parse_document("[" * pieces, "a.yaml")


CASES: tuple[Case, ...] = (
    Case("tensors.json of many tensors", 10_000, _tensors),
    Case("tensors.json of many chunks", 10_000, _chunks),
    Case("tensors.json of empty chunks", 10_000, _empty_chunks),
    Case("tensors.json of many dimensions", 10_000, _dimensions),
    Case("checkpoint of many tensors", 500, _weights),
    Case("YAML of keys", 1_000, _yaml),
    Case("nested YAML", 10_000, _nested_yaml),
    Case("configuration of a network", 100_000, _config),
)
