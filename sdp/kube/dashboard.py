"""Ray's job API in the head, reached through the API server by port forwarding or by its service proxy.

A forwarded port ends inside the pod, so no NetworkPolicy blocks it; the proxy is for users who may not forward ports.
The cluster's token is sent as X-Ray-Authorization, since the API server consumes Authorization.
"""

import base64
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from sdp.errors import SdpError, UserError, one_line
from sdp.kube import Object
from sdp.kube.api import Api, Forbidden, Missing, Unreachable, status_object
from sdp.kube.clusters import token_secret

PORT = 8265
PORT_NAME = "dashboard"
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
        self._by_proxy = False

    def job(self, submission: str) -> Object | None:
        """Return Ray's record of a job; None if it has none."""
        return self._json("GET", f"/api/jobs/{quote(submission, safe='')}")

    def stop(self, submission: str) -> bool:
        """Tell a job to stop; return False if there is nothing to stop."""
        return bool((self._json("POST", f"/api/jobs/{quote(submission, safe='')}/stop") or {}).get("stopped"))

    def log(self, submission: str, node: str, *, lines: int = -1, follow: bool = False) -> Any:
        """Open a job's log, whole or its last lines, and return urllib3's response; a followed log does not end.

        `node` is the job's driver_node_id.
        """
        query = {"node_id": node, "submission_id": submission, "lines": str(lines), "timeout": "30"}
        if follow:
            query["interval"] = "0.5"
        path = f"/api/v0/logs/{'stream' if follow else 'file'}?{urlencode(query)}"
        return self._open("GET", path, self._api.timing.quiet_s)

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

    def _open(self, method: str, path: str, quiet_s: float) -> Any:
        """Send a request through a forwarded port, or by the proxy if forwarding is forbidden."""
        cluster = self._api.get(self._api.path("rayclusters", self.cluster))
        headers = self._token(cluster)
        if not self._by_proxy:
            try:
                port = self._api.forward(self._head_pod(), PORT)
            except Forbidden:
                self._by_proxy = True
        if self._by_proxy:
            head = (cluster.get("status") or {}).get("head") or {}
            service = head.get("serviceName") or f"{self.cluster}-head-svc"
            prefix = f"{self._api.path('services', f'{service}:{PORT_NAME}', '/api/v1')}/proxy"
            with self._api.explained(method, prefix):
                try:
                    return self._api.response(method, prefix + path, headers=headers, quiet_s=quiet_s)
                except ApiException as error:
                    if not error.status:
                        raise
                    raise self._refusal(error.status, error.body) from error
        try:
            response = port.urlopen(method, path, headers=headers, timeout=quiet_s, preload_content=False)
        except HTTPError as error:
            raise self._silent(port.error() or error) from error
        if response.status >= 400:
            with response:
                raise self._refusal(response.status, response.data)
        return response

    def _refusal(self, status: int, body: bytes | str | None) -> SdpError:
        text = one_line(body.decode("utf-8", "replace") if isinstance(body, bytes) else body or "")
        if status in (401, 403) and status_object(text):
            return Forbidden(
                "kubernetes: neither pods/portforward (create) nor services/proxy (get, create) is allowed; ask for one"
            )
        if status in (401, 403):
            return UserError(
                f"ray: the head of {self.cluster!r} refuses the token of its secret, or of {TOKEN_ENV} ({status}); "
                "restart pods that are older than the secret"
            )
        return RayRefused(status, f"ray: the head of {self.cluster!r} says: {text[-300:]} ({status})")

    def _head_pod(self) -> str:
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
