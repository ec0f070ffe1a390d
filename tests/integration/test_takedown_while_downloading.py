"""A takedown that comes while a download runs, which has begun without knowing of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdp.cli import main
from sdp.datasets import tombstones
from sdp.datasets.tombstones import Takedown
from sdp.download import job
from sdp.storage import open_storage
from tests.download_kit import config_for, outcomes, plain_urls, write_urls, written_rows
from tests.local_ray import one_node
from tests.misbehaving.server import ImageServer


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with one_node(cpus=2):
        yield


def test_rows_taken_down_during_a_download_are_left_out_and_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ImageServer(images=60, distinct=20) as server:
        server.warm()
        urls = plain_urls(server, 40)
        source = write_urls(tmp_path / "meta", urls)
        storage = open_storage(str(tmp_path / "out"))
        write_pending = job._write_pending

        def meanwhile(*arguments: Any) -> Any:
            added = tombstones.add(storage, [Takedown("url", f"{urls[27]}#by-mail")])
            assert added.rows == []
            return write_pending(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(job, "_write_pending", meanwhile)
            summary = job.run(config_for(source, tmp_path / "out"))
        assert summary is not None
        assert outcomes(summary.dataset)[27][0] == "written"
        assert "1 written row has been taken down in the meantime" in capsys.readouterr().err
        assert list(tombstones.load(storage).rows) == [27]
        digest = written_rows(summary.dataset)[28]["sha256"]
        assert tombstones.add(storage, [Takedown("sha256", digest)]).rows == [8, 28]
        assert main(["audit", storage.uri, "--url", urls[27]]) == 0
        assert "row 27, taken down\n" in capsys.readouterr().out

        # A download that begins now knows of it.
        asked = server.stats.requests
        source = write_urls(tmp_path / "again", [urls[27], urls[28], urls[29]])
        (tmp_path / "new" / "_tombstones").mkdir(parents=True)
        for name in storage.names("_tombstones/"):
            if "looked" not in name:
                (tmp_path / "new" / name).write_bytes(storage.read(name))
        summary = job.run(config_for(source, tmp_path / "new"))
        assert summary is not None
        assert [outcomes(summary.dataset)[row][:2] for row in (0, 1)] == [("filtered", "tombstone")] * 2
        assert server.stats.requests == asked + 2
        capsys.readouterr()
        assert main(["audit", summary.dataset.storage.uri, "--sha256", digest]) == 0
        assert capsys.readouterr().out.startswith("row 1, taken down\n")
