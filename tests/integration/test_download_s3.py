"""`sdp download` with its source and output in a bucket of a real S3 server."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sdp.datasets import parts
from sdp.download import job
from sdp.storage import open_storage
from tests.download_kit import check_exactly_once, config_for, write_urls
from tests.integration.s3 import Gateway, gateway_fixture, s3_env_fixture  # noqa: F401 (fixtures)
from tests.local_ray import one_node
from tests.misbehaving.server import ImageServer
from tests.waiting import as_soon_as

pytestmark = pytest.mark.needs("versitygw")
ROWS, UNIT = 60, 10


@pytest.fixture(scope="module", autouse=True)
def cluster(gateway: Gateway) -> Iterator[None]:
    """Its workers have the server's address and credentials from the environment that Ray is started in."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in gateway.env.items():
                patch.setenv(name, value)
            stack.enter_context(one_node(cpus=2))
        yield


def test_a_download_to_a_bucket_outlives_its_server_and_gives_the_bytes_of_one_to_a_disk(
    s3_env: Gateway, gateway: Gateway, tmp_path: Path
) -> None:
    with ImageServer(images=2000, distinct=10) as server:
        server.warm()
        urls = [server.image_url(n, "404") if n % 9 == 4 else server.image_url(n, "delay", s=0.15) for n in range(ROWS)]
        source = write_urls(tmp_path / "meta", urls, files=2)
        bucket = open_storage(f"{s3_env.uri}/meta")
        for file in source.iterdir():
            bucket.publish(file.name, file.read_bytes())
        settings = {
            "fetch": {"connections": 4},
            "output": {"rows_per_file": UNIT},
            "concurrency": 1,
        }
        far = config_for(bucket.uri, f"{s3_env.uri}/out", **settings)
        there_when_it_went: list[int] = []

        def leave_and_return(_: object) -> None:
            gateway.kill()
            there_when_it_went.append(len(_parts_of(gateway)))
            time.sleep(1.5)  # so long it is away
            gateway.start()

        restarter = as_soon_as(lambda: _parts_of(gateway), leave_and_return)
        summary = job.run(far)
        restarter.join()
        assert summary is not None
        assert 1 <= there_when_it_went[0] < ROWS // UNIT, "else it was gone when nobody asked"
        rows = check_exactly_once(summary.dataset, range(ROWS))
        assert sorted(rows) == [n for n in range(ROWS) if n % 9 != 4]
        storage = summary.dataset.storage
        for info in storage.list("parts"):
            parts.verify_part(storage, info)
        assert gateway.pending_uploads() == []

        asked, objects = server.stats.requests, _dataset_of(gateway)
        second = job.run(far)
        assert second is not None
        assert (second.dataset.digest, second.figures.done) == (summary.dataset.digest, 0)
        assert (server.stats.requests, _dataset_of(gateway)) == (asked, objects)

        near = job.run(config_for(source, tmp_path / "out", **settings))
        assert near is not None
        names = storage.names("parts")
        assert near.dataset.storage.names("parts") == names
        for name in names:
            assert storage.read(name) == near.dataset.storage.read(name)


def _dataset_of(gateway: Gateway) -> list[str]:
    """Return the files of a dataset except its leases, which differ in each run."""
    return [name for name in gateway.objects() if not name.startswith("out/_lease/")]


def _parts_of(gateway: Gateway) -> list[str]:
    return [name for name in gateway.objects() if name.startswith("out/parts/")]
