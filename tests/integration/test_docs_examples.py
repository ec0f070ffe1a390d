"""The documentation's examples, extracted and run unchanged."""

import csv
import os
import re
import resource
import sys
from pathlib import Path

import pytest

from scripts.demo.shapes import sample
from tests.misbehaving.server import ImageServer
from tests.programs import ROOT, ended

DOCS = ROOT / "docs"
_BLOCK = re.compile(r"<!-- tested: (\d+) s -->\n+```console\n(.*?)```", re.DOTALL)


def examples(page: str) -> list[tuple[int, str]]:
    """The marked blocks of a page: the seconds that they are to take on a laptop, and their commands."""
    blocks = _BLOCK.findall((DOCS / page).read_text())
    return [(int(s), "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", text, re.MULTILINE))) for s, text in blocks]


def run(commands: str, folder: Path, seconds: int, **variables: str) -> str:
    """Run commands one after another; what they print. They may take the processor time of two cores for so long."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    before = spent()
    done = ended(["bash", "-ec", commands], cwd=folder, env=environment, timeout=10 * seconds)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    assert spent() - before < 2 * seconds
    return done.stdout + done.stderr


def spent() -> float:
    """CPU seconds of the children that have ended, and of the forks of tests/warm in place of such."""
    seconds = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    if pid := os.environ.get("SDP_TESTS_WARM_PID"):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds += sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.mark.slow
def test_the_quick_start_ends_with_a_model_that_has_learned(folder: Path) -> None:
    seconds, commands = examples("quickstart.md")[0]
    output = run(commands, folder, seconds, SDP_TESTS_WARM_PROGRAMS="1")
    losses = [float(loss) for loss in re.findall(r"^train: step .* loss (\d\.\d+)", output, re.MULTILINE)]
    assert losses[-1] < 0.8 * losses[0]
    assert {"report.html", "model", "run", "pictures-300"} <= {each.name for each in (folder / "my").iterdir()}
    # These examples go on with what it has made.
    for seconds, commands in (examples("quickstart.md")[2], *examples("train.md"), *examples("report.md")):
        run(commands, folder, seconds, SDP_TESTS_WARM_PROGRAMS="1")


def test_a_list_of_urls_is_downloaded(tmp_path: Path) -> None:
    seconds, commands = examples("quickstart.md")[1]
    with ImageServer(images=30) as server, (tmp_path / "urls.csv").open("w") as file:
        rows = [(server.image_url(n), sample(n).caption) for n in range(30)]
        csv.writer(file).writerows([("url", "caption"), *rows])
        file.flush()
        commands = commands.replace("download.yaml", "download.yaml --set fetch.allow_networks=[127.0.0.0/8]")
        output = run(commands, tmp_path, seconds)
    assert re.search(r"^written +30", output, re.MULTILINE), output
    for seconds, commands in examples("datasets.md"):
        run(commands, tmp_path / "web", seconds)


@pytest.mark.parametrize("page", ["configuration.md", "plan.md"])
def test_what_needs_no_data_runs_as_it_stands(page: str, tmp_path: Path) -> None:
    """With the train.yaml that docs/train.md shows."""
    job = re.search(r"^# train\.yaml\n.*?(?=^```)", (DOCS / "train.md").read_text(), re.MULTILINE | re.DOTALL)
    assert job
    (tmp_path / "train.yaml").write_text(job[0])
    for seconds, commands in examples(page):
        run(commands, tmp_path, seconds)


def test_every_marked_example_is_run_here() -> None:
    marked = {page.name for page in DOCS.rglob("*.md") if "<!-- tested" in page.read_text()}
    assert marked == {"quickstart.md", "train.md", "report.md", "datasets.md", "configuration.md", "plan.md"}
