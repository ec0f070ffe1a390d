"""`make demo`: the pipeline end to end on this machine, each step as a user would call it.

A local server serves synthetic captioned shapes; everything else is the product itself, run by its command line in
processes of its own. Everything lies in one folder (.demo), so running it again resumes instead of repeating.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sdp.console import duration, say, table
from sdp.errors import SdpError, UserError

IMAGES = 600
START_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Step:
    """One command of the pipeline and the configuration file that it is given."""

    title: str
    command: tuple[str, ...]
    config: tuple[str, dict[str, Any]] | None = None
    """The file's name in the demo's folder, and its content."""


def steps(folder: Path) -> list[Step]:
    """The pipeline, in order."""
    where = {name: str(folder / name) for name in ("metadata", "images", "latents", "run", "samples")}
    download = {
        "source": {"uri": where["metadata"], "url_column": "URL", "caption_column": "TEXT"},
        "output": {"uri": where["images"], "rows_per_file": 100},
        "image": {"size": 128},
        "fetch": {"timeout_s": 10, "allow_private": True},
    }
    return [
        Step(
            "download: fetch and check the images",
            ("download", "--config", str(folder / "download.yaml")),
            ("download.yaml", download),
        ),
        Step("inspect: what became of every row", ("inspect", where["images"])),
    ]


def run(folder: Path, images: int) -> list[tuple[str, str]]:
    """Run every step; the time that each took."""
    folder.mkdir(parents=True, exist_ok=True)
    times = []
    with _server(folder, images):
        for step in steps(folder):
            if step.config:
                name, content = step.config
                (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
            say(f"\n── {step.title}\n$ sdp {' '.join(step.command)}")
            start = time.monotonic()
            code = subprocess.run([sys.executable, "-m", "sdp", *step.command], stdin=subprocess.DEVNULL).returncode
            if code:
                raise SdpError(
                    f"demo: `sdp {' '.join(step.command)}` ended with exit code {code}; its message is above"
                )
            times.append((step.title, duration(time.monotonic() - start)))
    return times


@contextlib.contextmanager
def _server(folder: Path, images: int) -> Iterator[str]:
    """The image server, at the address that the metadata names; the metadata is written the first time."""
    from sdp.demo.shapes import write_metadata

    state = folder / "server.json"
    known = json.loads(state.read_text()) if state.exists() else {}
    if known and known["images"] != images:
        raise UserError(
            f"demo: {folder} was made with --images {known['images']}, not {images}; give that number, or remove it"
        )
    port = known.get("port") or _free_port()
    command = [
        sys.executable,
        "-m",
        "sdp.demo.server",
        "--port",
        str(port),
        "--images",
        str(images),
        "--mix",
        "default",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise UserError(
                f"demo: the image server did not start at port {port}; end what uses that port, or remove {folder}"
            )
        if not known:
            write_metadata(folder / "metadata", images, url, files=3)
            state.write_text(json.dumps({"port": port, "images": images}) + "\n")
        say(f"{images} captioned images at {url}, some of them broken on purpose; everything is kept in {folder}")
        yield url
    finally:
        process.terminate()
        process.wait(START_DEADLINE_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where everything is kept")
    parser.add_argument("--images", type=int, default=IMAGES, help="how many images the server has")
    given = parser.parse_args(argv)
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    start = time.monotonic()
    try:
        times = run(given.folder, given.images)
    except SdpError as error:
        say(f"sdp: {error}")
        return error.exit_code
    say("\n" + table([*times, ("in all", duration(time.monotonic() - start))]))
    say(f"\nRun it again: it resumes, and finds everything done. `rm -r {given.folder}` begins anew.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
