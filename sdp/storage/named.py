"""Output files that are named on the command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import IO

from sdp.errors import UserError


@contextmanager
def written_for(option: str, path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to, which replaces `path` once it is whole; an error names the option it comes from."""
    if path.exists() and not path.is_file():
        raise UserError(f"{option}: {path}: not a file; choose another path")
    target = path.resolve()  # a link stays, and its target is replaced
    draft = target.with_name(f"{target.name}.{token_hex(4)}.part")
    try:
        try:
            with draft.open("wb") as file:
                yield file
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        cause = error.strerror or error
        raise UserError(f"{option}: {path}: cannot be written ({cause}); choose another path") from error
