"""A temporary S3 server on this machine: versitygw over a folder, with random credentials."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

START_S = 20.0
BUCKET = "bench"


@contextmanager
def serve(program: str, folder: Path, *options: str) -> Iterator[str]:
    """Serve an empty bucket and yield its URI; the environment then has the endpoint and the credentials."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    access, secret = f"AK{token_hex(8)}", token_hex(20)
    process = subprocess.Popen(
        [program, "--port", f"127.0.0.1:{port}", "--quiet", "--keep-alive", *options, "posix", str(folder)],
        env={"ROOT_ACCESS_KEY_ID": access, "ROOT_SECRET_ACCESS_KEY": secret},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.environ |= {
        "AWS_ACCESS_KEY_ID": access,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
    }
    try:
        _wait(process, port)
        yield f"s3://{BUCKET}"
    finally:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{process.args!r}: not listening on port {port}")
