"""Helpers for tests of the download stage: metadata tables, configurations, and a run's outcomes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sdp.config import parse
from sdp.config.download import DownloadConfig
from sdp.datasets.manifest import Dataset, part_infos
from sdp.datasets.outcomes import WRITTEN
from sdp.datasets.parts import read_account, read_rows, resolve
from tests.misbehaving.server import ImageServer


def write_urls(
    folder: Path,
    urls: Sequence[str | None],
    files: int = 1,
    types: Mapping[str, pa.DataType] | None = None,
    **columns: Sequence[Any] | pa.Array,
) -> Path:
    """Write metadata files with these URLs, and captions that name the row."""
    folder.mkdir(parents=True, exist_ok=True)
    captions = [f"caption {row}" for row in range(len(urls))]
    table = pa.table({"url": pa.array(urls, pa.string()), "caption": captions, **columns})
    kinds = types or {}
    table = table.cast(pa.schema([field.with_type(kinds.get(field.name, field.type)) for field in table.schema]))
    size = -(-len(urls) // files)
    for number in range(files):
        pq.write_table(table.slice(number * size, size), folder / f"{number:05d}.parquet", row_group_size=7)
    return folder


def config_for(source: Path | str, output: Path | str, /, **sections: Mapping[str, Any]) -> DownloadConfig:
    """Return a configuration that may fetch from this machine, with short delays."""
    data: dict[str, Any] = {
        "source": {"uri": str(source)},
        "output": {"uri": str(output), "rows_per_file": 20},
        "fetch": {"allow_networks": ["127.0.0.0/8"], "timeout_s": 24.0, "connections": 32},
        "hosts": {"at_once": 64, "per_second": None},
        "workers": {"cpus": 1},
        "concurrency": 1,
        "image": {"size": 64, "crop": "center"},
        "dedup": {"content": False},  # many addresses of the server have the same picture
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values} if isinstance(values, Mapping) else values
    return parse("download", data)


def plain_urls(server: ImageServer, count: int) -> list[str]:
    return [server.image_url(index) for index in range(count)]


def outcomes(dataset: Dataset) -> dict[int, tuple[str, str | None, int]]:
    """Return each address's outcome, reason and attempts; a row that occurs twice in one account is an error."""
    units: dict[int, list[pa.Table]] = {}
    for info in sorted(part_infos(dataset.storage), key=lambda info: (info.unit.number, info.attempt)):
        units.setdefault(info.unit.number, []).append(read_account(dataset.storage, info.path))
    result: dict[int, tuple[str, str | None, int]] = {}
    for accounts in units.values():
        for entry in resolve(accounts).to_pylist():
            assert entry["row"] not in result
            result[entry["row"]] = (entry["outcome"], entry["reason"], entry["attempts"])
    return result


def written_rows(dataset: Dataset) -> dict[int, dict[str, Any]]:
    """Return the rows of all parts by address; one that occurs twice is an error."""
    result: dict[int, dict[str, Any]] = {}
    for info in part_infos(dataset.storage):
        for row in read_rows(dataset.storage, info.path).to_pylist():
            assert row["row"] not in result, f"row {row['row']} was written twice"
            result[row["row"]] = row
    return result


def check_exactly_once(dataset: Dataset, rows: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Every address has one outcome, and those that are written are there, once. Returns the written rows."""
    every = outcomes(dataset)
    assert sorted(every) == list(rows)
    written = written_rows(dataset)
    assert sorted(written) == sorted(row for row, (outcome, _, _) in every.items() if outcome == WRITTEN)
    counts = dataset.manifest.counts
    assert counts.input == len(every)
    assert counts.written == len(written)
    return written
