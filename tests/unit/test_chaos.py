"""Faults that a chaos round finds in a job's log."""

import pytest

from tests.chaos.log import faults_in


@pytest.mark.parametrize(
    ("log", "faults"),
    [
        ("process: 8 of 8 parts\nsupervisor: the job was killed by signal 9; started again in 5 s\n", []),
        ("sdp: process: Ray's raylet was lost\nsupervisor: the job ended with exit code 1; started again\n", []),
        (
            "process: 8 of 8 parts\nsupervisor: the job ended with exit code 1\n",
            ["no reason before 'supervisor: the job ended with exit code 1'"],
        ),
        ("Traceback (most recent call last):\n  File\nTraceback (most recent call last):\n", ["a traceback"]),
        ("(raylet) A worker died. Lease ID: 12\n", ["a notice of Ray's: (raylet) A worker died. Lease ID: 12"]),
    ],
)
def test_a_log_has_a_line_for_each_end_and_none_of_a_library(log: str, faults: list[str]) -> None:
    assert faults_in(log) == faults
