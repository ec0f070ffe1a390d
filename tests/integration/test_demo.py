"""`make demo` when stopped: its message and exit code, and no process left running."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import processes_with
from tests.waiting import until


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_demo_says_in_one_line_how_to_continue(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "scripts.demo", "--folder", str(folder), "--images", "400"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as demo:
        lease = folder / "images" / "_lease"
        until(lambda: list(lease.glob("*.json")), "the download is at work")
        assert len(processes_with(folder)) > 1
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
        assert demo.stderr is not None
        *_, above, line = demo.stderr.read().splitlines()
        assert demo.wait(10) == 128 + signal.SIGINT
    assert line == "sdp: demo stopped by SIGINT; run the same command to continue"
    assert "interrupted" not in above
    assert "stopped" not in above
    until(lambda: not processes_with(folder), "all that it has started has ended", 10)
    assert json.loads((folder / "server.json").read_text())["images"] == 400
