"""The download's report on rows that it leaves out."""

from sdp.datasets.index import Index, Version, files_table
from sdp.datasets.outcomes import Counts
from sdp.datasets.units import Extent, Unit, Work
from sdp.download.figures import DownloadFigures
from sdp.download.messages import lowered_limit, rows_to_do
from sdp.storage import SourceFile

KNOWN = SourceFile("in/a.parquet", 10, "e")
INDEX = Index((Version(0, files_table([(KNOWN.uri, 10, "e", 0, 100, 100, 0)]), Extent(0, 40)),), 20)
"""A file of 100 rows, 40 of which were requested."""


def test_a_retry_has_only_failed_rows_to_do() -> None:
    first, second = Unit(0, 0, 20), Unit(1, 20, 40)
    assert rows_to_do([Work(first), Work(second, 1)], {0: 5, 1: 3}) == 20 + 3
    assert rows_to_do([Work(first), Work(second, 1)], {}) == 20 + 20
    assert rows_to_do([], {}) == 0


def test_rows_that_a_dead_worker_had_done_are_not_counted_twice() -> None:
    figures = DownloadFigures(written=535, failed=76, requests=700)  # one unit twice: its first worker died
    figures.count_parts([Counts(262, 0, 38, {"timeout": 38}), Counts(262, 0, 38, {"timeout": 38})])
    assert (figures.done, figures.written, figures.reasons) == (600, 524, {"timeout": 76})
    assert figures.requests == 700, "made, whoever died"


def test_a_lowered_limit_is_spoken_of() -> None:
    assert list(lowered_limit(39, INDEX)) == [
        "limit: 39 is less than the 40 rows that already have addresses; a limit can be raised, not lowered, so all of "
        "them stay"
    ]
    assert [*lowered_limit(40, INDEX), *lowered_limit(None, INDEX)] == []
