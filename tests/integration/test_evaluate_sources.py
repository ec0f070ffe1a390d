"""Feature networks out of a bucket of a real S3 server, and from a hub of our own."""

import shutil
from pathlib import Path

import pytest

from sdp.model import layout, networks
from sdp.storage import open_storage
from tests.evaluate_kit import tiny_clip
from tests.integration.s3 import Gateway, gateway_fixture, s3_env_fixture  # noqa: F401 (fixtures)
from tests.integration.test_model_hub import REVISION, SOURCE, Ask, Hub, ask, hub  # noqa: F401 (fixtures)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.mark.needs("versitygw")
def test_a_network_in_a_bucket_is_the_one_that_was_put_there(
    s3_env: Gateway, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = open_storage(f"{s3_env.uri}/evaluate/clip")
    for file in clip.iterdir():
        folder.publish(file.name, file.read_bytes())
    folder.publish("README.md", b"no part of it")
    folder.publish("onnx/model.safetensors", b"nor this")
    network = networks.find(folder.uri, "clip.model")
    assert (network.kind, network.digest) == ("clip", networks.find(str(clip), "clip.model").digest)
    assert layout.present(network.path, networks.PATTERNS) == layout.present(clip, networks.PATTERNS)
    assert not (network.path / "onnx").exists()
    assert networks.find(network.source, "clip.model").path == network.path


def test_a_network_on_the_hub_is_fetched_once_by_its_revision(hub: Hub, ask: Ask, clip: Path) -> None:  # noqa: F811
    hub.files = {name: (clip / name).read_bytes() for name in layout.present(clip, networks.PATTERNS)}
    wanted = set(hub.files)
    hub.files |= {"pytorch_model.bin": b"not wanted", "README.md": b"nor this"}
    call = f"__import__('sdp.model.networks').model.networks.find('{SOURCE}', 'clip.model').digest"
    refused = ask(call, HF_HUB_OFFLINE="1")
    assert refused.line.startswith("2 clip.model: model source")
    assert "unset HF_HUB_OFFLINE" in refused.line
    done = ask(call)
    assert done.out == networks.find(str(clip), "clip.model").digest, done.line
    assert {path.split(f"{REVISION}/", 1)[1] for path in hub.asked if "/resolve/" in path} == wanted
    hub.asked.clear()
    assert ask(call, HF_HUB_OFFLINE="1").out == done.out
    assert ask(call).out == done.out
    assert hub.asked == []


def test_a_relative_folder_means_the_same_to_a_worker_that_is_elsewhere(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(clip, tmp_path / "clip")
    monkeypatch.chdir(tmp_path)
    network = networks.find("./clip", "clip.model")
    monkeypatch.chdir("/")
    assert networks.find(network.source, "clip.model").digest == network.digest
