"""The restrictions of a process that decodes strangers' bytes: it may only compute, and write to its pipes.

They are set by three raw system calls, which need no library.
"""

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Callable

_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""Landlock's system calls, the same on every architecture."""
_FILTER, _ALL_THREADS = 1, 1
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1
"""EPERM rather than a signal, so that a library that tries a call it does not need continues."""
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_MACHINES = {
    "x86_64": (
        (0xC000003E, 317, 302),
        *(0, 1, 3, 5, 8, 19, 20),  # read, write, close, fstat, lseek, readv, writev
        *(9, 10, 11, 12, 25, 28),  # mmap, mprotect, munmap, brk, mremap, madvise
        *(13, 14, 15, 131, 219),  # signal handlers
        *(24, 39, 98, 186, 202, 204, 228, 318, 324, 334),  # yield, ids, usage, futex, affinity, clock, random, rseq
        *(60, 231),  # exit
    ),
    "aarch64": (
        (0xC00000B7, 277, 261),
        *(63, 64, 57, 80, 62, 65, 66),
        *(222, 226, 215, 214, 216, 233),
        *(134, 135, 139, 132, 128),
        *(124, 172, 165, 178, 98, 123),
        *(113, 278, 283, 293),
        *(93, 94),
    ),
}
"""By machine: the kernel's number of the architecture, seccomp, prlimit64; and the system calls that decoding needs."""
_OPEN_FILES = 16

_libc = ctypes.CDLL(None, use_errno=True)


def hide() -> None:
    """Keep other processes of the same user from reading this one's memory and environment."""
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def confine() -> list[str]:
    """Give up files, network and processes for good; return the restrictions that the kernel lacks, with the reason."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    missing = []
    steps: dict[str, Callable[[], None]] = {
        "no_new_privs": lambda: _raise_on_error(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
        "Landlock": _forbid_files,
        "seccomp": _forbid_calls,
    }
    for name, step in steps.items():
        try:
            step()
        except OSError as error:
            missing.append(f"{name} ({error.strerror})")
    return missing


def _forbid_files() -> None:
    """Forbid opening files and connecting, as far as this kernel's Landlock supports it."""
    version = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    _raise_on_error(version)
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    everything = struct.pack("QQQ", rights, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _libc.syscall(_CREATE_RULESET, everything, len(everything), 0)
    _raise_on_error(ruleset)
    try:
        _raise_on_error(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _forbid_calls() -> None:
    """Refuse all system calls that decoding does not need; prlimit64 is allowed on this process only."""
    if platform.machine() not in _MACHINES:
        raise OSError(0, f"no filter for {platform.machine()}")
    (architecture, seccomp, prlimit), *allowed = _MACHINES[platform.machine()]
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _REFUSE)]
    program.append((_LOAD, 0, 0, _NUMBER))
    for number in allowed:
        program += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    program += [(_JUMP_IF_EQUAL, 0, 3, prlimit), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_JUMP_IF_EQUAL, 0, 1, 0)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    description = struct.pack("HP", len(program), ctypes.addressof(code))
    _raise_on_error(_libc.syscall(seccomp, _FILTER, _ALL_THREADS, description))


def _raise_on_error(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
