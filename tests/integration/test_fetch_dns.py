"""Names whose servers do not answer delay no other images."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fetching import fetch_apart
from tests.misbehaving.server import ImageServer

RESOLVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **result) {
    int (*original)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    original = dlsym(RTLD_NEXT, "getaddrinfo");
    if (name && strncmp(name, "silent", 6) == 0) {
        sleep(120);
        return EAI_AGAIN;
    }
    return original(name && strncmp(name, "good", 4) == 0 ? "127.0.0.1" : name, service, hints, result);
}
"""
"""A resolver whose servers for some names do not answer."""

SILENT, GOOD = 60, 200


@pytest.mark.needs("cc")
def test_names_that_do_not_resolve_hold_up_no_other_host(tmp_path: Path, tool: Callable[[str], Path]) -> None:
    library = tmp_path / "resolver.so"
    (tmp_path / "resolver.c").write_text(RESOLVER)
    source = str(tmp_path / "resolver.c")
    subprocess.run([str(tool("cc")), "-shared", "-fPIC", "-o", str(library), source, "-ldl"], check=True, timeout=60)
    with ImageServer(images=GOOD, distinct=10) as server:
        urls = [f"http://silent{number}.example/x.jpg" for number in range(SILENT)]
        urls += [server.image_url(n).replace("127.0.0.1", f"good{n}.example") for n in range(GOOD)]
        result = fetch_apart(urls, env={"LD_PRELOAD": str(library)}, retries=0, timeout_s=96.0)
    assert result["reasons"] == ["dns"] * SILENT + [None] * GOOD
