"""Output files that are named on the command line."""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import IO

from sdp.errors import UserError

_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr|fd/([0-9]{1,4}))", re.ASCII)


@contextmanager
def written_for(option: str, path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to, which replaces `path` once it is whole; an error names the option it comes from.

    A device, a pipe or another program's stdout cannot be replaced, so the whole content is written to it.
    """
    target = path.resolve()  # a link stays, and its target is replaced
    draft = target.with_name(f"{target.name}.{token_hex(4)}.part")
    try:
        if _is_special(path):
            with tempfile.TemporaryFile() as buffer:
                yield buffer
                buffer.seek(0)
                with _open_special(path) as special:
                    shutil.copyfileobj(buffer, special)
            return
        try:
            with draft.open("wb") as file:
                yield file
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        cause = error.strerror or error
        raise UserError(f"{option}: {path}: cannot be written ({cause}); choose another path") from error


def _open_special(path: Path) -> IO[bytes]:
    """Open a special file; one of this process's descriptors continues at its position."""
    if (match := _DESCRIPTOR.fullmatch(str(path))) is None:
        return path.open("wb")
    sys.stdout.flush()
    return os.fdopen(os.dup({"stdout": 1, "stderr": 2}.get(match[1]) or int(match[2])), "wb")


def _is_special(path: Path) -> bool:
    # /dev/stdout may lead to a file that the shell holds open: the shell would not see a replacement.
    return path.absolute().is_relative_to("/dev") or (path.exists() and not path.is_file() and not path.is_dir())
