"""The command line. `main` runs one command, and imports nothing heavy before that."""

import atexit
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType

from sdp import console
from sdp.cli.command import (
    JOBS,
    PIPELINE,
    Command,
    CommandParser,
    HelpPrinted,
    UsageError,
    nearest,
    say,
    unknown_argument,
)
from sdp.cli.table import COMMANDS
from sdp.errors import SdpError, UserError
from sdp.leaving import clean_up, note_signal, seen, signals

__all__ = ["COMMANDS", "JOBS", "main"]

_EXAMPLES = (
    "sdp init my --pictures photos --gpu 24GB       # files to fine-tune Stable Diffusion on your own pictures",
    "sdp train --config my/train.yaml               # train; run it again to continue where it stopped",
    'sdp generate my/run "a cat on the moon" -n 4   # draw with what it has learned',
)
_UNHANDLED_S = 0.5
_UNWIND_S = 7.0
"""Time for a command that was stopped to end by itself: its threads may wait for a storage that is away."""
_unwinding, _unwound = threading.Event(), threading.Event()
"""Set once a command was stopped, and once it has said so."""
_ending = threading.Lock()
"""Locked for good by the first signal that ends the command."""


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] | None = None) -> int:
    """Run one command line and return its exit code: 0, 1 (trying again may help) or 2 (it will not)."""
    if argv is not None:
        return _run(argv, commands)
    prepare_process()
    exit_codes: list[int] = []
    atexit.register(_leave, exit_codes)  # registered first, it is called last
    if "_ARGCOMPLETE" in os.environ:
        from sdp.cli.completion import complete

        complete(COMMANDS)
    exit_codes.append(_run(sys.argv[1:], commands))
    _unwound.set()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if "ray" in sys.modules:
        from sdp.ray import cluster

        cluster.abandon()
    return exit_codes[0]


def _leave(exit_codes: Sequence[int]) -> None:
    """Exit at once if `main` has a code: Ray's shutdown and unloading torch's modules would take seconds."""
    if exit_codes:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        if "ray" in sys.modules:
            from sdp.ray import cluster

            cluster.kill()
        os._exit(exit_codes[0])


def _run(argv: Sequence[str], commands: Sequence[Command] | None) -> int:
    console.configure()
    signals.clear()
    try:
        code = _dispatch(argv, COMMANDS if commands is None else commands)
        sys.stdout.flush()
    except SdpError as error:
        for line in str(error).splitlines() or [type(error).__name__]:
            say(line, "error")
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has closed it. Python would report that once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f" for {error.filename}" if error.filename else ""
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and where:
            remedy = "change its permissions, or set HOME to a folder that is yours"
            say(f"{error.filename}: {error.strerror}; {remedy}", "error")
            return UserError.exit_code
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        say(f"there is no space left{where} ({error.strerror}); make room, then run the same command again", "error")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # buffered output cannot be written
        return UserError.exit_code
    except KeyboardInterrupt as error:
        return _stopped(str(error) or (signals or ["SIGINT"])[0], argv, getattr(error, "__notes__", []))
    return code


def _stopped(name: str, argv: Sequence[str], notes: Sequence[str]) -> int:
    """Print which signal ended the command; return the exit code for it."""
    job = argv[:1] and argv[0] in JOBS
    usual = "the same command continues where it stopped" if job else "run it again"
    say(f"stopped by {name}; {'; '.join(notes or [usual])}", "error")
    return 128 + signal.Signals[name]


def prepare_process() -> None:
    """Make this process, and those that it starts, work under any locale and without a home or a user's name."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # read at start only
        os.execv(sys.executable, sys.orig_argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - pathlib's raises
        os.environ["HOME"] = "/nonexistent"  # Ray and PyTorch do not start without one
    os.environ.setdefault("USER", str(os.getuid()))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # or torch's idle threads take the cores of those that work
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    numbers, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(numbers,), name="sdp-signals", daemon=True).start()
    threading.Thread(target=_end_late, name="sdp-unwinding", daemon=True).start()


def _watch(numbers: int) -> None:
    """End the command if the main thread has not handled a signal soon, as while a library's code starts Ray."""
    while number := os.read(numbers, 1):
        if (lost := sys.modules.get("sdp.ray.lost")) is not None:
            lost.signalled()
        # Training handles signals itself: it may be in the middle of a long step.
        unhandled = signal.getsignal(number[0]) is _interrupt and not seen.wait(_UNHANDLED_S)
        if unhandled and _ending.acquire(blocking=False):
            _end_at_once(number[0])


