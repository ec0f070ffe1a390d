"""`make demo`: the pipeline end to end on this machine, each step as a user would call it.

A local server serves synthetic captioned shapes; everything else is the product itself, run by its command line in
processes of its own. All files are in one folder (.demo), so a second run resumes instead of repeating.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sdp.console import duration, say, table
from sdp.demo import subject
from sdp.demo.server import serve
from sdp.demo.shapes import dominant_shape_color, write_metadata
from sdp.errors import SdpError, UserError

IMAGES = 1000
SIDE = 64
ONLINE_STEPS = 8
STEPS = 400
BATCH = 64
PROMPTS = tuple(
    (f"{'an' if color[0] == 'o' else 'a'} {color} {shape} on a {background} background", color)
    for color, shape, background in (
        ("red", "circle", "white"),
        ("green", "square", "yellow"),
        ("blue", "circle", "white"),
        ("yellow", "square", "blue"),
        ("purple", "circle", "yellow"),
        ("orange", "square", "blue"),
        ("white", "circle", "red"),
        ("black", "square", "green"),
        ("red", "square", "green"),
        ("blue", "circle", "yellow"),
    )
)
"""The prompts of the pictures drawn at the end, and the colour that each must have."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Step:
    """One command of the pipeline and its configuration file."""

    title: str
    command: tuple[str, ...]
    config: tuple[str, dict[str, Any]] | None = None
    """The file's name in the demo's folder, and its content."""


