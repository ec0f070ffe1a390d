"""Ray's job API in the head, through a port that the API server forwards, so that no NetworkPolicy blocks it."""

import base64
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import websocket
from urllib3.exceptions import HTTPError

from sdp.errors import SdpError, UserError, one_line
from sdp.kube import Object
from sdp.kube.api import Api, Forbidden, ForwardedPort, Missing, Unreachable
from sdp.kube.clusters import token_secret

PORT = 8265
TOKEN_KEY = "auth_token"
TOKEN_ENV = "RAY_AUTH_TOKEN"
"""Ray's name for the token's variable."""


class RayRefused(SdpError):
    """The head refused a request."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Dashboard:
    """The job API of one cluster's head, whose pod is looked up for each connection, since heads are replaced."""

    def __init__(self, api: Api, cluster: str, environ: Mapping[str, str] = os.environ) -> None:
        self._api, self.cluster, self._environ = api, cluster, environ

    def stop(self, submission: str) -> bool:
        """Tell a job to stop; return False if there is nothing to stop."""
        return bool((self._json("POST", f"/api/jobs/{quote(submission, safe='')}/stop") or {}).get("stopped"))

    def log(self, submission: str, *, lines: int = -1) -> Any:
        """Open a job's log, whole or its last lines, and return urllib3's response."""
        job = self._json("GET", f"/api/jobs/{quote(submission, safe='')}")
        if job is None:
            raise RayRefused(404, "it has no record of the job, and may have been replaced")
        query = {"node_id": job["driver_node_id"], "submission_id": submission, "lines": str(lines), "timeout": "30"}
        return self._open("GET", f"/api/v0/logs/file?{urlencode(query)}", self._api.timing.quiet_s)

    def tail(self, submission: str) -> Iterator[bytes]:
        """Yield a job's log from its beginning until the job ends."""
        port, headers = self._connect()
        path = f"/api/jobs/{quote(submission, safe='')}/logs/tail"
        connection: Any = websocket.create_connection(
            f"ws://localhost{path}",
            socket=port.socket(),
            header=[f"{name}: {value}" for name, value in headers.items()],
            timeout=self._api.timing.quiet_s,
        )
        try:
            while text := connection.recv():
                yield text.encode() if isinstance(text, str) else text
        finally:
            connection.shutdown()

    def _json(self, method: str, path: str) -> Object | None:
        try:
            with self._open(method, path, self._api.timing.answer_s) as response:
                data: Object = json.loads(response.data)
        except RayRefused as error:
            if error.status == 404:
                return None
            raise
        except (HTTPError, OSError) as error:
            raise self._silent(error) from error
        except ValueError:
            raise Unreachable(
                f"ray: the head of {self.cluster!r} sent a response that is not JSON; try again"
            ) from None
        return data

    def _connect(self) -> tuple[ForwardedPort, dict[str, str]]:
        """Forward the head's port; return it with the headers that requests need."""
        headers = self._token(self._api.get(self._api.path("rayclusters", self.cluster)))
        return self._api.forward(self.head_pod(), PORT), headers

    def _open(self, method: str, path: str, quiet_s: float) -> Any:
        port, headers = self._connect()
        try:
            response = port.urlopen(method, path, headers=headers, timeout=quiet_s, preload_content=False)
        except HTTPError as error:
            raise self._silent(port.error() or error) from error
        if response.status >= 400:
            with response:
                raise self._refusal(response.status, response.data)
        return response

    def _refusal(self, status: int, body: bytes) -> SdpError:
        text = one_line(body.decode("utf-8", "replace"))
        if status in (401, 403):
            return UserError(
                f"ray: the head of {self.cluster!r} refuses the token of its secret, or of {TOKEN_ENV} ({status}); "
                "restart pods that are older than the secret"
            )
        return RayRefused(status, f"ray: the head of {self.cluster!r} says: {text[-300:]} ({status})")

    def head_pod(self) -> str:
        """Return the head's running pod."""
        selector = f"ray.io/cluster={self.cluster},ray.io/node-type=head"
        for pod in self._api.list(self._api.path("pods", group="/api/v1"), labelSelector=selector):
            if (pod.get("status") or {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
                return str(pod["metadata"]["name"])
        raise Unreachable(f"ray: the head of {self.cluster!r} is not running; sdp status shows the cluster")

    def _token(self, cluster: Object) -> dict[str, str]:
        """Return the header for a cluster's token."""
        secret = token_secret(cluster)
        if secret is None:
            return {}
        token = self._environ.get(TOKEN_ENV, "")
        try:
            data = self._api.get(self._api.path("secrets", secret, "/api/v1")).get("data") or {}
            token = base64.b64decode(data.get(TOKEN_KEY, "")).decode().strip() or token
        except (Forbidden, Missing) as error:
            if not token:
                raise UserError(
                    f"ray: the cluster's token is in secret {secret!r}, which cannot be read ({error}); "
                    f"ask for the right, or set {TOKEN_ENV}"
                ) from error
        return {"x-ray-authorization": f"Bearer {token}"} if token else {}

    def _silent(self, error: object) -> Unreachable:
        cause = one_line(error) or type(error).__name__
        return Unreachable(f"ray: the head of {self.cluster!r} does not answer ({cause}); try again")
