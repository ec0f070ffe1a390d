"""Pieces cut into partitions, and each partition reduced, in this process or by Ray tasks with the same results.

    pieces ── read (tasks) ── a share for each partition ── reduce (tasks) ── results

Shares stay in the object store of the node that read them until they are reduced. Ray makes those of a lost node
again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sdp.console import Progress, counted
from sdp.ray import cluster, lost

Piece = TypeVar("Piece")
Reduced = TypeVar("Reduced")


def exchange(
    what: str,
    rows: int,
    read: Callable[[Piece, int], Sequence[Any]],
    pieces: Sequence[Piece],
    reduce: Callable[..., Reduced],
    partitions: int,
    *,
    labels: Mapping[str, str],
    check: Callable[[], None],
) -> Iterator[Reduced]:
    """Yield `reduce(*shares)` for each partition, in order; its shares are in the order of the pieces.

    `read` returns a piece's share of each of so many partitions. If there are several pieces, tasks on nodes with these
    labels do both, and a line says how many of the `rows` have been read for `what`; `check` is called before each
    result.
    """
    if len(pieces) <= 1:  # starting a process would take longer
        yield from (reduce(*shares) for shares in zip(*(read(piece, partitions) for piece in pieces), strict=True))
        return
    import ray

    cluster.connect()
    options: dict[str, Any] = {"num_cpus": 0.5, "label_selector": dict(labels) or None}
    reading: Any = ray.remote(_read).options(num_returns=partitions + 1, **options)
    reducing: Any = ray.remote(_reduce).options(**options)
    shared = ray.put(read)
    *columns, ends = zip(*(reading.remote(shared, piece, partitions) for piece in pieces), strict=True)
    results = [reducing.remote(reduce, *shares) for shares in columns]
    del columns  # or shares would outlive the tasks that need them
    with Progress(what) as progress:
        for number, end in enumerate(ends, 1):
            check()
            _value(end)
            progress.update(f"{rows * number // len(pieces):,} of {counted(rows, 'row')}")
    for result in results:
        check()
        yield _value(result)


def _value(reference: Any) -> Any:
    """Return a task's value; raise an error of sdp as the task raised it."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if (own := lost.unwrapped(error)) is not None:
            raise own from error
        raise


def _read(read: Callable[[Any, int], Sequence[Any]], piece: Any, partitions: int) -> Any:
    """Return each partition's share, and None, which tells the driver that the piece has been read."""
    return (*read(piece, partitions), None)


def _reduce(reduce: Callable[..., Any], *shares: Any) -> Any:
    return reduce(*shares)
