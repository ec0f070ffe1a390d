"""`python -m sdp.supervisor JOB …`: run `sdp JOB …`, and again when it breaks down; what a RayJob's entrypoint is.

A driver may die of much that is no fault of the job's: its node, a bug of a library, a store that was away. The job
continues from storage, so the cure is to run it again, within bounds. Exit code 2 is something that a person has to
mend: it ends the matter at once, as 0 does.

With `--wait-for-input` before JOB, the job starts when the dataset that it reads is complete.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from sdp.backoff import backoff
from sdp.console import Progress, configure, say
from sdp.errors import SdpError, Unavailable, UserError
from sdp.kube.leave import LEAVING
from sdp.kube.rayjob import unpacked

TRIES = 5
"""How often in a row a job may break down soon after it was started."""
STEADY_S = 1800.0
"""After so long a breakdown counts as the first again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
LOOK_S = 30.0
"""How often to look whether the input is complete."""
WAIT_FLAG = "--wait-for-input"
STAY_S = 1800.0
"""How long it stays where its pod goes, at the most: the pod's end ends it."""


def supervise(
    command: Sequence[str],
    *,
    tries: int = TRIES,
    steady_s: float = STEADY_S,
    first_pause_s: float = FIRST_PAUSE_S,
) -> int:
    """Run a command until it succeeds, cannot, or has broken down too often; returns its last exit code."""
    child: subprocess.Popen[bytes] | None = None
    told, leaving = threading.Event(), threading.Event()

    def hand_on(number: int, _: FrameType | None) -> None:
        told.set()
        if number == LEAVING:
            leaving.set()
            number = signal.SIGTERM
        if child is not None and child.poll() is None:
            child.send_signal(number)

    def stay_if_leaving() -> None:
        if leaving.is_set():
            say("supervisor: the head's pod goes; the job has stopped, and is submitted again on the next head")
            threading.Event().wait(STAY_S)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT, LEAVING)}
    try:
        breakdowns = 0
        while True:
            began = time.monotonic()
            child = subprocess.Popen(command)
            if told.is_set():  # while there was no child to hand it on to
                child.send_signal(signal.SIGTERM)
            code = child.wait()
            stay_if_leaving()
            if code in (0, UserError.exit_code) or told.is_set():
                return code if code >= 0 else 128 - code
            breakdowns = 1 if time.monotonic() - began > steady_s else breakdowns + 1
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            if breakdowns >= tries:
                say(f"supervisor: the job {how}, {breakdowns} times in a row: given up; mend it and submit it again")
                return code if code > 0 else 128 - code
            pause = backoff(breakdowns - 1, first_pause_s, LONGEST_PAUSE_S)
            say(f"supervisor: the job {how}; started again in {pause:.3g} s ({breakdowns} of {tries - 1})")
            if told.wait(pause):
                stay_if_leaving()
                return 128 + signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_input(job: str, config: str, overrides: Sequence[str] = ()) -> None:
    """Return when the dataset that a job reads is complete."""
    from sdp.config import load
    from sdp.datasets.manifest import MANIFEST
    from sdp.storage import open_storage

    settings: Any = load(job, config, overrides)
    source = open_storage(settings.source.uri, settings.storage.options())
    with Progress(f"{job} waits", every_s=300) as progress:
        while True:
            try:
                if source.exists(MANIFEST):
                    return
                progress.update(f"for {source.uri} to be complete")
            except Unavailable as error:
                progress.update(f"for {source.uri}: {error}")
            threading.Event().wait(LOOK_S)


def main(arguments: Sequence[str]) -> int:
    """Supervise the job of this command line; a configuration that came along with it is laid into a file first."""
    configure()
    with tempfile.TemporaryDirectory(prefix="sdp-job-") as folder:
        try:
            waits = list(arguments[:1]) == [WAIT_FLAG]
            words = unpacked(arguments[waits:], os.environ, folder)
            if waits:
                overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
                wait_for_input(words[0], words[words.index("--config") + 1], overrides)
        except SdpError as error:
            say(f"supervisor: {error}")
            return error.exit_code
        return supervise([sys.executable, "-m", "sdp", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
