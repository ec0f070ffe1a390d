"""Stop a job at each of its writes, let another job finish the work, and see that the first one changes nothing then.

    make chaos ARGS="--stopped download process train"
    .venv/bin/python -m tests.chaos --stopped download --writes 17 _manifest.json

A proxy holds the n-th write and stops every process of the job. A second job takes the lease over once its short time
to live has passed, does more than the first one was to do, and ends. Then the first one goes on, and the held write
reaches the store, whether or not the job still waits for it.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from uuid import uuid4

from sdp.console import say, table
from tests.chaos.__main__ import MARK, Chaos, chaos_in, end_all, left_behind, processes
from tests.chaos.log import faults_in
from tests.chaos.stages import IMAGES, STEPS, Stage
from tests.s3_faults import BadDay
from tests.storage_server import Answer, Request
from tests.waiting import until

LESS = {"download": {"limit": IMAGES // 2}, "process": {"limit": IMAGES // 2}, "train": {"max_steps": STEPS // 2}}
"""Settings with which the first job does less than the second, by stage."""
ENDS_S = 240.0
_JOB = """
import sys
from sdp.cli import main
from sdp.lease import Lease, monotonic
Lease.acquire.__func__.__defaults__ = ("sdp", 5.0, monotonic)
sys.exit(main())
"""


class Holding(BadDay):
    """A proxy that holds one write of a job, by its number or by a text in its name, and stops the job.

    Heartbeats do not count, since they come by the clock.
    """

    def __init__(self, chaos: Chaos, write: str, mark: str) -> None:
        super().__init__(chaos.gateway, chaos.folder)
        self._writes, self._write, self._mark = count(1), write, mark
        self.held, self.pass_on, self.at = threading.Event(), threading.Event(), ""

    def _answer(self, request: Request) -> Answer:
        beats = "/_lease/" in request.path and "if-none-match" not in request.headers
        name = request.path.partition("/rounds/")[2].partition("/")[2]
        if request.method in ("PUT", "POST", "DELETE") and not beats and self._is_due(name):
            self.at = f"{request.method} {name}"
            _signal(self._mark, signal.SIGSTOP)
            self.held.set()
            self.pass_on.wait()
        return super()._answer(request)

    def _is_due(self, name: str) -> bool:
        number = str(next(self._writes))
        return not self.held.is_set() and (number == self._write if self._write.isdigit() else self._write in name)


def _signal(mark: str, number: signal.Signals) -> None:
    """Signal every process with a mark, and those that they begin meanwhile."""
    reached: set[int] = set()
    while new := {pid for pid, _ in processes(mark)} - reached:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        reached |= new


def _start(stage: Stage, chaos: Chaos, output: str, log: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    file = stage.write(chaos.folder, output)
    with log.open("ab") as sink:
        command = [sys.executable, "-c", _JOB, stage.job, "--config", str(file)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, **env})


def stopped_at(chaos: Chaos, stage: Stage, write: str) -> tuple[str, str] | None:
    """Run one round; return the write and the verdict, or None if the job has fewer writes."""
    name = f"stopped-{stage.name}-{write.replace('/', '-')}"
    output, log, mark = f"{chaos.uri}/rounds/{name}", chaos.folder / f"{name}.log", f"{name}-{uuid4().hex[:8]}"
    log.unlink(missing_ok=True)
    chaos.forget(f"rounds/{name}")
    proxy = Holding(chaos, write, mark)
    fewer = replace(stage, config={**stage.config, **LESS[stage.name]})
    try:
        # Its credentials come from the proxy.
        own = {**proxy.env, MARK: mark, "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
        first = _start(fewer, chaos, output, log, own)
        until(lambda: proxy.held.is_set() or first.poll() is not None, "the write", ENDS_S)
        if not proxy.held.is_set():
            return None if first.returncode == 0 else (proxy.at, f"ended with {first.returncode} before it")
        second = _start(stage, chaos, output, log, {MARK: f"second-{mark}"})
        code = second.wait(ENDS_S)
        proxy.pass_on.set()
        _signal(mark, signal.SIGCONT)
        first.wait(ENDS_S)
        left = left_behind(mark) | left_behind(f"second-{mark}")
        verdict = chaos.judge(stage, output, names_too=False) if code == 0 else f"the second job ended with {code}"
    finally:
        proxy.pass_on.set()
        end_all(mark)
        end_all(f"second-{mark}")
        proxy.close()
    faults = [*faults_in(log.read_text(errors="replace")), *([f"left behind: {left}"] if left else [])]
    verdict = "; ".join([verdict, *faults])
    if verdict == "same":
        chaos.forget(f"rounds/{name}")
    return proxy.at, f"{verdict} (the first job ended with {first.returncode})"


def main(folder: Path, names: Sequence[str], writes: Sequence[str]) -> int:
    """Run the rounds of some stages, all or those of some writes; return the exit status."""
    failed: list[tuple[str, str, str]] = []
    with chaos_in(folder) as chaos:
        chaos.prepare(names)
        for name in names:
            for write in writes or map(str, count(1)):
                if (result := stopped_at(chaos, chaos.stages[name], write)) is None:
                    break
                say(f"{name}, write {write}: {': '.join(result)}")
                if not result[1].startswith("same ("):
                    failed.append((f"{name} {write}", *result))
    say("\n" + (table(failed, ("round", "write", "verdict")) if failed else "no job changed what another one had done"))
    return 1 if failed else 0
