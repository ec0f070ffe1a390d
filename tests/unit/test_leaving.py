"""The end of a process that does not wait for the rest of its code."""

import subprocess
import sys

import pytest

from tests.programs import processes_with
from tests.waiting import until


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_that_a_process_has_started_is_killed_with_it() -> None:
    code = """
import os, subprocess, sys
from sdp.leaving import kill_descendants

stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}, {sys.argv[1]!r}])"
child = subprocess.Popen([sys.executable, "-c", parent, sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print("at work", flush=True)
sys.stdin.readline()
kill_descendants()
os._exit(7)
"""
    mark = "mark-of-the-descendants"
    command = [sys.executable, "-c", code, mark]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        assert len(processes_with(mark)) == 3
        process.communicate("go\n", timeout=60)
    assert process.returncode == 7
    until(lambda: not processes_with(mark), "all have ended", 10)
