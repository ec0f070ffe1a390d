"""Faults that a chaos round finds in a job's log."""

import sys

import pytest

from sdp import supervisor
from tests.chaos.log import faults_in


@pytest.mark.parametrize(
    ("log", "faults"),
    [
        ("process: 8 of 8 parts\nsupervisor: the job was killed by signal 9; started again in 5 s\n", []),
        ("sdp: process: Ray's raylet was lost\nsupervisor: the job failed with exit code 1; started again\n", []),
        (
            "process: 8 of 8 parts\nsupervisor: the job failed with exit code 1\n",
            ["no reason before 'supervisor: the job failed with exit code 1'"],
        ),
        ("Traceback (most recent call last):\n  File\nTraceback (most recent call last):\n", ["a traceback"]),
        ("(raylet) A worker died. Lease ID: 12\n", ["a notice of Ray's: (raylet) A worker died. Lease ID: 12"]),
    ],
)
def test_a_log_has_a_line_for_each_end_and_none_of_a_library(log: str, faults: list[str]) -> None:
    assert faults_in(log) == faults


@pytest.mark.parametrize("end", ["sys.exit(1)", "os.kill(os.getpid(), 11)"])
def test_a_job_that_ends_without_a_word_is_found_in_the_supervisors_own_lines(
    end: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "TRIES", 1)
    for said, faults in (("'sdp: Ray was lost'", 0), ("'process: 8 of 8 parts'", 1)):
        supervisor.supervise([sys.executable, "-c", f"import os, sys; print({said}, flush=True); {end}"])
        out, err = capfd.readouterr()
        assert len(faults_in(out + err)) == faults, out + err
