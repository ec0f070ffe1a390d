"""Damaged sources, datasets and runs: one file is changed, and its readers must refuse it in one line, or read it."""

import json
import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp.cli import COMMANDS
from sdp.cli.command import CommandParser
from sdp.config import parse
from sdp.datasets.output import Head, open_output
from sdp.datasets.source import freeze_source
from sdp.download.plan import Rules, plan
from sdp.download.spans import read_span, spans
from sdp.errors import SdpError
from sdp.model.checkpoints import find_checkpoint, read_weights
from sdp.process.prepare import begin, prepare
from sdp.storage import list_source, open_storage
from tests.process_kit import config_of, make_images, write_plain
from tests.training import config, tiny_inputs, train

_MOST_S = 60
_MEMORY = 4 << 30
"""The most address space that a reader may map beyond what it has."""
_ODD: tuple[Any, ...] = (None, True, -1, 0, 2**70, 1e308, "", "\0", "../../x", "9" * 5000, [], {}, [[]], {"": None})


@dataclass(frozen=True)
class Reading:
    """One damaged file, and the result of reading it."""

    reader: str
    file: str
    change: str
    verdict: str
    """`read`, `refused`, or the way in which the promise was broken."""
    line: str

    @property
    def broken(self) -> bool:
        """True if it was neither read nor refused in one line."""
        return self.verdict not in ("read", "refused") or "\n" in self.line

    def __str__(self) -> str:
        last = (self.line.splitlines() or [""])[-1]
        return f"{self.reader}, {self.change} of {self.file}: {self.verdict} ({last})"


def damaged_files(folder: Path, count: int, seed: int) -> Iterator[Reading]:
    """Make sources, datasets and a run in a folder; damage a file of theirs and read them, `count` times."""
    root = tiny_inputs(folder)
    train(config(root, max_steps=2, checkpoint__every_steps=1))
    make_images(root, 40)
    write_plain(root / "plain", 40)

    def inspect(damaged: Path) -> None:
        command = next(command for command in COMMANDS if command.name == "inspect")
        parser = CommandParser(command)
        command.run(parser.parse_args(["--verify", str(damaged)]))

    def train_on(damaged: Path) -> None:
        shutil.rmtree(root / "other", ignore_errors=True)
        train(config(root, "other", max_steps=1, source__uri=str(damaged)))

    def resume(damaged: Path) -> None:
        train(config(root, max_steps=3, checkpoint__every_steps=1, output__uri=str(damaged)))

    def fresh() -> Path:
        shutil.rmtree(root / "fresh", ignore_errors=True)
        return root / "fresh"

    def download(damaged: Path) -> None:
        settings = parse("download", {"source": {"uri": str(damaged)}, "output": {"uri": str(fresh())}})
        rules = Rules(settings.source, settings.filters)
        output = open_output(open_storage(settings.output.uri), Head("images", 10, False, {}))
        output = freeze_source(output, list_source(str(damaged)), rules.columns())
        for span in spans(output.index, output.pending(), workers=1):
            for task in read_span(span, rules.columns(), output.storage):
                plan(task.table, task.rows, rules)

    def process(damaged: Path) -> None:
        prepared = prepare(config_of(damaged, fresh(), root / "model"))
        output = begin(prepared, only_failed=False)
        planner = prepared.pictures.planner(output, 16, prepared.spec.storage)
        for work in output.pending():
            for piece in planner(work):
                prepared.spec.prepare((piece, None))

    readers: tuple[tuple[str, str, Callable[[Path], object]], ...] = (
        ("metadata", "download", download),
        ("images", "process", process),
        ("plain", "process", process),
        ("latents", "inspect", inspect),
        ("latents", "train", train_on),
        ("run", "resume", resume),
        ("run", "inspect", lambda damaged: inspect(damaged / "checkpoints" / "step-000000002")),
        ("run", "weights", lambda damaged: read_weights(find_checkpoint(str(damaged)), ema=False)),
    )
    for number in range(count):
        name, reader, read = readers[number % len(readers)]
        draw = random.Random(f"{seed} {number}")
        yield _try_reading(reader, root / name, root / "damaged" / name, read, draw)


def damage(folder: Path, draw: random.Random) -> tuple[str, str]:
    """Change one file of a folder; return its name and the change."""
    file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    data = bytearray(file.read_bytes())
    change = draw.choice(("bytes", "head", "tail", "truncated", "empty", "value", "value", "value"))
    if change == "value":
        try:
            content = json.loads(data)
        except (ValueError, UnicodeDecodeError):
            change = "tail"
        else:
            data = bytearray(json.dumps(_changed(content, draw)).encode())
    if change in ("bytes", "head", "tail"):
        reach = {"bytes": range(len(data)), "head": range(64), "tail": range(len(data) - 2000, len(data))}[change]
        places = [place for place in reach if 0 <= place < len(data)]
        for place in draw.choices(places, k=draw.choice((1, 1, 4))):
            data[place] = draw.choice((0, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    elif change == "truncated":
        del data[draw.randrange(len(data)) :]
    elif change == "empty":
        data.clear()
    file.write_bytes(data)
    return str(file.relative_to(folder)), change


def _changed(content: Any, draw: random.Random) -> Any:
    """Return JSON with an odd value at a random place."""
    if isinstance(content, dict) and content and draw.random() < 0.9:
        key = draw.choice(sorted(content))
        if draw.random() < 0.2:
            return {name: value for name, value in content.items() if name != key}
        return {**content, key: _changed(content[key], draw)}
    if isinstance(content, list) and content and draw.random() < 0.9:
        at = draw.randrange(len(content))
        return [*content[:at], _changed(content[at], draw), *content[at + 1 :]]
    return draw.choice(_ODD)


def _try_reading(
    reader: str, good: Path, scratch: Path, read: Callable[[Path], object], draw: random.Random
) -> Reading:
    """Copy a folder, damage the copy, and read it in a child process."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(good, scratch)
    file, change = damage(scratch, draw)
    receiver, sender = os.pipe()
    if not (pid := os.fork()):
        _read_in_child(lambda: read(scratch), sender)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        line = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        verdict = "took too long" if -code == signal.SIGALRM else f"died of {signal.Signals(-code).name}"
    else:
        verdict = {0: "read", 1: "refused"}.get(code, "raised")
    return Reading(reader, file, change, verdict, line)


def _read_in_child(read: Callable[[], object], sender: int) -> None:
    """Read, write a line about it, and end this process."""
    code, line = 3, ""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_MOST_S)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY, mapped + _MEMORY))
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    try:
        read()
        code = 0
    except SdpError as error:
        code, line = 1, str(error)
    except BaseException:  # noqa: BLE001 (reported to the parent)
        line = traceback.format_exc()
    os.write(sender, line.encode()[:4000])
    os._exit(code)
