"""Ray's job API in a cluster's head, through a port that the API server forwards: no NetworkPolicy blocks it."""

import base64
import contextlib
import http.client
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import websocket

from sdp.errors import SdpError, UserError, one_line
from sdp.kube import Object
from sdp.kube.api import ANSWER_S, Api, Forbidden, Missing, Unreachable

PORT = 8265
TOKEN_ENV = "RAY_AUTH_TOKEN"
"""Ray's name for the token's variable."""
LAST_LINES = 1000
QUIET_S = 60.0
"""Time without a byte after which a log's connection is replaced."""


class RayHead:
    """One connection to the job API of a cluster's head. Heads are replaced, so each use makes a new one."""

    def __init__(self, api: Api, cluster: str) -> None:
        self._cluster = cluster
        self._headers = _token(api, api.get(api.path("rayclusters", cluster)))
        self.pod, self._address = head_pod(api, cluster)
        self._socket = api.forward(self.pod, PORT)

    def log(self, submission: str) -> str:
        """Return a job's log so far."""
        return str(self._ask("GET", _path(submission, "logs"))["logs"])

    def last_lines(self, submission: str) -> list[str]:
        """Return the end of a job's log."""
        query = f"node_ip={quote(self._address)}&submission_id={quote(submission)}&lines={LAST_LINES}"
        return self._text("GET", f"/api/v0/logs/file?{query}").splitlines()

    def record(self, submission: str) -> Object:
        """Return what Ray has recorded of a job."""
        record: Object = self._ask("GET", _path(submission))
        return record

    def stop(self, submission: str) -> bool:
        """Tell a job to stop; return False if there is nothing to stop."""
        return bool(self._ask("POST", _path(submission, "stop"))["stopped"])

    def listed(self, path: str) -> "list[Object]":
        """Return what the dashboard lists under a path."""
        answer = self._ask("GET", path)
        return answer if isinstance(answer, list) else answer["data"]["result"]["result"]

    def tail(self, submission: str) -> Iterator[bytes]:
        """Yield a job's log from its beginning until the job ends; TimeoutError if it is silent for long."""
        self._socket.settimeout(QUIET_S)
        url = f"ws://localhost{_path(submission, 'logs/tail')}"
        header = [f"{name}: {value}" for name, value in self._headers.items()]
        with self._explained():
            connection: Any = websocket.create_connection(url, socket=self._socket, header=header)
            with contextlib.closing(connection):
                while text := connection.recv():
                    yield text.encode() if isinstance(text, str) else text

    def _ask(self, method: str, path: str) -> Any:
        text = self._text(method, path)
        with self._explained():
            return json.loads(text)

    def _text(self, method: str, path: str) -> str:
        connection = http.client.HTTPConnection("localhost", PORT)
        connection.sock = self._socket
        connection.sock.settimeout(ANSWER_S)
        with self._explained(), contextlib.closing(connection):
            connection.request(method, path, headers=self._headers)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
            if response.status >= 400:
                raise self._refusal(response.status, one_line(text))
            return text

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except websocket.WebSocketTimeoutException as error:
            raise TimeoutError from error
        except websocket.WebSocketBadStatusException as error:
            raise self._refusal(error.status_code, one_line(error.resp_body or "")) from error
        except (http.client.HTTPException, websocket.WebSocketException, OSError, ValueError) as error:
            cause = one_line(error) or type(error).__name__
            raise Unreachable(f"ray: the head of {self._cluster!r} does not answer ({cause}); try again") from error

    def _refusal(self, status: int, words: str) -> SdpError:
        head = f"ray: the head of {self._cluster!r}"
        if status in (401, 403):
            return UserError(
                f"{head} refuses the token of its secret, or of {TOKEN_ENV} ({status}); "
                "restart pods that are older than the secret"
            )
        if status == 404:
            return Missing(f"{head} has no record of the job; it may have been replaced, and the log is lost")
        return SdpError(f"{head} says: {words[-300:]} ({status})")


def _path(submission: str, what: str = "") -> str:
    return f"/api/jobs/{quote(submission, safe='')}/{what}".rstrip("/")


def head_pod(api: Api, cluster: str) -> tuple[str, str]:
    """Return the head's running pod, and its address."""
    selector = f"ray.io/cluster={cluster},ray.io/node-type=head"
    for pod in api.list(api.path("pods", group="/api/v1"), labelSelector=selector):
        status = pod.get("status") or {}
        if status.get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return str(pod["metadata"]["name"]), str(status.get("podIP", ""))
    raise Unreachable(f"ray: the head of {cluster!r} is not running; sdp status shows the cluster")


def _token(api: Api, cluster: Object) -> dict[str, str]:
    """Return the header for a cluster's token."""
    auth = cluster["spec"].get("authOptions")
    if not auth or auth.get("mode", "token") == "disabled":
        return {}
    token = os.environ.get(TOKEN_ENV, "")
    secret = str(auth.get("secretName") or cluster["metadata"]["name"])
    try:
        data = api.get(api.path("secrets", secret, "/api/v1")).get("data") or {}
        token = base64.b64decode(data.get("auth_token", "")).decode(errors="ignore").strip() or token
    except (Forbidden, Missing) as error:
        if not token:
            raise UserError(
                f"ray: the cluster's token is in secret {secret!r}, which cannot be read ({error}); "
                f"ask for the right, or set {TOKEN_ENV}"
            ) from error
    return {"x-ray-authorization": f"Bearer {token}"}
