"""`sdp caption` asks the chat server of transformers, as others serve it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from sdp.caption import job
from tests.caption_kit import caption_config, colour_of, write_pictures
from tests.kit import not_none, rows_of
from tests.programs import free_port
from tests.tiny_vlm import caption_for, make_tiny_vlm
from tests.waiting import until

pytestmark = pytest.mark.needs("chat-server")


@pytest.fixture
def served(tool: Callable[[str], Path], tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A tiny model, and the URL of the server that has it."""
    model, port = make_tiny_vlm(tmp_path / "vlm"), free_port()
    (packages,) = tool("chat-server").parents[1].glob("lib/python*/site-packages")
    command = [Path(sys.executable).with_name("transformers"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    own = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--device", "cpu", str(model)], env=os.environ | own, stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}/v1"

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text()
        try:
            urlopen(f"{url}/models", timeout=5).close()
        except HTTPError:  # it looks for models in a cache that is not there
            return True
        except OSError:
            return False
        return True

    try:
        until(answers, "the server", 120)
        yield model, url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def test_the_server_of_transformers_captions_pictures(served: tuple[Path, str], tmp_path: Path) -> None:
    model, url = served
    photos = write_pictures(tmp_path / "photos", 8)
    config = caption_config(photos, tmp_path / "out", model, f"captions.url={url}", "encode.accelerator=cpu")
    dataset = not_none(job.run(config).dataset)
    assert rows_of(dataset)["vlm"].to_pylist() == [caption_for(colour_of(row)) for row in range(8)]
