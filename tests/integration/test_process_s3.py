"""`sdp process` with source, model and output in buckets of a real S3 server."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sdp.process import job
from sdp.storage import open_storage
from tests.integration.s3 import Gateway, gateway_fixture, s3_env_fixture  # noqa: F401 (fixtures)
from tests.local_ray import one_node
from tests.process_kit import config_of, make_images, write_model

pytestmark = pytest.mark.needs("versitygw")


@pytest.fixture(scope="module", autouse=True)
def cluster(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Its workers have the server's address and credentials from the environment that Ray is started in."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**gateway.env, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}.items():
                patch.setenv(name, value)
            stack.enter_context(one_node(cpus=3))
        yield


@pytest.fixture
def bucket(s3_env: Gateway, request: pytest.FixtureRequest) -> str:
    """A place of this test's own."""
    return f"{s3_env.uri}/{request.node.name}"


def upload(folder: Path, uri: str) -> str:
    storage = open_storage(uri)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.publish(path.relative_to(folder).as_posix(), path.read_bytes())
    return storage.uri


def run(*settings: str, **options: bool) -> job.ProcessSummary:
    summary = job.run(config_of(*settings, "output.rows_per_file=20"), **options)
    assert summary.dataset is not None
    return summary


def test_latents_in_a_bucket_are_those_on_a_disk(tmp_path: Path, bucket: str, gateway: Gateway) -> None:
    make_images(tmp_path, rows=60, unit_rows=20)
    model = write_model(tmp_path / "model")
    images, far_model = upload(tmp_path / "images", f"{bucket}/images"), upload(model, f"{bucket}/model")
    here = run(str(tmp_path / "images"), str(tmp_path / "out"), str(model)).dataset
    remote = run(images, f"{bucket}/out", far_model).dataset
    assert here is not None
    assert remote is not None
    assert remote.manifest.counts.written == 54
    names = remote.parts["path"].to_pylist()
    assert len(names) == 3
    for name in names:
        assert remote.storage.read(name) == here.storage.read(name), "the same bytes, wherever they come from and go to"
    assert gateway.pending_uploads() == []

    second = run(images, f"{bucket}/out", far_model)
    assert second.figures.parts_written == 0
    content = remote.storage.read(names[1])
    remote.storage.delete(names[1])
    mended = run(images, f"{bucket}/out", far_model)
    assert (mended.figures.parts_written, mended.figures.rows_total) == (1, 20)
    assert remote.storage.read(names[1]) == content
