"""Footers of files that may be strangers', which a process of their own reads first.

Parquet's library ends its process where some contradict themselves: a column is encrypted, and the footer says not how;
statistics are shorter than their type. So another process does with a footer what jobs do. If it dies, an error names
the file, whenever the job is started.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow.parquet as pq

import sdp
from sdp.datasets.columns import parse_footer, read_end
from sdp.errors import DatasetError, SdpError
from sdp.storage import StorageOptions

_MOST_S = 60
"""Seconds after which the process ends, whether it has nothing to read or takes too long."""
_TRIES = 2
_lock = threading.Lock()
_reader: "_Reader | None" = None


def read_new_footer(uri: str, options: StorageOptions | None, statistics: str = "") -> pq.FileMetaData:
    """Read the footer of a file, and check it; refuse one that is deadly, also by the `statistics` of a column."""
    end, size = read_end(uri, options)
    _try_reading(uri, json.dumps([size, statistics]).encode(), end)
    return parse_footer(uri, end, size)


def _try_reading(uri: str, *messages: bytes) -> None:
    global _reader
    death = ""
    with _lock:
        for _ in range(_TRIES):  # it may have ended for want of work, or for lack of memory
            reader = _reader = _reader or _Reader()
            try:
                for message in messages:
                    reader.pipe.send_bytes(message)
                reader.pipe.recv_bytes()
                return
            except (EOFError, OSError):
                _reader, death = None, reader.end()
    raise DatasetError(f"{uri}: its footer crashes the reader of Parquet files ({death}); remove or rewrite the file")


class _Reader:
    """The process that reads, and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, far_end = Pipe()
        path = os.pathsep.join([str(Path(sdp.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        env, quiet = {**os.environ, "PYTHONPATH": path}, subprocess.DEVNULL
        with far_end:
            fd = far_end.fileno()
            command = [sys.executable, "-P", "-m", __name__, str(fd)]
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=quiet, stdout=quiet, stderr=quiet, env=env)
        try:
            self.pipe.recv_bytes()
        except EOFError:
            raise SdpError(f"the process that reads Parquet's footers does not start ({self.end()})") from None

    def end(self) -> str:
        """Return how the process has ended, which has closed its end of the pipe."""
        self.pipe.close()
        self._process.kill()
        code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _serve(pipe: Connection) -> None:
    """Read footers until the parent closes its end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe.send_bytes(b"ready")
    while True:
        signal.alarm(_MOST_S)
        size, statistics = json.loads(pipe.recv_bytes())
        end = pipe.recv_bytes()
        with suppress(Exception):  # the parent raises it too
            footer = parse_footer("", end, size)
            footer.schema.to_arrow_schema()
            for group in map(footer.row_group, range(footer.num_row_groups)):
                columns = map(group.column, range(group.num_columns))
                _ = [column.statistics for column in columns if column.path_in_schema == statistics]
        pipe.send_bytes(b"done")


if __name__ == "__main__":
    with suppress(EOFError):
        _serve(Connection(int(sys.argv[1])))
