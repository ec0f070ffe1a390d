"""Names of a dataset's addresses in its source: an image file, or the URL in a row of Parquet."""

from collections.abc import Callable, Iterator
from functools import cache, lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sdp.datasets import tombstones
from sdp.datasets.columns import iter_batches, open_parquet, plain, read_footer, readable, row_stops
from sdp.datasets.output import Output, read_output
from sdp.errors import SdpError, UserError
from sdp.storage import Storage

Namer = Callable[[NDArray[np.int64]], list[str]]
"""Returns the names of sorted addresses that are near each other."""
_PARQUET = (".parquet", ".pq")


def names_of(storage: Storage) -> Namer:
    """Return a function that names a dataset's addresses; "" where the source has no URL, or is gone."""
    try:
        root = _root(storage)
    except SdpError:
        return lambda rows: [""] * len(rows)
    column, options = str(root.head.identity.get("source.url_column", "url")), storage.options

    @lru_cache(maxsize=1)  # units follow one another in a file
    def urls(path: str, number: int) -> pa.ChunkedArray:
        file = open_parquet(path, options, [column], read_footer(path, options), [number])
        return plain(pa.Table.from_batches(iter_batches(file, [column], [number])))[column]

    @lru_cache(maxsize=1)
    def stops_in(path: str) -> NDArray[np.int64]:
        """Return where the row groups of a file end; nothing if it has no URLs."""
        footer = read_footer(path, options)
        return row_stops(footer) if column in footer.schema.to_arrow_schema().names else np.zeros(0, np.int64)

    def in_parquet(path: str, places: NDArray[np.int64]) -> Iterator[str]:
        """Yield the URLs at some places of a file, if it has any."""
        stops = stops_in(path)
        groups = np.searchsorted(stops, places, side="right")
        for number in np.unique(groups[groups < len(stops)]).tolist():
            within = places[groups == number] - (stops[number - 1] if number else 0)
            yield from map(str, readable(urls(path, number).take(pa.array(within))).to_pylist())

    def in_file(path: str, places: NDArray[np.int64]) -> list[str]:
        """Return the names at some places of a file; nothing if it has none or cannot be read."""
        if path.endswith(".tar"):
            return []
        if not path.endswith(_PARQUET):
            return [path] * len(places)
        try:
            return list(in_parquet(path, places))
        except (SdpError, pa.ArrowException, OSError):
            return []

    def names(rows: NDArray[np.int64]) -> list[str]:
        named: list[str] = []
        if not len(rows):
            return named
        for piece in root.index.slices(int(rows[0]), int(rows[-1]) + 1):
            inside = rows[(rows >= piece.first_row) & (rows < piece.first_row + piece.length)]
            places = inside - piece.first_row + piece.offset
            named += in_file(piece.path, places) or [""] * len(places)
        return named

    return names


def finder(storage: Storage) -> Callable[[str], list[int]]:
    """Return a function that finds an image file by its name or the end of its path; it raises UserError if it cannot.

    It returns all addresses that the file has had, the present one last.
    """

    @cache
    def paths_by_name() -> dict[str, dict[str, list[int]]]:
        """Return the paths that end in each file name, with the addresses of each path."""
        root, known = _root(storage), dict[str, dict[str, list[int]]]()
        columns = (root.index.files[column].to_pylist() for column in ("path", "first_row"))
        for path, row in zip(*columns, strict=True):
            if path.endswith((*_PARQUET, ".tar")):
                option = "--url" if root.head.kind == "images" else "--row"
                raise UserError(
                    f"{storage.uri}: its rows are of tables, not of image files; use {option} in place of a name"
                )
            known.setdefault(path.rpartition("/")[2], {}).setdefault(path, []).append(row)
        return known

    def rows_of(name: str) -> list[int]:
        wanted = f"/{name.removeprefix('./').lstrip('/')}"
        same = paths_by_name().get(wanted.rpartition("/")[2], {})
        matches = [rows for path, rows in same.items() if f"/{path}".endswith(wanted)]
        if len(matches) != 1:
            several = f"{len(matches)} pictures are named {name}; give more of the path"
            raise UserError(f"{storage.uri}: {several if matches else f'no picture is named {name}; give whole names'}")
        return matches[0]

    return rows_of


def _root(storage: Storage) -> Output:
    """Return the oldest dataset of a lineage, which was made from plain files; refuse a lineage that has lost it."""
    *_, oldest = tombstones.lineage(storage)
    output = read_output(oldest)
    if output.head.derived:
        raise UserError(f"{oldest.uri}: the dataset that it was made from is gone, and with it the names of its rows")
    return output
