"""The download's report on rows that it leaves out."""

from collections import Counter

from sdp.datasets.index import Index, Version, files_table
from sdp.datasets.outcomes import Counts
from sdp.datasets.units import Extent
from sdp.download.figures import DownloadFigures
from sdp.download.messages import lowered_limit
from sdp.storage import SourceFile

KNOWN = SourceFile("in/a.parquet", 10, "e")
INDEX = Index((Version(0, files_table([(KNOWN.uri, 10, "e", 0, 100, 100, 0)]), Extent(0, 40)),), 20)
"""A file of 100 rows, 40 of which were requested."""


def test_rows_that_a_dead_worker_had_done_are_not_counted_twice() -> None:
    figures = DownloadFigures(
        Counter({("written", ""): 535, ("failed", "timeout"): 76}), requests=700
    )  # one unit twice
    figures.count_parts([Counts(262, 1, 38, {"timeout": 38, "score:clip": 1}), Counts(262, 0, 38, {"timeout": 38})])
    assert figures.outcomes == {("written", ""): 524, ("failed", "timeout"): 76, ("filtered", "score:clip"): 1}
    assert figures.requests == 700, "made, whoever died"


def test_a_lowered_limit_is_spoken_of() -> None:
    assert list(lowered_limit(39, INDEX)) == [
        "limit: 39 is less than the 40 rows that already have addresses; a limit can be raised, not lowered, so all of "
        "them stay"
    ]
    assert [*lowered_limit(40, INDEX), *lowered_limit(None, INDEX)] == []
