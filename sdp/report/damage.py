"""Files of JSON that are not what sdp writes, told in a line."""

from collections.abc import Iterator
from contextlib import contextmanager

from sdp.errors import DatasetError


@contextmanager
def understood(where: str, hint: str) -> Iterator[None]:
    """Around the reading of a file's content: what it lacks, or has of another kind, becomes one line about it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, ZeroDivisionError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise DatasetError(f"{where}: not what sdp writes there ({cause}); {hint}") from error
