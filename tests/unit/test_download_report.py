"""The download's report on rows that it leaves out."""

from collections import Counter

from sdp.datasets.outcomes import Counts
from sdp.download.figures import DownloadFigures


def test_rows_that_a_dead_worker_had_done_are_not_counted_twice() -> None:
    figures = DownloadFigures(
        Counter({("written", ""): 535, ("failed", "timeout"): 76}), requests=700
    )  # one unit twice
    figures.count_parts([Counts(262, 1, 38, {"timeout": 38, "score:clip": 1}), Counts(262, 0, 38, {"timeout": 38})])
    assert figures.outcomes == {("written", ""): 524, ("failed", "timeout"): 76, ("filtered", "score:clip"): 1}
    assert figures.requests == 700, "made, whoever died"
