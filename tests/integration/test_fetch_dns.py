"""Names whose servers do not answer delay no other images."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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

FETCH = """
import json, os, sys, threading
from sdp.config.download import FetchConfig, HostsConfig
from sdp.download.fetch import Fetcher
from sdp.download.slot import Buffer
from sdp.urls import parse

urls = json.loads(sys.argv[1])
buffer, ended, done = Buffer(1 << 28), {}, threading.Event()

def take(fetched):
    ended[fetched.token] = fetched.failure and fetched.failure.reason
    buffer.release(fetched.size)
    if len(ended) == len(urls):
        done.set()

options = FetchConfig(allow_networks=("127.0.0.0/8",), retries=0, timeout_s=96.0)
fetcher = Fetcher(options, HostsConfig(at_once=100, per_second=None), buffer, take)
fetcher.submit((number, parse(url)) for number, url in enumerate(urls))
done.wait(200)
print(json.dumps([repr(fetcher.error), [ended.get(number) for number in range(len(urls))]]), flush=True)
os._exit(0)  # threads that look names up are not waited for
"""
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
        done = subprocess.run(
            [sys.executable, "-c", FETCH, json.dumps(urls)],
            env={**os.environ, "LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    error, reasons = json.loads(done.stdout)
    assert error == "None"
    assert reasons == ["dns"] * SILENT + [None] * GOOD
