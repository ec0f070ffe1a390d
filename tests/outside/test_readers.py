"""Others' readers count and sum what the account says, despite retries, repeats, takedowns and mixed types."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.config.download import DownloadSource, FiltersConfig
from sdp.datasets.inspect import write_account
from sdp.datasets.manifest import finish
from sdp.datasets.outcomes import FAILED, WRITTEN, Outcome, account_table
from sdp.datasets.output import Head, Output, open_output
from sdp.datasets.parts import write_part
from sdp.datasets.source import freeze_source, order_retry
from sdp.datasets.tombstones import Takedown, add
from sdp.datasets.units import Unit, Work
from sdp.download.image import Checked
from sdp.download.plan import Rules
from sdp.download.repeats import find_content
from sdp.download.spans import read_span, spans
from sdp.download.unit import UnitRun
from sdp.encode.table import LAYOUT, RowShape, rows_of
from sdp.storage import list_source, open_storage
from tests.programs import ROOT, printed
from tests.unit.test_encode_table import encoded_of

pytestmark = pytest.mark.needs("readers")
PAGE = ROOT / "docs" / "datasets.md"
ROWS = 30
SIMILARITY = [*range(10), *(row / 8 for row in range(10, 20)), *[None] * 10]
LOST, RESCUED, REPEATED, TAKEN = {10}, {3, 17, 24}, {20, 21}, {5, 12}
"""Rows that no attempt writes, that the second one writes, that have the content of row 4, and that are taken down."""
USED = set(range(ROWS)) - LOST - REPEATED - TAKEN
TRUTH = [len(USED), sum(SIMILARITY[row] or 0 for row in USED)]
READERS = {
    "polars": """
import polars as pl
account = pl.read_parquet("account.parquet").filter(pl.col("outcome") == "written")
usable = pl.read_parquet("images/**/*.parquet").join(account, on="row")
print([usable.height, usable["similarity"].sum()])
""",
    "pyarrow": """
import pyarrow.dataset as ds
account = ds.dataset("account.parquet").to_table(filter=ds.field("outcome") == "written")
usable = ds.dataset("images/parts").to_table(filter=ds.field("row").isin(account["row"].combine_chunks()))
print([usable.num_rows, sum(filter(None, usable["similarity"].to_pylist()))])
""",
    "DuckDB, all folders": """
import duckdb
query = "FROM 'images/**/*.parquet' JOIN 'account.parquet' USING (row) WHERE outcome = 'written'"
print([*duckdb.sql(f"SELECT count(*), sum(similarity) {query}").fetchall()[0]])
""",
}


def write_pending(output: Output, rules: Rules, lost: set[int]) -> None:
    """Write the pending parts as if all images came, except those of some rows."""
    for span in spans(output.index, output.pending(), 1):
        for task in read_span(span, rules.columns(), output.storage):
            unit = UnitRun(task, rules)
            for wanted in unit.to_fetch:
                content = hashlib.sha256(bytes([4 if wanted.row in REPEATED else wanted.row])).hexdigest()
                stored = Checked(WRITTEN, None, None, b"image", 1, 1, 1, 1, content)
                failed = Outcome(wanted.row, FAILED, "http_status", "404")
                unit.settle(*((failed,) if wanted.row in lost else (Outcome(wanted.row, WRITTEN), stored)))
            unit.write(output.storage)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three files with whole numbers, fractions and nulls in a column, and its account."""
    root = tmp_path_factory.mktemp("outside")
    (root / "source").mkdir()
    for number, kind in enumerate((pa.int64(), pa.float64(), pa.null())):
        rows = range(10 * number, 10 * number + 10)
        column = pa.array([SIMILARITY[row] for row in rows], kind)
        urls = [f"http://a.example/{row}" for row in rows]
        table = pa.table({"url": urls, "caption": [f"picture {row}" for row in rows], "similarity": column})
        pq.write_table(table, root / f"source/{number}.parquet")
    rules = Rules(DownloadSource(uri="source", columns=("similarity",)), FiltersConfig())
    files, storage = list_source(str(root / "source")), open_storage(str(root / "images"))
    output = open_output(storage, Head("images", 7, False, {}))
    output = freeze_source(output, files, rules.columns(), carried=["similarity"])
    complete = partial(finish, find_repeated=partial(find_content, storage, {}, lambda: None))
    write_pending(output, rules, LOST | RESCUED)
    output = order_retry(output, complete(output))
    write_pending(output, rules, LOST)
    complete(output)
    add(storage, [Takedown("url", "http://a.example/5"), Takedown("row", "12")])
    write_account(storage, root / "account.parquet")
    return root


def run(tool: Callable[[str], Path], folder: Path, code: str) -> str:
    """Run code with the readers' Python in a folder; return its last line."""
    env = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [tool("readers"), "-c", code]
    return printed(command, cwd=folder, env=env).splitlines()[-1]


def example(names: str) -> str:
    """Return the page's example that imports a package."""
    return next(code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if names in code)


def test_the_account_names_each_row_that_no_reader_may_use(folder: Path) -> None:
    outcomes: dict[str, set[int]] = {}
    for entry in pq.read_table(folder / "account.parquet").to_pylist():
        outcomes.setdefault(entry["outcome"], set()).add(entry["row"])
    assert outcomes == {"written": USED, "failed": LOST, "repeated": REPEATED, "taken_down": TAKEN}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_counts_and_sums_what_the_account_says(tool: Callable[[str], Path], folder: Path, reader: str) -> None:
    assert json.loads(run(tool, folder, READERS[reader])) == TRUTH


@pytest.mark.parametrize(
    ("package", "figures"),
    [
        ("import duckdb", 'print([*usable.aggregate("count(*), sum(similarity)").fetchall()[0]])'),
        ("import load_dataset", 'print([len(usable), sum(filter(None, usable["similarity"]))])'),
    ],
)
def test_the_pages_examples_count_and_sum_what_the_account_says(
    tool: Callable[[str], Path], folder: Path, package: str, figures: str
) -> None:
    assert json.loads(run(tool, folder, f"{example(package)}\n{figures}")) == TRUTH


def test_the_pages_example_reads_latents_and_token_ids_as_they_were_written(
    tool: Callable[[str], Path], tmp_path: Path
) -> None:
    encoded = encoded_of([0, 5])
    encoded.chunk.tokens[:, -3:] = 0  # as Stable Diffusion 2 pads a caption
    rows = rows_of(encoded, RowShape((64, 128)))
    account = account_table([Outcome(0, WRITTEN), Outcome(5, WRITTEN)])
    write_part(open_storage(str(tmp_path / "latents")), "latents", Work(Unit(0, 0, 6)), rows, account, layout=LAYOUT)
    check = "print([latents.shape, float(latents.min()), float(latents.max()), token_ids.tolist()])"
    shape, low, high, token_ids = json.loads(
        run(tool, tmp_path, f"{example('latents_64')}\n{check}").replace("(", "[").replace(")", "]")
    )
    assert shape == [4, 8, 8]
    assert low == high == pytest.approx(5 / 0.18215, rel=1e-3)
    assert token_ids == [*range(5, 79), 0, 0, 0]
