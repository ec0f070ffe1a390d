"""The decoding processes: what an image does to one of them is that image's own affair."""

import ctypes
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from scripts.demo import shapes
from sdp.datasets.outcomes import FAILED, WRITTEN
from sdp.download.image import Checked, check, examine, examined
from sdp.encode.recipe import Recipe
from sdp.encode.transform import SandboxedCrops, crop_image
from sdp.errors import SdpError
from sdp.imaging import RowError
from sdp.sandbox import child
from sdp.sandbox.child import DecoderSettings, Reply
from sdp.sandbox.decoders import Decoders, _Child
from tests.image_rules import image_rules
from tests.sandbox_kit import decoders, write_poison

RULES = image_rules(size=32)
SETTINGS = DecoderSettings(partial(examine, RULES), memory_bytes=2_000_000_000)
FORMATS: list[tuple[str, dict[str, object]]] = [
    ("JPEG", {}),
    ("PNG", {"compress_level": 1}),
    ("WEBP", {"method": 0, "quality": 50}),
    ("GIF", {}),
    ("BMP", {}),
    ("AVIF", {"speed": 10, "quality": 30}),
]
GOOD = shapes.encode(shapes.sample(1))[0]
_GET_DUMPABLE = 3


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(write_poison(tmp_path)))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")


class Results:
    """The delivered results, which a test can wait for."""

    def __init__(self) -> None:
        self.by_token: dict[int, Checked] = {}
        self._changed = threading.Condition()

    def __call__(self, token: int, data: Sequence[bytes], reply: Reply, image: memoryview) -> None:
        checked = examined(reply, image)
        with self._changed:
            assert token not in self.by_token, f"{token} was delivered twice"
            assert data
            self.by_token[token] = checked
            self._changed.notify_all()

    def wait_for(self, count: int, deadline_s: float = 60.0) -> dict[int, Checked]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.by_token) >= count, deadline_s), self.by_token
        return self.by_token


@contextmanager
def decoder(results: Results, settings: DecoderSettings = SETTINGS) -> Iterator[Callable[[int, Sequence[bytes]], None]]:
    """Start a decoder; yield a function that gives it an image, whose result comes under a token."""
    pool = Decoders(settings, 1)
    try:
        yield lambda token, data: pool.put(data, partial(results, token, data))
    finally:
        pool.close()
        assert pool.error is None


def decoded(*images: Sequence[bytes], settings: DecoderSettings = SETTINGS) -> list[Checked]:
    """Have one decoder check images; return the results in their order."""
    results = Results()
    with decoder(results, settings) as put:
        for token, data in enumerate(images):
            put(token, data)
        outcomes = results.wait_for(len(images))
    return [outcomes[token] for token in range(len(images))]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("poison", "how"), [(b"SEGFAULT", "signal 11"), (b"EXIT", "exit code 3"), (b"HANG", "answer")])
def test_an_image_that_kills_its_decoder_twice_is_recorded_and_the_others_are_checked(
    monkeypatch: pytest.MonkeyPatch, poison: bytes, how: str
) -> None:
    monkeypatch.setattr("sdp.sandbox.decoders._ANSWER_S", 2.0)
    deadly = {3} if poison == b"HANG" else {3, 4}
    outcomes = decoded(*([GOOD, poison] if token in deadly else [GOOD] for token in range(12)))
    assert {token for token, checked in enumerate(outcomes) if checked.outcome != WRITTEN} == deadly
    for token in deadly:
        assert (outcomes[token].outcome, outcomes[token].reason) == (FAILED, "crashed")
        assert how in (outcomes[token].detail or "")
        assert "twice" in (outcomes[token].detail or "")


@pytest.mark.usefixtures("poisoned")
def test_an_image_whose_decoder_dies_once_gets_another_chance() -> None:
    assert decoded([GOOD, b"ONCE"])[0].outcome == WRITTEN


