"""Decoders in which some images are deadly."""

from pathlib import Path

_SITE = """
import sys

if "sdp.sandbox.child" in sys.orig_argv:
    import ctypes, json, os, socket, threading
    import sdp.imaging as imaging

    again = os.path.exists(MARK)
    open(MARK, "w").close()

    def tried(what, *arguments):
        try:
            what(*arguments)
            return "done"
        except OSError as error:
            return type(error).__name__

    original = imaging.read_header

    def read_header(data, *arguments):
        text = bytes(data[-200:])
        if text.endswith(b"SEGFAULT"):
            ctypes.string_at(0)
        if text.endswith(b"EXIT"):
            os._exit(3)
        if text.endswith(b"HANG"):
            threading.Event().wait()
        if text.endswith(b"ONCE") and not again:
            os._exit(3)
        if text.endswith(b"BUSY"):
            while True:
                pass
        if text.endswith(b"DEAF"):  # it answers, and reads no further
            os.readv = lambda *_: threading.Event().wait()
        if text.endswith(b"NOISE"):
            os.write(1, b"noise"), os.write(2, b"noise")
        if text.endswith(b"LAZY"):  # it answers each further image just in time
            imaging.read_header = lambda *of: threading.Event().wait(0.7) or original(*of)
            return imaging.read_header(data, *arguments)
        if b"FORGE:" in text:
            json.dumps = lambda _: text.partition(b"FORGE:")[2].decode()
        if text.endswith(b"SPY"):
            attempts = {
                "read": tried(open, "/etc/passwd"),
                "write": tried(open, MARK, "w"),
                "parent": tried(open, f"/proc/{os.getppid()}/environ"),
                "connect": tried(socket.socket),
                "pipe": tried(socket.socketpair),
                "fork": tried(os.fork),
                "signal": tried(os.kill, os.getppid(), 0),
                "run": tried(os.execv, "/bin/true", ["true"]),
            }
            raise imaging.ImageError("internal", json.dumps([attempts, dict(os.environ)]))
        return original(data, *arguments)

    imaging.read_header = read_header
"""


def decoders() -> set[int]:
    """Return the process ids of this process's decoders."""
    pids = [int(pid) for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()]
    return {pid for pid in pids if b"sdp.sandbox.child" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def write_poison(folder: Path) -> Path:
    """Write a sitecustomize for PYTHONPATH by which an image's last bytes make a decoder die or misbehave."""
    (folder / "sitecustomize.py").write_text(_SITE.replace("MARK", repr(str(folder / "mark"))))
    return folder