def _end_late() -> None:
    """End a command that was stopped and has not ended by itself."""
    _unwinding.wait()
    threading.main_thread().join(_UNWIND_S)
    number = signal.Signals[signals[-1]]
    last = threading.Timer(3 * _UNWIND_S, _give_up, [number])
    last.daemon = True
    last.start()
    if not _unwound.is_set():
        _end_at_once(number)
    elif threading.main_thread().is_alive():  # it joins threads
        _leave([128 + number])


def _end_at_once(number: int) -> None:
    """Print which signal ended the command, and end the process without unwinding its stack."""
    clean_up()
    code = _stopped(signal.Signals(number).name, sys.argv[1:], [])
    _unwound.set()
    _leave([code])


def _give_up(number: signal.Signals) -> None:
    """End a command whose cleanup does not end."""
    if not _unwound.is_set():
        # In a thread: whoever should read it may be gone, or read no more.
        printing = threading.Thread(target=_stopped, args=(number.name, sys.argv[1:], []), daemon=True)
        printing.start()
        printing.join(1)
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt with the signal's name; another Ctrl-C ends the process at once."""
    name = note_signal(number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # `ray job stop` sends it to the supervisor, which hands it on, and to us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # `_watch` is ending the process: do not go on without a lease
    _unwinding.set()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            # An exception inside an import makes compiled modules abort, or raise another one.
            _end_at_once(number)
        frame = frame.f_back
    raise KeyboardInterrupt(name)


def _dispatch(argv: Sequence[str], commands: Sequence[Command]) -> int:
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(commands), file=sys.stdout if words else sys.stderr)
        return 0 if words else UsageError.exit_code
    if words[0] == "--version":
        print("\n".join(_versions()))
        return 0
    try:
        command, rest = _find(words, commands)
        parser = CommandParser(command)
        arguments, unknown = parser.parse_known_args(rest)
    except HelpPrinted:
        return 0
    if unknown:
        raise UsageError(unknown_argument(unknown[0], parser, command))
    console.configure(quiet=arguments.quiet, verbose=arguments.verbose)
    try:
        return command.run(arguments) or 0
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "sdp"):  # a bug of ours
            raise
        remedy = "pip install '.[worker]' where sdp's code is" + (
            ", or submit the job to a cluster" if command.group == PIPELINE else ""
        )
        raise UserError(f"sdp {command.name}: {missing} is not installed; {remedy}") from error


def _find(words: list[str], commands: Sequence[Command]) -> tuple[Command, list[str]]:
    """Return the command that a line begins with, and the rest of the line."""
    for command in commands:
        name = command.name.split()
        if words[: len(name)] == name:
            return command, words[len(name) :]
    first, *rest = words
    inner = [command for command in commands if command.name.startswith(f"{first} ")]
    if inner and rest[:1] in (["-h"], ["--help"]):
        print("\n".join([f"usage: sdp {first} COMMAND [options]", "", *_listed(inner, inner)]))
        raise HelpPrinted
    if inner:
        seconds = [command.name.split()[1] for command in inner]
        near = nearest("".join(rest[:1]), seconds, f"sdp {first}", f"sdp {first} ")
        got = repr(rest[0]) if rest else "nothing"
        raise UsageError(f"{first}: expected {' or '.join(seconds)}, got {got}; {near}")
    names = list(dict.fromkeys(command.name.split()[0] for command in commands))
    what = "option" if first.startswith("-") else "command"
    near = nearest(first, ["--help", "--version"] if what == "option" else names, "sdp", "sdp ")
    raise UsageError(f"expected a command, got the unknown {what} {first!r}; {near}")


def _versions() -> Iterator[str]:
    """Yield the versions of sdp and of its main dependencies."""
    import platform
    from importlib import metadata

    from sdp import __version__

    yield f"sdp {__version__}"
    yield f"python {platform.python_version()} ({platform.system()} {platform.release()})"
    for name in ("torch", "ray", "diffusers", "transformers", "pyarrow"):
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name} not installed"


def _help(commands: Sequence[Command]) -> str:
    lines = ["sdp: train or fine-tune image diffusion models, on one machine or on Kubernetes"]
    lines += ["", "usage: sdp COMMAND [options]"]
    for group in dict.fromkeys(command.group for command in commands):
        lines += ["", f"{group}:", *_listed([command for command in commands if command.group == group], commands)]
    lines += ["", "Examples:", *(f"  {line}" for line in _EXAMPLES)]
    lines += ["", "sdp COMMAND --help describes a command; sdp --version prints the versions of sdp and its libraries."]
    return "\n".join(lines)


def _listed(shown: Sequence[Command], beside: Sequence[Command]) -> list[str]:
    """Return a line for each command that is shown, as wide as all the commands beside it need."""
    width = max(len(command.name) for command in beside) + 2
    return [f"  {command.name:{width}}{command.summary}" for command in shown]
