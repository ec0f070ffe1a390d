"""The system calls that a decoder may make, against the kernel's own headers."""

import re
from pathlib import Path

import pytest

from sdp.sandbox import confine

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
EXECUTABLE = 62
"""EM_X86_64 of elf-em.h; audit.h adds a bit for 64-bit and one for little-endian."""
HARMLESS = """
read write close fstat lseek readv writev mmap mprotect munmap brk mremap madvise
rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall sched_yield getpid getrusage gettid futex
sched_getaffinity clock_gettime getrandom membarrier rseq exit exit_group
"""


@pytest.mark.skipif(not HEADER.exists(), reason=f"{HEADER} is not here")
def test_the_filter_names_the_system_calls_that_it_means() -> None:
    numbered = re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADER.read_text())
    names = {int(number): name for name, number in numbered}
    assert {names[number] for number in confine._ALLOWED} == set(HARMLESS.split())
    assert [names[number] for number in (confine._SECCOMP, confine._PRLIMIT)] == ["seccomp", "prlimit64"]
    assert confine._ARCHITECTURE_NUMBER == EXECUTABLE | 0x8000_0000 | 0x4000_0000
