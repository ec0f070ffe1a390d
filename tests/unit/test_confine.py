"""The system calls that a decoder may make, against the kernel's own headers."""

import re
from pathlib import Path

import pytest

from sdp.sandbox import confine

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
EXECUTABLES = {"x86_64": 62, "aarch64": 183}
"""EM_X86_64 and EM_AARCH64 of elf-em.h; audit.h adds a bit for 64-bit and one for little-endian."""
HARMLESS = """
read write close fstat lseek readv writev mmap mprotect munmap brk mremap madvise
rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall sched_yield getpid getrusage gettid futex
sched_getaffinity clock_gettime getrandom membarrier rseq exit exit_group
"""


@pytest.mark.parametrize("machine", list(HEADERS))
def test_a_filter_names_the_system_calls_that_it_means(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not here")
    text = HEADERS[machine].read_text()
    names = {int(number): name for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    (architecture, *others), *allowed = confine._MACHINES[machine]
    assert {names[number] for number in allowed} == set(HARMLESS.split())
    assert [names[number] for number in others] == ["seccomp", "prlimit64"]
    assert architecture == EXECUTABLES[machine] | 0x8000_0000 | 0x4000_0000