@pytest.mark.usefixtures("poisoned")
def test_a_decoder_that_answers_and_then_reads_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.sandbox.decoders._ANSWER_S", 1.0)
    results = Results()
    with decoder(results) as put:
        put(0, [GOOD, b"DEAF"])
        results.wait_for(1)
        put(1, [GOOD, bytes(3_000_000)])  # more than a pipe holds
        assert results.wait_for(2, deadline_s=20.0)[1].outcome == WRITTEN


@pytest.mark.usefixtures("poisoned")
def test_what_a_decoder_prints_is_neither_a_reply_nor_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    assert decoded([GOOD + b"NOISE"])[0].outcome == WRITTEN
    assert "noise" not in "".join(capfd.readouterr())


@pytest.mark.usefixtures("poisoned")
def test_a_decoder_that_answers_just_in_time_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.sandbox.decoders._SLOW_S", 0.5)
    started, real = list[object](), _Child.__init__
    monkeypatch.setattr(_Child, "__init__", lambda self, of: started.append(self) or real(self, of))
    results = Results()
    with decoder(results) as put:
        put(0, [GOOD])
        results.wait_for(1)
        for token in range(1, 30):
            put(token, [GOOD, b"LAZY"] if token == 1 else [GOOD])
        outcomes = results.wait_for(30)
    assert {checked.outcome for checked in outcomes.values()} == {WRITTEN}
    assert len(started) == 2, "one for the decoder that has become slow"


@pytest.mark.usefixtures("poisoned")
def test_an_image_that_computes_for_too_long_is_refused_at_once() -> None:
    busy, good = decoded([GOOD, b"BUSY"], [GOOD], settings=replace(SETTINGS, cpu_s=1.0))
    assert (busy.reason, good.outcome) == ("undecodable", WRITTEN)
    assert "CPU time" in (busy.detail or "")


@pytest.mark.usefixtures("poisoned")
def test_code_that_takes_over_a_decoder_reaches_no_file_network_process_or_secret() -> None:
    attempts, environment = json.loads(decoded([GOOD, b"SPY"])[0].detail or "")
    assert set(attempts.values()) == {"PermissionError"}, attempts
    assert "a secret" not in environment.values()
    assert set(environment) <= {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONPATH"} | {
        f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL")
    }


LIMITS = {"Max processes": "0", "Max open files": "16", "Max core file size": "0"}


def test_a_decoder_has_the_kernel_s_locks_and_its_parent_cannot_be_looked_into() -> None:
    others, results = decoders(), Results()
    with decoder(results) as put:
        put(0, [GOOD])
        results.wait_for(1)
        (pid,) = decoders() - others
        status = Path(f"/proc/{pid}/status").read_text()
        limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    assert re.search(r"^Seccomp:\s+2$", status, re.MULTILINE), "a filter"
    hard = {name: re.split(r"\s{2,}", line)[2] for line in limits.splitlines() for name in LIMITS if name in line}
    assert hard == LIMITS
    assert ctypes.CDLL(None).prctl(_GET_DUMPABLE) == 0


LOCKS = {"_forbid_files": ("open", "connect"), "_forbid_calls": ("open", "socket", "fork", "signal")}
"""The action that each lock prevents on its own."""
TRIED = """
import ctypes, json, os, socket, sys
from sdp.sandbox import confine
inet = socket.socket()
tries = {"open": lambda: open("/etc/passwd"), "connect": lambda: inet.connect(("127.0.0.1", 9)),
         "socket": socket.socket, "fork": lambda: os.fork() or os._exit(0), "signal": lambda: os.kill(os.getppid(), 0)}
confine._libc.prctl(38, 1, 0, 0, 0)
getattr(confine, sys.argv[1])()
refused = []
for name, attempt in tries.items():
    try:
        attempt()
    except PermissionError:
        refused.append(name)
    except OSError:
        pass
os.write(1, json.dumps(refused).encode())
os._exit(0)
"""


@pytest.mark.parametrize("lock", LOCKS)
def test_each_lock_holds_without_the_other(lock: str) -> None:
    done = subprocess.run([sys.executable, "-c", TRIED, lock], capture_output=True, timeout=60, check=True)
    assert set(LOCKS[lock]) <= set(json.loads(done.stdout))


