"""`make demo`: the whole pipeline on this machine, each step run as a user would run it.

A local server serves synthetic captioned shapes. Everything else is sdp itself, run by its command line. All files are
in one folder (.demo), so a second run resumes.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from scripts.demo import subject
from scripts.demo.shapes import dominant_shape_color, write_metadata
from sdp.console import duration, say, table
from sdp.dreambooth.template import fill
from sdp.errors import SdpError, UserError
from sdp.leaving import kill_descendants
from tests.misbehaving.server import ImageServer

IMAGES = 1000
PROMPTS = (
    "a red circle on a white background",
    "a green square on a yellow background",
    "a blue circle on a white background",
    "a yellow square on a blue background",
    "a purple circle on a yellow background",
    "an orange square on a blue background",
    "a white circle on a red background",
    "a black square on a green background",
    "a red square on a green background",
    "a blue circle on a yellow background",
)
"""The prompts of the final pictures; the second word is the colour that each asks for."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


DemoStep = tuple[str, tuple[str, ...]]
"""The title of one command of the pipeline, and its arguments."""


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configurations of jobs.yaml for a folder."""
    values = {
        "folder": folder.absolute(),
        "prompts": PROMPTS,
        "few_prompts": PROMPTS[:5],
        "all_prompts": (subject.CAPTION, *PROMPTS),
        "caption": subject.CAPTION,
    }
    configs: dict[str, dict[str, Any]] = fill(Path(__file__).with_name("jobs.yaml"), values)
    return configs


def steps(folder: Path) -> list[DemoStep]:
    """Return the pipeline's steps, in order."""
    pages = [str(folder / name) for name in ("run", "online", "samples")]
    page = ("--out", str(folder / "report.html"))
    return [
        _job(folder, "download", "fetch and check the images"),
        ("inspect: the outcome of every row", ("inspect", str(folder / "images"))),
        _job(folder, "process", "encode them to latents and tokens"),
        _job(folder, "train", "train a few steps online, while another process encodes the images", "online"),
        _job(folder, "train", "train a tiny U-Net on the latents"),
        _job(folder, "generate", "draw pictures with it"),
        ("report: everything on one page", ("report", *pages, *page)),
    ]


def _job(folder: Path, job: str, title: str, name: str | None = None) -> DemoStep:
    return f"{job}: {title}", (job, "--config", str(folder / f"{name or job}.yaml"))


def run(folder: Path, images: int) -> list[tuple[str, str]]:
    """Run all steps of the pipeline; return each title with its duration."""
    folder.mkdir(parents=True, exist_ok=True)
    with _server(folder, images):
        return run_steps(folder, steps(folder))


def run_steps(folder: Path, to_run: Sequence[DemoStep]) -> list[tuple[str, str]]:
    """Write the jobs' configurations and run steps; return each title with its duration."""
    for name, config in configurations(folder).items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    times = []
    for title, command in to_run:
        say(f"\n── {title}\n$ sdp {' '.join(command)}")
        start = time.monotonic()
        code = _call([sys.executable, "-m", "sdp", *command])
        if code:
            raise SdpError(f"demo: `sdp {' '.join(command)}` failed with exit code {code}; see its message above")
        times.append((title, duration(time.monotonic() - start)))
    return times


def run_dreambooth(folder: Path, images: int) -> list[tuple[str, str]]:
    """Teach the demo's model a new shape. Run the demo first if there is no such model."""
    times = []
    if not subject.has_base(folder):
        times += run(folder, images)
        times += run_steps(folder, [("export: the demo's model", subject.export_command(folder))])
    subject.write_pictures(folder)
    draw = _job(folder, "generate", "draw the shape before it is taught", "before")
    return [*times, *run_steps(folder, [draw, _job(folder, "dreambooth", "teach it a shape from five pictures")])]


def _call(command: Sequence[str]) -> int:
    """Run a command to its end and return its exit code."""
    # In its own session it does not receive a Ctrl-C from the terminal: only the demo handles that.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            # Every stage resumes after a kill, and a graceful stop can take half a minute.
            os.kill(process.pid, signal.SIGSTOP)
            kill_descendants(root=process.pid)  # some have sessions of their own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _stop(number: int, _: object) -> None:
    """End the demo and its processes, and print how to continue."""
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    say(f"\nsdp: demo stopped by {signal.Signals(number).name}; run the same command to continue")
    raise SystemExit(128 + number)


def judge(folder: Path) -> None:
    """Check that the model has learnt the colours in the captions."""
    rows, correct = list[tuple[str, str, str]](), 0
    for prompt, picture in subject.pictures(folder / "samples"):
        words = prompt.split()
        colour = dominant_shape_color(picture, words[-2])
        correct += colour == words[1]
        rows.append((prompt, colour, "yes" if colour == words[1] else "NO"))
    say("\n── did it learn? The colour of each picture\n")
    say(table(rows, ("prompt", "colour", "correct")))
    say(f"\ncolour correct in {correct} of {len(rows)} pictures; see all results in {folder / 'report.html'}")
    if correct < 0.8 * len(rows):
        raise SdpError(
            f"demo: colour correct in {correct} of {len(rows)} pictures, expected 8 of 10: training did not work"
        )


@contextlib.contextmanager
def _server(folder: Path, images: int) -> Iterator[None]:
    """Serve the images at the addresses in the metadata, which the first run writes."""
    state = folder / "server.json"
    settings: dict[str, Any] = {"port": 0, "hosts": _hosts(), "images": images}
    if state.exists():
        settings = json.loads(state.read_text())
    if settings["images"] != images:
        raise UserError(
            f"demo: {folder} was made with --images {settings['images']}, not {images}; "
            "pass that number, or remove the folder"
        )
    with ImageServer(**settings) as server:
        if not settings["port"]:
            bases = [server.url_of(host) for host in server.hosts]
            write_metadata(folder / "metadata", images, bases, files=3, failing=True)
            state.write_text(json.dumps({**settings, "port": server.port}) + "\n")
        hosts = ", ".join(server.hosts)
        say(f"{images} captioned images at {hosts}, port {server.port}, some of them broken on purpose")
        say(f"all files are in {folder}")
        yield


def _hosts() -> list[str]:
    """Return the loopback addresses that this machine can use, each as one site."""
    hosts = ["127.0.0.1"]
    for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, 0))
            hosts.append(host)
    return hosts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="folder for all files")
    parser.add_argument("--images", type=int, default=IMAGES, help="number of images on the server")
    parser.add_argument("--dreambooth", action="store_true", help="then teach the demo's model a new shape")
    options = parser.parse_args(argv)
    for number in _SIGNALS:
        signal.signal(number, _stop)
    start = time.monotonic()
    try:
        if options.dreambooth:
            times = run_dreambooth(options.folder, options.images)
            subject.judge(options.folder)
        else:
            times = run(options.folder, options.images)
            judge(options.folder)
    except SdpError as error:
        say(f"sdp: {error}")
        return error.exit_code
    say("\n" + table([*times, ("total", duration(time.monotonic() - start))]))
    say(f"\nRun it again: it resumes, and everything is done already. `rm -r {options.folder}` starts afresh.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
