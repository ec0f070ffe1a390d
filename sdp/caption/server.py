"""A server of OpenAI's chat API, which is asked about pictures over HTTP."""

import base64
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import simplejpeg
import urllib3
from urllib3 import exceptions as failures

from sdp.caption.answers import ModelAnswer, Question
from sdp.console import say
from sdp.datasets.concurrently import ordered_map
from sdp.errors import SdpError, Unavailable, UserError, one_line
from sdp.imaging import RowError

KEY = "OPENAI_API_KEY"
_QUALITY = 90
_LARGEST_ANSWER = 1 << 20
_ATTEMPT_S = 180.0
_TRIES = 4
"""Attempts at a picture, if the server answers but not as it should."""
_BUSY = (408, 425, 429, 502, 503, 504)
"""The statuses of a server that has no time, or is not there."""
_WAITS, _LONGEST_WAIT_S = 20, 30.0
"""Waits for such a server: eight minutes in all, as for a store."""
_IN_A_ROW = 100
"""Pictures in a row without an answer, after which the server is to blame."""
_SILENT_S = 15.0
_REFUSED = {401: f"set {KEY}", 403: f"set {KEY}", 404: "check captions.url and captions.model"}
_announced = time.monotonic()


class _Patience(urllib3.Retry):
    """Waits for a server that is busy or away, and says so now and then."""

    def sleep(self, response: urllib3.BaseHTTPResponse | None = None) -> None:
        global _announced
        if time.monotonic() - _announced > _SILENT_S:
            _announced = time.monotonic()
            say(f"waiting for captions.url: {f'status {response.status}' if response else 'no connection'}")
        super().sleep(response)

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        asked_s = super().get_retry_after(response)
        return None if asked_s is None else min(asked_s, 2 * _LONGEST_WAIT_S)


class ServerCaptioner:
    """Requests to a server, some at once."""

    def __init__(self, url: str, model: str, at_once: int, max_tokens: int, temperature: float) -> None:
        self._url, self._at_once, self._slots = url, at_once, threading.Semaphore(at_once)
        self._asked = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        waits = _Patience(
            None, connect=_WAITS, read=0, redirect=0, status=_WAITS, other=0, status_forcelist=_BUSY,
            allowed_methods=None, backoff_factor=0.5, backoff_max=_LONGEST_WAIT_S, backoff_jitter=0.5,
            raise_on_status=False,
        )  # fmt: skip
        self._pool = urllib3.PoolManager(maxsize=at_once, headers=_headers(), retries=waits)
        self._lock, self._failed = threading.Lock(), 0

    def __call__(self, questions: Sequence[Question]) -> Iterator[ModelAnswer]:
        """Yield the answers."""
        return ordered_map(self._answer, questions, self._at_once)

    def _answer(self, question: Question) -> ModelAnswer:
        """Ask until there is an answer, or a reason why there is none; raise an error that ends the job."""
        picture = base64.b64encode(simplejpeg.encode_jpeg(question.pixels, _QUALITY)).decode()
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}},
            {"type": "text", "text": question.prompt},
        ]
        chat = {**self._asked, "messages": [{"role": "user", "content": content}], "seed": question.row % 2**31}
        body, tries, may_help = json.dumps(chat).encode(), 0, True
        while may_help and tries < _TRIES:
            tries += 1
            with self._slots:
                answer, may_help = self._attempt(body)
        with self._lock:
            self._failed = self._failed + 1 if isinstance(answer, RowError) and answer.reason != "cut_off" else 0
            if self._failed >= _IN_A_ROW:
                raise SdpError(f"captions.url: {self._url}: {self._failed} pictures in a row got no answer: {answer}")
        return answer

    def _attempt(self, body: bytes) -> tuple[ModelAnswer, bool]:
        """Ask once; return the answer, and whether another attempt may help."""
        url, timeout = f"{self._url}/chat/completions", urllib3.Timeout(connect=20.0, read=_ATTEMPT_S)
        try:
            response = self._pool.request("POST", url, body=body, timeout=timeout, preload_content=False)
            data = _beginning(response)
        except failures.HTTPError as error:
            cause = getattr(error, "reason", None) or error
            if isinstance(cause, failures.NewConnectionError | failures.ConnectTimeoutError):
                raise self._unavailable(cause) from None
            slow = isinstance(cause, failures.TimeoutError)
            return RowError("timeout" if slow else "broken_transfer", one_line(cause, 120)), True
        if response.status == 200:
            answer = _answer_in(data)
            return answer, isinstance(answer, RowError) and answer.reason != "cut_off"
        detail = f"status {response.status}: {one_line(data.decode(errors='replace'), 120)}"
        if response.status in _REFUSED:
            raise UserError(f"captions.url: {self._url}: {detail}; {_REFUSED[response.status]}")
        if response.status in _BUSY:
            raise self._unavailable(detail)
        return RowError("http_status", detail), not 400 <= response.status < 500

    def _unavailable(self, cause: object) -> Unavailable:
        advice = f"after {_WAITS} retries; run the same command again once the server answers"
        return Unavailable(f"captions.url: {self._url}: {one_line(cause, 160)}, {advice}")


def check_server(url: str, model: str) -> None:
    """Refuse a server that does not answer, or that has no such model, before anything costly begins."""
    try:
        with urllib3.PoolManager(headers=_headers(), retries=False, timeout=20.0) as pool:
            response = pool.request("GET", f"{url}/models", preload_content=False)
            data = _beginning(response)
    except failures.HTTPError as error:
        raise UserError(f"captions.url: {url}: {one_line(error, 160)}; check it") from None
    if response.status in (401, 403):
        raise UserError(f"captions.url: {url}: status {response.status}; {_REFUSED[response.status]}")
    with suppress(ValueError, TypeError, KeyError, RecursionError):  # not every server lists its models
        names = [str(each["id"]) for each in json.loads(data)["data"]]
        if names and model not in names:
            raise UserError(f"captions.model: {url} serves {', '.join(names[:5])}, not {model}; name one of them")


def _headers() -> Mapping[str, str]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # or a small answer could be large
    return headers | ({"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {})


def _beginning(response: urllib3.BaseHTTPResponse) -> bytes:
    """Return a body, or a little more than the largest allowed, within the time of an attempt."""
    data, deadline = b"", time.monotonic() + _ATTEMPT_S
    try:
        while len(data) <= _LARGEST_ANSWER and (piece := response.read1(_LARGEST_ANSWER)):
            data += piece
            if time.monotonic() > deadline:
                raise failures.TimeoutError("too slow")
    finally:
        if len(data) > _LARGEST_ANSWER or not response.closed:
            response.close()
        response.release_conn()
    return data


def _answer_in(data: bytes) -> ModelAnswer:
    """Return the words in a response."""
    if len(data) > _LARGEST_ANSWER:
        return RowError("too_big", f"an answer of more than {_LARGEST_ANSWER:,} bytes")
    try:
        choice: Any = json.loads(data)["choices"][0]
        text = choice["message"].get("content") or ""
        if not isinstance(text, str):
            raise TypeError("content is no text")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        return RowError("bad_answer", f"{type(error).__name__}: {one_line(error, 80)}")
    return RowError("cut_off", text[-80:]) if choice.get("finish_reason") == "length" else text