def test_a_kernel_without_a_lock_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.machine = lambda: 'sparc'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert decoded([GOOD])[0].outcome == WRITTEN
    assert "sdp: this kernel confines decoders without seccomp (no filter for sparc)\n" in capfd.readouterr().err


FORGED = [
    b"[" * 150,
    b"[1]",
    b'{"outcome": "written", "sha256": "%s", "width": 3000000000}' % (b"ab" * 32),
    b'{"outcome": "failed", "reason": "boredom"}',
    b'{"outcome": [], "reason": {}}',
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("reply", FORGED)
def test_a_reply_that_an_image_has_forged_is_that_image_s_failure(reply: bytes) -> None:
    (checked,) = decoded([GOOD, b"FORGE:", reply])
    assert (checked.outcome, checked.reason) == (FAILED, "crashed")
    assert "malformed" in (checked.detail or "")


@pytest.mark.parametrize("shape", [[1], [0, 0, 3], "x", None])
def test_pixels_that_an_image_has_forged_are_that_image_s_failure(shape: object) -> None:
    with pytest.raises(RowError) as caught:
        child.unpacked({"shape": shape}, memoryview(bytes(12)))
    assert caught.value.reason == "crashed"


def test_a_confined_decoder_decodes_images_like_any_other_process() -> None:
    images = [shapes.encode(shapes.sample(index))[0] for index in range(0, 40, 3)]
    assert decoded(*([data] for data in images)) == [check(data, RULES) for data in images]


def test_an_image_too_large_for_memory_is_reported_as_such_in_every_format() -> None:
    images = [encoded(format, options, 1200) for format, options in FORMATS]
    for memory_bytes, reason in ((3_000_000, "no_memory"), (4_000_000_000, None)):
        settings = DecoderSettings(partial(examine, image_rules(size=1100)), memory_bytes)
        outcomes = decoded(*([data] for data in images), settings=settings)
        assert [checked.reason for checked in outcomes] == [reason] * len(FORMATS)


def test_decoders_that_cannot_start_are_an_error_and_no_images_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'sdp.sandbox.child' in sys.orig_argv:\n    sys.exit('no decoder today')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results, pool = Results(), Decoders(SETTINGS, 1)
    pool.put([GOOD], partial(results, 0, [GOOD]))
    pool.join(30.0)
    pool.close()
    assert isinstance(pool.error, SdpError)
    assert "does not start" in str(pool.error)
    assert results.by_token == {}


def encoded(format: str, options: dict[str, object], side: int = 300) -> bytes:
    sink = io.BytesIO()
    Image.linear_gradient("L").resize((side, side - 60)).convert("RGB").rotate(30).save(sink, format, **options)
    return sink.getvalue()


@pytest.mark.parametrize("crop", ["center", "random", "buckets"])
def test_a_sandbox_makes_the_crops_that_any_process_makes(crop: Literal["center", "random", "buckets"]) -> None:
    recipe = Recipe((64, 128), crop, seed=7)
    sandboxed = SandboxedCrops(recipe)
    for row, (format, options) in enumerate(FORMATS):
        data = encoded(format, options)
        bucket, crops = sandboxed(memoryview(data), row + (1 << 40))
        expected_bucket, expected = crop_image(data, recipe, row + (1 << 40))
        assert bucket == expected_bucket
        for side in recipe.resolutions:
            assert np.array_equal(crops[side], expected[side])
    huge = io.BytesIO()
    Image.new("1", (10_001, 10_000)).save(huge, "PNG")
    for data, reason in ((huge.getvalue(), "too_many_pixels"), (encoded("PNG", {}, 80), "too_small")):
        with pytest.raises(RowError) as caught:
            sandboxed(data, 1)
        assert caught.value.reason == reason


def test_a_sandbox_ends_its_decoders_when_it_is_no_longer_referenced() -> None:
    others = decoders()
    sandboxed = SandboxedCrops(Recipe((64,)))
    sandboxed(GOOD, 1)
    (pid,) = decoders() - others
    del sandboxed
    assert pid not in decoders()
