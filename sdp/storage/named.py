"""A file that a person has named on the command line."""

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

_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr|fd/([0-9]{1,4}))", re.ASCII)


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` once it is whole.

    What is no file (a device, a pipe, another program's stdout) cannot be replaced: it is written to.
    """
    if _is_special(path):
        with tempfile.TemporaryFile() as whole:
            yield whole
            whole.seek(0)
            with _opened(path) as there:
                shutil.copyfileobj(whole, there)
        return
    target = path.resolve()  # of a link, what it leads to is written anew
    draft = target.with_name(f"{target.name}.{token_hex(4)}.part")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _opened(path: Path) -> IO[bytes]:
    """What is there, to be written to; our own stdout where it stands, and not from its file's beginning again."""
    if (found := _DESCRIPTOR.fullmatch(str(path))) is None:
        return path.open("wb")
    sys.stdout.flush()
    return os.fdopen(os.dup({"stdout": 1, "stderr": 2}.get(found[1]) or int(found[2])), "wb")


def _is_special(path: Path) -> bool:
    # /dev/stdout may lead to a file, which the shell holds open: another one in its place would be lost to it.
    return path.absolute().is_relative_to("/dev") or (path.exists() and not path.is_file() and not path.is_dir())
