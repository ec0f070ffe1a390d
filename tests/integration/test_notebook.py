"""The notebook of docs/, as a reader runs it."""

import json
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.programs import ROOT, printed


@pytest.mark.slow
def test_the_notebook_runs_from_pictures_to_a_pipeline_of_diffusers_in_one_process(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = [re.sub(r"(?m)^!(.*)", r"subprocess.run('\1'.split(), check=True)", cell) for cell in code]
    assert not any(cell.get("outputs") for cell in cells)
    seen = """
assert [(failure["reason"], failure["name"][-10:]) for failure in latents.failures().to_pylist()] == [
    ("not_an_image", "broken.png")
]
assert latents.table(["row"]).num_rows == 64
assert run.metrics()["step"].to_pylist() == [*range(10, 61, 10)]
assert [picture.info["caption"] for picture in pictures] == ["a red circle", "a blue circle"]
assert pictures[0].size == (64, 64)
"""
    (tmp_path / "reader.py").write_text("\n".join(["import subprocess", *code, seen]))
    with TemporaryDirectory(prefix="sdp-") as name:  # a short path, for Ray's sockets
        lost = Path(name, "ray", "ray_current_cluster")
        lost.parent.mkdir()
        lost.write_text("192.0.2.1:6379")  # that an earlier Ray of this machine has left
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_TMPDIR": name}
        env["SDP_TESTS_WARM_PROGRAMS"] = "1"
        printed([sys.executable, "-m", "reader"], cwd=tmp_path, env=env, timeout=300)
