"""`python -m sdp.supervisor JOB …`: run `sdp JOB …`, and restart it after a failure; the entrypoint of a RayJob.

A driver may fail for reasons outside the job: a lost node, a library's bug, unavailable storage. The job resumes from
storage, so it is restarted, within limits. Exit codes 0 (done) and 2 (the user must fix something) end the supervisor.

With `--wait-for-input` before JOB, the job starts when the dataset that it reads is complete.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from sdp.backoff import backoff
from sdp.console import SUBMITTED_ENV, Progress, configure, duration, say
from sdp.errors import RESTARTED, SdpError, Unavailable, UserError
from sdp.kube.leave import LEAVING
from sdp.kube.mounted import wait_for_configuration
from sdp.kube.rayjob import JOBS_FOLDER, LOGS_FOLDER, config_in
from sdp.ray import internals

TRIES = 5
"""Number of consecutive failures after which the supervisor gives up."""
STEADY_S = 1800.0
"""Running time after which a failure no longer counts as consecutive."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
POLL_S = 30.0
"""Interval of checks for complete input."""
WAIT_FLAG = "--wait-for-input"
STAY_S = 1800.0
"""Longest wait for the end of a pod that is being removed."""
LOG_BYTES = 1_000_000
"""The part of each log that is saved, its end."""
SAVE_S = 10.0
"""Deadline of one write of a log; the head's pod may be going away."""


def supervise(command: Sequence[str], after: Callable[[], None] = lambda: None) -> int:
    """Run a command until it succeeds, needs the user, or fails too often; return its last exit code.

    `after` is called at the end of each run.
    """
    child: subprocess.Popen[bytes] | None = None
    stopping, leaving = threading.Event(), threading.Event()

    def forward(number: int, _: FrameType | None) -> None:
        stopping.set()
        if number == LEAVING:
            leaving.set()
            number = signal.SIGTERM
        if child is not None and child.poll() is None:
            child.send_signal(number)

    def stay_if_leaving() -> None:
        if leaving.is_set():
            say(
                "supervisor: the head's pod is going away; the job has stopped and will be resubmitted on the next head"
            )
            time.sleep(STAY_S)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT, LEAVING)}
    try:
        failures = 0
        while True:
            start = time.monotonic()
            child = subprocess.Popen(command, env={**os.environ, RESTARTED: "1"} if failures else None)
            if stopping.is_set():  # the signal came before there was a child
                child.send_signal(signal.SIGTERM)
            code = child.wait()
            after()
            stay_if_leaving()
            if code in (0, UserError.exit_code) or stopping.is_set():
                return code if code >= 0 else 128 - code
            failures = 1 if time.monotonic() - start > STEADY_S else failures + 1
            end = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
            if failures >= TRIES:
                say(f"supervisor: the job {end}, {failures} times in a row; giving up: fix the cause and resubmit it")
                return code if code > 0 else 128 - code
            pause = backoff(failures - 1, FIRST_PAUSE_S, LONGEST_PAUSE_S)
            say(f"supervisor: the job {end}; restarting in {pause:.3g} s ({failures} of {TRIES - 1})")
            if stopping.wait(pause):
                stay_if_leaving()
                return 128 + signal.SIGTERM
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait_for_input(words: Sequence[str]) -> None:
    """Wait until the dataset that a job reads is complete."""
    from sdp.datasets.manifest import MANIFEST
    from sdp.storage import open_storage

    settings = config_in(words)
    source = open_storage(settings.source.uri, settings.storage.options())
    began = time.monotonic()
    with Progress(f"{words[0]} is waiting", every_s=30) as progress:
        while True:
            try:
                if source.exists(MANIFEST):
                    return
                progress.update(f"for {source.uri} to be complete · {duration(time.monotonic() - began)}")
            except Unavailable as error:
                progress.update(f"for {source.uri}: {error}")
            time.sleep(POLL_S)


def save_logs(words: Sequence[str], log: Path, since: float) -> None:
    """Save the ends of a driver's log, and of workers' that have crashed since, so that they outlive the cluster.

    Does nothing if Ray has not given the driver a log.
    """
    from sdp.storage import open_storage

    submission = log.stem.removeprefix("job-driver-")
    if submission == log.stem or not log.is_file():
        return
    try:
        settings = config_in(words)
        output = open_storage(settings.output.uri, settings.storage.options()).with_options(timeout_s=SAVE_S)
        folder = output.child(f"{LOGS_FOLDER}/{submission}")
        folder.publish("driver.log", log.read_bytes()[-LOG_BYTES:])
        for name, text in internals.crashed_workers(since):
            folder.publish(f"{name}.log", text[-LOG_BYTES:])
            say(f"supervisor: a worker crashed; its log is in {folder.uri_of(f'{name}.log')}")
    except SdpError as error:
        say(f"supervisor: the log was not saved: {error}")


def main(arguments: Sequence[str]) -> int:
    """Supervise the job of a command line."""
    configure()
    waits = list(arguments[:1]) == [WAIT_FLAG]
    words = arguments[waits:]
    if (file := Path("".join(words[2:3]))).parent == Path(JOBS_FOLDER):  # as manifests/ have it: JOB --config FILE
        submitted = os.environ.get(SUBMITTED_ENV) or shlex.join(["sdp", "submit", file.stem, *words[3:]])
        os.environ[SUBMITTED_ENV] = submitted
    try:
        wait_for_configuration(words)
        if waits:
            wait_for_input(words)
    except SdpError as error:
        say(f"supervisor: {error}")
        return error.exit_code
    save = partial(save_logs, words, Path("/proc/self/fd/1").resolve(), time.time())
    return supervise([sys.executable, "-m", "sdp", *words], save)


if __name__ == "__main__":
    signal.signal(LEAVING, signal.SIG_IGN)  # a job that still waits is submitted again on the next head
    sys.exit(main(sys.argv[1:]))
