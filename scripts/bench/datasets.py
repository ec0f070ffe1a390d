"""Datasets at full size: an index of 200,000 files and 2,000,000,000 rows, an output of 200,000 parts, a full ledger.

Each case runs in a separate process, so that its peak memory is its own. Prints the figures beside their goals.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scripts.bench import _cases
from scripts.bench._cases import run_case, sized

FILES, ROWS_A_FILE = sized(200_000, 500), 10_000
UNIT_ROWS = 10_000
CONSUMED = sized(1_740_800_000, 1_000_000)


def index_case(folder: Path) -> dict[str, float]:
    """Open a frozen index and find the files of ten thousand addresses."""
    import numpy as np

    from sdp.datasets import index as index_files
    from sdp.storage import open_storage

    storage = open_storage(str(folder))
    if not storage.names(index_files.FOLDER):
        from sdp.datasets.units import Extent

        files = index_files.files_table(
            (f"s3://bucket/laion/metadata/part-{i:06d}.parquet", 1_000_000, f'"{i:032x}"', i * ROWS_A_FILE,
             ROWS_A_FILE, ROWS_A_FILE, 0) for i in range(FILES)
        )  # fmt: skip
        empty = index_files.load(storage, UNIT_ROWS)
        index_files.append(storage, empty, index_files.Version(0, files, Extent(0, FILES * ROWS_A_FILE)))
        return {}
    rows = np.random.default_rng(0).integers(0, FILES * ROWS_A_FILE, 10_000).tolist()
    before, start = _peak_mb(), time.perf_counter()
    index = index_files.load(storage, UNIT_ROWS)
    offsets = [index.slices(row, row + 1)[0].offset for row in rows]
    taken = time.perf_counter() - start
    assert offsets == [row % ROWS_A_FILE for row in rows]
    return {"seconds": taken, "goal_seconds": 2.0, "peak_mb": _peak_mb(), "above_imports_mb": _peak_mb() - before,
            "goal_mb": 300}  # fmt: skip


def state_case(folder: Path) -> dict[str, float]:
    """Find the 10 missing of 200,010 parts in a listing."""
    from sdp.datasets.output import Head, Output
    from sdp.datasets.units import Extent, Units, part_name
    from sdp.storage import open_storage

    storage = open_storage(str(folder))
    parts = folder / "parts"
    if not parts.exists():
        parts.mkdir()
        for unit in range(FILES):
            (folder / part_name(unit)).touch()
        return {}
    units = Units([Extent(0, (FILES + 10) * UNIT_ROWS)], UNIT_ROWS)

    class FakeIndex:
        def works(self) -> list[object]:
            from sdp.datasets.units import Work

            return [Work(unit) for unit in units]

    start = time.perf_counter()
    storage.names("parts/")
    listing = time.perf_counter() - start
    start = time.perf_counter()
    output = Output(storage, Head("images", UNIT_ROWS, False, {}), FakeIndex())  # type: ignore[arg-type]
    pending = output.pending()
    taken = time.perf_counter() - start
    assert len(pending) == 10
    return {
        "listing_seconds": listing,
        "above_listing_seconds": taken - listing,
        "goal_seconds": 10.0,
        "peak_mb": _peak_mb(),
    }


def ledger_case(_: Path) -> dict[str, float]:
    """Merge eight workers' ledgers of a whole phase, whose units were consumed out of order."""
    import numpy as np

    from sdp.datasets.ledger import Ledger

    order = np.random.default_rng(0).permutation(-(-CONSUMED // UNIT_ROWS))
    before, start = _peak_mb(), time.perf_counter()
    workers = [Ledger() for _ in range(8)]
    for position, unit in enumerate(order.tolist()):
        workers[position % 8].add(0, np.arange(unit * UNIT_ROWS, min((unit + 1) * UNIT_ROWS, CONSUMED)))
    recorded = time.perf_counter() - start
    saved = [w.to_bytes() for w in workers]
    start = time.perf_counter()
    merged = Ledger()
    merged.merge(Ledger.from_bytes(data) for data in saved)
    taken = time.perf_counter() - start
    assert merged.consumed(0) == CONSUMED
    return {
        "merge_seconds": taken, "goal_seconds": 1.0, "above_imports_mb": _peak_mb() - before, "goal_mb": 150,
        "file_mb": len(merged.to_bytes()) / 1e6, "record_us_a_unit": 1e6 * recorded / len(order),
    }  # fmt: skip


CASES: dict[str, Callable[[Path], dict[str, float]]] = {"index": index_case, "state": state_case, "ledger": ledger_case}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Run each case, and print its figures beside their goals."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in CASES.items():
            folder = Path(scratch) / name
            folder.mkdir()
            figures: dict[str, float] = {}
            for _ in range(2):  # the first call prepares, the second is measured
                figures = run_case("scripts.bench.datasets", name, folder)
            print(f"{name:8}", (case.__doc__ or "").strip())
            print("        ", ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(_cases.main(main, CASES))
