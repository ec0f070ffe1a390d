"""Output files that are named on the command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sdp.errors import UserError


@contextmanager
def written_for(option: str, path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to; an error names the option it comes from."""
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        cause = error.strerror or error
        raise UserError(f"{option}: {path}: cannot be written ({cause}); choose another path") from error
