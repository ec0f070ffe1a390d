"""A model in a bucket of a real S3 server."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sdp.errors import AccessDenied, ModelError, NotFound
from sdp.model.layout import present
from sdp.model.sources import check, parse, prediction_type, resolve
from sdp.storage import open_storage
from tests.integration.s3 import Gateway, gateway_fixture, s3_env_fixture  # noqa: F401 (fixtures)

pytestmark = pytest.mark.needs("versitygw")


@pytest.fixture
def uri(s3_env: Gateway, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a copy of the tiny model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    storage = open_storage(f"{s3_env.uri}/{request.node.name}/model")
    tiny = resolve("builtin:tiny").path
    for name in present(tiny):
        storage.publish(name, (tiny / name).read_bytes())
    storage.publish("README.md", b"not part of the model")
    return storage.uri


def test_a_model_in_a_bucket_is_the_model_that_was_put_there(uri: str) -> None:
    check(uri)
    assert prediction_type(uri) == "epsilon"
    got = resolve(uri)
    tiny = resolve("builtin:tiny")
    assert got.digest == tiny.digest
    assert present(got.path) == present(tiny.path)
    assert not (got.path / "README.md").exists()
    assert resolve(replace(parse(uri), sha256=tiny.digest)).path == got.path


def test_the_workers_of_a_machine_download_it_once(uri: str) -> None:
    code = (
        "from sdp.model import cache\nfrom sdp.model.sources import resolve\n"
        "real, reads = cache._fetch, []\n"
        "cache._fetch = lambda storage, file, to: (reads.append(file), real(storage, file, to))\n"
        f"print(resolve({uri!r}).path, len(reads))\n"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ.copy()) for _ in range(4)
    ]
    outputs = [worker.communicate(timeout=120)[0].decode().split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert {path for path, _ in outputs} == {str(resolve(uri).path)}
    files = len(present(resolve(uri).path))
    assert sorted(int(reads) for _, reads in outputs) == [0, 0, 0, files]


def test_a_missing_part_in_a_bucket_is_named(uri: str) -> None:
    open_storage(uri).delete("vae/diffusion_pytorch_model.safetensors")
    with pytest.raises(ModelError, match=r"vae/diffusion_pytorch_model\.safetensors is missing"):
        check(uri)
    check(uri, ["text_encoder", "tokenizer"])


def test_a_missing_bucket_is_one_line(s3_env: Gateway) -> None:
    assert s3_env.endpoint
    for call in (check, resolve):
        with pytest.raises(NotFound) as caught:
            call("s3://no-such-bucket/model")
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)


def test_wrong_credentials_are_one_line(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for call in (check, resolve):
        with pytest.raises(AccessDenied) as caught:
            call(uri)
        assert caught.value.exit_code == 2
