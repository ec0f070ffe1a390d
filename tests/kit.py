"""Small datasets for tests, built by the same calls as the stages use."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.datasets.manifest import Dataset, finish, open_dataset
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome, account_table
from sdp.datasets.output import Head, Output, open_output
from sdp.datasets.parts import Layout, PartInfo, iter_rows, read_account, read_rows, write_part
from sdp.datasets.source import freeze_source, freeze_upstream
from sdp.datasets.units import Work
from sdp.errors import SdpError
from sdp.report.page import text_of
from sdp.report.sections import describe
from sdp.storage import Storage, list_source, open_storage

LAYOUT = Layout(row_group_rows=8)
T = TypeVar("T")


def not_none(value: T | None) -> T:
    """Return a value, which must be there."""
    assert value is not None
    return value


def text_at(uri: Path | str) -> str:
    """Return the text of `sdp inspect`."""
    return "\n\n".join(map(text_of, describe(open_storage(str(uri)))))


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files by their paths below a folder, and return the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_source(folder: Path, files: Iterable[tuple[str, int]], first: int = 0) -> None:
    """Metadata files of (name, rows); row n has the URL http://host/n."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files:
        numbers = range(first, first + rows)
        first += rows
        table = pa.table({"URL": [f"http://host/{n}" for n in numbers], "TEXT": [f"caption {n}" for n in numbers]})
        pq.write_table(table, folder / name)


def default_outcome(row: int) -> Outcome:
    """Every 7th row fails, every 11th is filtered, the others are written."""
    if row % 7 == 3:
        return Outcome(row, FAILED, "http_status", "404")
    if row % 11 == 5:
        return Outcome(row, FILTERED, "min_size")
    return Outcome(row, WRITTEN)


def image_rows(rows: Iterable[int]) -> pa.Table:
    kept = list(rows)
    return pa.table(
        {
            "row": pa.array(kept, pa.int64()),
            "url": [f"http://host/{n}" for n in kept],
            "image": pa.array([f"image {n}".encode() for n in kept], pa.binary()),
            "sha256": [f"{n:064x}" for n in kept],
        }
    )


def write_images_part(storage: Storage, work: Work, fate: Callable[[int], Outcome] = default_outcome) -> PartInfo:
    outcomes = [fate(row) for row in range(work.unit.start, work.unit.stop)]
    rows = image_rows(o.row for o in outcomes if o.outcome == WRITTEN)
    return write_part(storage, "images", work, rows, account_table(outcomes), layout=LAYOUT)


def begin_images(
    root: Path,
    *,
    files: Iterable[tuple[str, int]] = (("a.parquet", 25), ("b.parquet", 17)),
    unit_rows: int = 10,
    limit: int | None = None,
) -> Output:
    """A source, and an output over it that has no parts yet."""
    if not (root / "source").exists():
        write_source(root / "source", files)
    output = open_output(open_storage(str(root / "images")), Head("images", unit_rows, False, {"image.size": 256}))
    source = str(root / "source")
    return freeze_source(output, list_source(source), ["URL", "TEXT"], uri=source, limit=limit)


def make_images(root: Path, **kwargs: object) -> Dataset:
    """A complete images dataset."""
    output = begin_images(root, **kwargs)  # type: ignore[arg-type]
    for work in output.pending():
        write_images_part(output.storage, work)
    return finish(output, input={"uri": str(root / "source")})


def begin_latents(root: Path, *, unit_rows: int = 20, limit: int | None = None) -> Output:
    upstream = open_dataset(open_storage(str(root / "images")), "images")
    output = open_output(open_storage(str(root / "latents")), Head("latents", unit_rows, True, {"resolutions": [64]}))
    return freeze_upstream(output, upstream, limit=limit)


def write_latents_part(root: Path, output: Output, work: Work) -> PartInfo:
    """Encode what upstream's parts hold of the unit."""
    images = open_storage(str(root / "images"))
    rows: list[int] = []
    for path in output.index.parts_of(work):
        for batch in iter_rows(images, path, ["row"], 8):
            rows += [r for r in batch["row"].to_pylist() if work.unit.start <= r < work.unit.stop]
    table = pa.table({"row": pa.array(sorted(rows), pa.int64()), "latents": [b"x" * 8] * len(rows)})
    account = account_table([Outcome(row, WRITTEN) for row in rows])
    return write_part(output.storage, "latents", work, table, account, layout=LAYOUT)


def make_latents(root: Path, *, unit_rows: int = 20, limit: int | None = None) -> Dataset:
    output = begin_latents(root, unit_rows=unit_rows, limit=limit)
    for work in output.pending():
        write_latents_part(root, output, work)
    upstream = open_dataset(open_storage(str(root / "images")))
    return finish(output, input=upstream.lineage)


def rows_of(dataset: Dataset) -> pa.Table:
    """The rows of all parts, by address."""
    tables = [read_rows(dataset.storage, path) for path in dataset.parts["path"].to_pylist()]
    return pa.concat_tables(tables).sort_by("row")


def account_of(dataset: Dataset) -> pa.Table:
    """The accounts of all parts."""
    return pa.concat_tables([read_account(dataset.storage, path) for path in dataset.parts["path"].to_pylist()])


def accounted(dataset: Dataset) -> list[int]:
    """Every address that some part's account names, as often as it is named."""
    rows: list[int] = account_of(dataset)["row"].to_pylist()
    return rows


def reasons_of(dataset: Dataset) -> dict[int, str]:
    """The reasons of the rows that were not written."""
    return {line["row"]: line["reason"] for line in account_of(dataset).to_pylist() if line["reason"]}


def raising(error: Exception) -> Callable[..., object]:
    """Return a function that raises an error, whatever its arguments."""

    def instead(*_: object, **__: object) -> object:
        raise error

    return instead


def line_of(refused: Callable[[], object], kind: type[SdpError] = SdpError) -> str:
    """Return the one line of a refusal, which ends with exit code 2."""
    with pytest.raises(kind) as error:
        refused()
    line = str(error.value)
    assert (error.value.exit_code, line.count("\n")) == (2, 0)
    return line
