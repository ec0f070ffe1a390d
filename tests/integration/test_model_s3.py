"""A model and a feature network in a bucket of a real S3 server."""

from dataclasses import replace
from pathlib import Path

import pytest

from sdp.model import networks
from sdp.model.layout import present
from sdp.model.sources import check, parse, prediction_type, resolve
from sdp.storage import open_storage
from tests.evaluate_kit import tiny_clip
from tests.integration.s3 import Gateway, gateway_fixture, s3_env_fixture  # noqa: F401 (fixtures)

pytestmark = pytest.mark.needs("versitygw")


def test_a_model_in_a_bucket_is_the_model_that_was_put_there(s3_env: Gateway) -> None:
    storage, tiny = open_storage(f"{s3_env.uri}/models/tiny"), resolve("builtin:tiny")
    for name in present(tiny.path):
        storage.publish(name, (tiny.path / name).read_bytes())
    storage.publish("README.md", b"not part of the model")
    check(storage.uri)
    assert prediction_type(storage.uri) == "epsilon"
    got = resolve(storage.uri)
    assert got.digest == tiny.digest
    assert [path.name for path in got.path.rglob("*.md")] == []
    assert resolve(replace(parse(storage.uri), sha256=tiny.digest)).path == got.path


def test_a_network_in_a_bucket_is_the_one_that_was_put_there(s3_env: Gateway, tmp_path: Path) -> None:
    clip, folder = tiny_clip(tmp_path / "clip"), open_storage(f"{s3_env.uri}/evaluate/clip")
    for file in clip.iterdir():
        folder.publish(file.name, file.read_bytes())
    folder.publish("onnx/model.safetensors", b"no part of it")
    network = networks.find(folder.uri, "clip.model")
    assert (network.kind, network.digest) == ("clip", networks.find(str(clip), "clip.model").digest)
    assert not (network.path / "onnx").exists()
    assert networks.find(network.source, "clip.model").path == network.path