def steps(folder: Path) -> list[Step]:
    """Return the pipeline's steps, in order."""
    trainers = min(2, os.cpu_count() or 1)
    where = {name: str(folder / name) for name in ("metadata", "images", "latents", "online", "run", "samples")}
    download = {
        "source": {"uri": where["metadata"], "url_column": "URL", "caption_column": "TEXT"},
        "output": {"uri": where["images"], "rows_per_file": 100},
        "image": {"size": 128},
        "fetch": {"first_byte_timeout_s": 60, "allow_private": True},  # a busy machine draws slowly
    }
    process = {
        "source": {"uri": where["images"]},
        "output": {"uri": where["latents"], "rows_per_file": 400},
        "resolutions": [SIDE],
        "model": {"source": "builtin:tiny"},
    }
    train = {
        "source": {"uri": where["latents"]},
        "output": {"uri": where["run"]},
        "model": {
            "source": "builtin:tiny",
            "start_from": str(folder / "online" / "checkpoints" / f"step-{ONLINE_STEPS:09d}"),
        },
        "data": {"mode": "offline", "resolution": SIDE, "batch_size": BATCH // trainers},
        "max_steps": STEPS,
        "objective": {"prediction": "v"},
        "optimizer": {"learning_rate": 2e-3, "schedule": "cosine", "warmup_steps": 20, "clip_norm": 1.0},
        "ema": {"decay": 0.99},
        "precision": "fp32",
        "checkpoint": {"every_steps": STEPS // 4},
        "samples": {
            "every_steps": STEPS // 4,
            "prompts": [prompt for prompt, _ in PROMPTS[:5]],
            "steps": 10,
            "guidance_scale": 2.0,
        },
        "scaling": {"num_workers": trainers},
    }
    online = {
        **train,
        "source": {"uri": where["images"]},
        "output": {"uri": where["online"]},
        "model": {"source": "builtin:tiny"},
        "data": {"mode": "online", "resolution": SIDE, "batch_size": BATCH},
        "max_steps": ONLINE_STEPS,
        "checkpoint": {"every_steps": ONLINE_STEPS},
        "samples": {},
        "log": {"every_steps": ONLINE_STEPS // 4},
        "encode": {"num_workers": 1},
        "scaling": {"num_workers": 1},
    }
    generate = {
        "prompts": [prompt for prompt, _ in PROMPTS],
        "output": {"uri": where["samples"]},
        "checkpoint": where["run"],
        "resolution": SIDE,
        "sampler": {"steps": 20, "guidance_scale": 2.0},
    }
    page = ("--out", str(folder / "report.html"), "--title", "The sdp demo")
    return [
        _job(folder, "download", "fetch and check the images", download),
        Step("inspect: what became of every row", ("inspect", where["images"])),
        _job(folder, "process", "encode them to latents and tokens", process),
        _job(
            folder, "train", "a few steps online: from images, encoded by another process meanwhile", online, "online"
        ),
        _job(folder, "train", "train a tiny U-Net on them", train),
        _job(folder, "generate", "draw pictures with it", generate),
        Step(
            "report: all of it on one page",
            ("report", *(where[name] for name in ("online", "run", "samples")), *page),
        ),
    ]


def _job(folder: Path, job: str, what: str, config: dict[str, Any], name: str | None = None) -> Step:
    file = f"{name or job}.yaml"
    return Step(f"{job}: {what}", (job, "--config", str(folder / file)), (file, config))


def run(folder: Path, images: int) -> list[tuple[str, str]]:
    """Run every step of the pipeline; return each title with the time that it took."""
    folder.mkdir(parents=True, exist_ok=True)
    with _server(folder, images):
        return take(folder, steps(folder))


def take(folder: Path, some: Sequence[Step]) -> list[tuple[str, str]]:
    """Run some steps; return each title with the time that it took."""
    times = []
    for step in some:
        if step.config:
            name, content = step.config
            (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
        say(f"\n── {step.title}\n$ sdp {' '.join(step.command)}")
        start = time.monotonic()
        code = _call([sys.executable, "-m", "sdp", *step.command])
        if code:
            raise SdpError(f"demo: `sdp {' '.join(step.command)}` ended with exit code {code}; its message is above")
        times.append((step.title, duration(time.monotonic() - start)))
    return times


def run_dreambooth(folder: Path, images: int) -> list[tuple[str, str]]:
    """Teach the demo's model a subject, which it makes first where it is not there."""
    times = []
    if not subject.has_base(folder):
        times += run(folder, images)
        times += take(folder, [Step("export: the model that the demo has trained", subject.export_command(folder))])
    subject.own_pictures(folder)
    prompts = tuple(prompt for prompt, _ in PROMPTS)
    learn = _job(folder, "dreambooth", "teach it a shape from five pictures", subject.config(folder, SIDE, prompts))
    return [*times, *take(folder, [learn])]


def _call(command: Sequence[str]) -> int:
    """Run a command to its end and return its exit code."""
    # In a session of its own a Ctrl-C at the terminal does not reach it: the demo alone answers.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            # Every stage continues from storage after a kill; a polite stop can take half a minute.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _stop(number: int, _: object) -> None:
    """Say how to continue, and end the demo with all that it has started."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # another one must not interrupt the cleaning up
    say(f"\nsdp: demo stopped by {signal.Signals(number).name}; the same command continues where it stopped")
    raise SystemExit(128 + number)


def colours(samples: Path) -> list[tuple[str, str, str]]:
    """Return each picture's prompt, the colour that it asks for, and the colour that is seen."""
    wanted = dict(PROMPTS)
    return [
        (prompt, wanted[prompt], dominant_shape_color(picture, prompt.split()[-2]))
        for prompt, picture in subject.pictures(samples)
    ]


def judge(folder: Path) -> None:
    """Check that the model has learnt what the captions say."""
    seen = colours(folder / "samples")
    right = sum(asked == got for _, asked, got in seen)
    say("\n── did it learn? The colour that each picture was to have, and the one that it has\n")
    say(
        table(
            [(prompt, got, "yes" if asked == got else "NO") for prompt, asked, got in seen], ("prompt", "seen", "right")
        )
    )
    say(
        f"\ncolour right in {right} of {len(seen)} pictures; look at them, and at all else, in {folder / 'report.html'}"
    )
    if right < 0.8 * len(seen):
        raise SdpError(
            f"demo: colour right in {right} of {len(seen)} pictures, expected 8 of 10: training did not work"
        )


@contextlib.contextmanager
def _server(folder: Path, images: int) -> Iterator[None]:
    """Serve the images at the addresses that the metadata names; write the metadata the first time."""
    state = folder / "server.json"
    known: dict[str, Any] = {"port": 0, "hosts": _hosts(), "images": images}
    if state.exists():
        known = json.loads(state.read_text())
    if known["images"] != images:
        raise UserError(
            f"demo: {folder} was made with --images {known['images']}, not {images}; give that number, or remove it"
        )
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(serve(images, known["hosts"], known["port"]))
        except OSError as error:
            raise UserError(
                f"demo: the image server cannot listen at port {known['port']} of {', '.join(known['hosts'])} "
                f"({error.strerror}); end what uses that port, or remove {folder}"
            ) from error
        if not known["port"]:
            write_metadata(folder / "metadata", images, [f"http://{host}:{port}" for host in known["hosts"]], files=3)
            state.write_text(json.dumps({**known, "port": port}) + "\n")
        say(f"{images} captioned images at {', '.join(known['hosts'])}, port {port}, some of them broken on purpose")
        say(f"everything is kept in {folder}")
        yield


def _hosts() -> list[str]:
    """Return addresses of this machine that stand for as many sites; not every system has more than one."""
    hosts = ["127.0.0.1"]
    for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, 0))
            hosts.append(host)
    return hosts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where everything is kept")
    parser.add_argument("--images", type=int, default=IMAGES, help="how many images the server has")
    parser.add_argument("--dreambooth", action="store_true", help="go on: teach the demo's model a shape of its own")
    options = parser.parse_args(argv)
    for number in _SIGNALS:
        signal.signal(number, _stop)
    start = time.monotonic()
    try:
        if options.dreambooth:
            times = run_dreambooth(options.folder, options.images)
            subject.judge(options.folder, dict(PROMPTS))
        else:
            times = run(options.folder, options.images)
            judge(options.folder)
    except SdpError as error:
        say(f"sdp: {error}")
        return error.exit_code
    say("\n" + table([*times, ("in all", duration(time.monotonic() - start))]))
    say(f"\nRun it again: it resumes, and finds everything done. `rm -r {options.folder}` begins anew.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
