"""A proxy before an S3 server that behaves as object stores do on a bad day: slow, busy, resetting, stale, and strict.

It understands HTTP, where the proxy of `tests.integration.s3` only forwards bytes. Credentials come from it as well, as
from a container's endpoint: each lasts for a few seconds, after which the proxy refuses it as expired.
"""

import http.client
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.integration.s3 import Gateway
from tests.storage_server import RESET, Answer, Request, Server

CREDENTIALS = "/credentials"
_REPLACED = ("authorization", "host", "connection", "x-amz-date", "x-amz-security-token", "x-amz-content-sha256")
_DROPPED = ("connection", "date", "keep-alive", "server", "transfer-encoding")


@dataclass
class Faults:
    """The server's present faults; every field may be changed at any time."""

    delay_s: float = 0.0
    busy: float = 0.0
    """Share of requests that are refused with 503 SlowDown."""
    reset: float = 0.0
    """Share of requests whose connection is reset, half of them after the server has done what they ask."""
    stale_s: float = 0.0
    """A listing may be this old."""
    gone: bool = False
    """Every connection is reset."""
    lasting_s: float = 3600.0
    """Time for which credentials are good."""
    draw: random.Random = field(default_factory=lambda: random.Random(1))


class BadDay:
    """The proxy. `faults` decides what goes wrong, `counts` says what went wrong."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        self._folder = folder
        self.faults, self.counts = Faults(), Counter[str]()
        self._gateway = gateway
        self._tokens: dict[str, float] = {}
        self._numbers = itertools.count()
        self._listings: dict[str, tuple[float, Answer]] = {}
        self._server = Server(self._answer)
        self.close = self._server.close

    @property
    def env(self) -> dict[str, str]:
        """Variables of a client of the proxy, in whose folder a token is written."""
        token = self._folder / "container-token"
        token.write_text("t")
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self._server.address}{CREDENTIALS}",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
            "AWS_ENDPOINT_URL_S3": self._server.address,
            "AWS_REGION": "us-east-1",
        }

    def _answer(self, request: Request) -> Answer:
        faults, draw = self.faults, self.faults.draw
        if request.path.startswith(CREDENTIALS):
            return Answer(200, self._credentials(), {"Content-Type": "application/json"})
        if faults.gone:
            return self._reset("gone")
        time.sleep(faults.delay_s)
        if draw.random() < faults.busy:
            return self._refuse(503, "SlowDown", "Please reduce your request rate.")
        token = request.headers.get("x-amz-security-token", "")
        if time.monotonic() > self._tokens.get(token, float("inf")):
            return self._refuse(400, "ExpiredToken", "The provided token has expired.")
        reset = draw.random() if draw.random() < faults.reset else 1.0
        if reset < 0.5:
            return self._reset("reset before")
        answer = self._listed(request) or self._forward(request)
        return self._reset("reset after") if reset < 1.0 else answer

    def _credentials(self) -> bytes:
        token = f"token-{next(self._numbers)}"
        self._tokens[token] = time.monotonic() + self.faults.lasting_s
        expires = datetime.now(UTC) + timedelta(seconds=self.faults.lasting_s)
        self.counts["credentials"] += 1
        return json.dumps(
            {
                "AccessKeyId": self._gateway.access_key,
                "SecretAccessKey": self._gateway.secret_key,
                "Token": token,
                "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        ).encode()

    def _listed(self, request: Request) -> Answer | None:
        """Return a listing that may be stale, or None for another request."""
        if request.method != "GET" or "list-type=2" not in request.path or not self.faults.stale_s:
            return None
        now = time.monotonic()
        taken, answer = self._listings.get(request.path, (0.0, Answer()))
        if now - taken > self.faults.stale_s:
            answer = self._forward(request)
            self._listings[request.path] = (now, answer)
            return answer
        self.counts["stale"] += 1
        return answer

    def _forward(self, request: Request) -> Answer:
        """Return the server's answer to a request, signed with its own keys."""
        headers = {name: value for name, value in request.headers.items() if name not in _REPLACED}
        signed = AWSRequest(request.method, f"{self._gateway.endpoint}{request.path}", headers, request.body)
        keys = Credentials(self._gateway.access_key, self._gateway.secret_key)
        S3SigV4Auth(keys, "s3", "us-east-1").add_auth(signed)
        connection = http.client.HTTPConnection("127.0.0.1", self._gateway.port, timeout=30)
        try:
            connection.request(request.method, request.path, request.body or None, dict(signed.headers.items()))
            response = connection.getresponse()
            kept = {name: value for name, value in response.getheaders() if name.lower() not in _DROPPED}
            return Answer(response.status, response.read(), kept)
        finally:
            connection.close()

    def _refuse(self, status: int, code: str, message: str) -> Answer:
        self.counts[code] += 1
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        return Answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _reset(self, what: str) -> Answer:
        self.counts[what] += 1
        return RESET


@contextmanager
def bad_day(gateway: Gateway, folder: Path) -> Iterator[BadDay]:
    """Run a proxy before a server; its clients find a token in the folder."""
    proxy = BadDay(gateway, folder)
    try:
        yield proxy
    finally:
        proxy.close()
