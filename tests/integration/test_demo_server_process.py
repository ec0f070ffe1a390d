"""The demo's image server as a process of its own."""

import http.client
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sdp.demo import shapes


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the URL that it printed."""
    command = [sys.executable, "-m", "sdp.demo.server", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def status_of(url: str) -> int:
    target = urlsplit(url)
    connection = http.client.HTTPConnection(target.netloc, timeout=10)
    try:
        connection.request("GET", f"{target.path}?{target.query}")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_its_url_serves_and_ends_on_a_signal_whatever_is_going_on(number: signal.Signals) -> None:
    with serving("--images", "3", "--seed", "4") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        target = urlsplit(url)
        assert target.port
        path = shapes.sample(2, 4).path
        connection = http.client.HTTPConnection(target.netloc, timeout=10)
        connection.request("GET", f"/{path}")
        assert connection.getresponse().read() == shapes.encode(shapes.sample(2, 4))[0]
        connection.close()
        assert status_of(f"{url}/image/3") == 404
        with socket.create_connection(("127.0.0.1", target.port), timeout=10) as plug:
            plug.sendall(b"GET /image/1?do=stall HTTP/1.1\r\n\r\n")
            process.send_signal(number)
            assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_its_second_line_names_the_certificate_which_goes_away_with_it() -> None:
    with serving("--tls", "--images", "1") as (process, url):
        assert url.startswith("https://127.0.0.1:")
        assert process.stdout is not None
        certificate = Path(process.stdout.readline().strip())
        assert certificate.read_text().startswith("-----BEGIN CERTIFICATE-----")
        assert list(certificate.parent.iterdir()) == [certificate]
        process.terminate()
        assert process.wait(10) == 0
        assert not certificate.parent.exists()


def test_it_takes_a_mix_hosts_and_a_number_of_distinct_images() -> None:
    arguments = ("--mix", "100:503", "--host", "127.0.0.1", "--host", "127.0.0.2", "--distinct", "1", "--warm")
    with serving(*arguments, "--images", "50") as (_, url):
        assert status_of(f"{url}/image/3") == 503
        assert status_of(f"{url.replace('127.0.0.1', '127.0.0.2')}/image/49?do=plain") == 200


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(("--mix", "5:nonsense"), "--mix: '5:nonsense': do: expected"), (("--host", "192.0.2.1"), "cannot listen at")],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(arguments: tuple[str, ...], complaint: str) -> None:
    with serving(*arguments) as (process, url):
        assert process.wait(10) == 2
        assert url == ""
        assert process.stderr is not None
        (line,) = process.stderr.read().splitlines()
        assert complaint in line
