"""Ray's job API in the head, reached through the API server: by port forwarding, or by its service proxy.

A forwarded port ends inside the pod, so no NetworkPolicy stands in its way; the proxy is for those who may not forward.
The cluster's token goes along as X-Ray-Authorization, since the API server keeps Authorization to itself.
"""

import base64
import http.client
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from sdp.errors import SdpError, UserError
from sdp.kube import wire
from sdp.kube.answers import Forbidden, Missing, Unreachable
from sdp.kube.api import Api, Object, Stream
from sdp.kube.clusters import token_secret
from sdp.kube.wire import Failures

PORT = 8265
PORT_NAME = "dashboard"
TOKEN_KEY = "auth_token"
TOKEN_ENV = "RAY_AUTH_TOKEN"
"""Ray's own name for it."""


class RayRefused(SdpError):
    """The head answered, and said no."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Dashboard:
    """The head of one cluster. Its pod is looked up anew for each connection: heads are moved."""

    def __init__(self, api: Api, cluster: str, environ: Mapping[str, str] = os.environ) -> None:
        self._api, self.cluster, self._environ = api, cluster, environ
        self._by_proxy = False

    # --- jobs ---

    def job(self, submission: str) -> Object | None:
        """What Ray knows of a job; None where it knows none of that id."""
        try:
            found: Object = self._ask("GET", f"/api/jobs/{quote(submission, safe='')}")
        except RayRefused as error:
            if error.status == 404:
                return None
            raise
        return found

    def stop(self, submission: str) -> bool:
        """Tell a job to stop; False where there is nothing to stop."""
        try:
            answer = self._ask("POST", f"/api/jobs/{quote(submission, safe='')}/stop")
        except RayRefused as error:
            if error.status == 404:
                return False
            raise
        return bool(answer.get("stopped"))

    def log(self, submission: str, node: str, *, lines: int = -1, follow: bool = False) -> Stream:
        """A job's log from its first byte, or its last lines; followed, it does not end by itself.

        `node` is the driver's: driver_node_id of what Ray knows of the job.
        """
        query = {"node_id": node, "submission_id": submission, "lines": str(lines), "timeout": "30"}
        if follow:
            query["interval"] = "0.5"
        return self._stream(f"/api/v0/logs/{'stream' if follow else 'file'}?{urlencode(query)}")

    # --- the way there ---

    def _ask(self, method: str, path: str) -> Any:
        stream = self._open(method, path, self._api.timing.answer_s)
        with stream:
            try:
                content = b"".join(iter(stream.read, b""))
                return json.loads(content)
            except Failures as error:
                raise self._silent(error) from error
            except ValueError:
                raise Unreachable(
                    f"ray: the head of {self.cluster!r} sent something that is not JSON; try again"
                ) from None

    def _stream(self, path: str) -> Stream:
        return self._open("GET", path, self._api.timing.quiet_s)

    def _open(self, method: str, path: str, quiet_s: float) -> Stream:
        cluster = self._api.get(self._api.mine("rayclusters", self.cluster))
        headers = self._token(cluster)
        try:
            if not self._by_proxy:
                try:
                    return self._forwarded(cluster, method, path, headers, quiet_s)
                except Forbidden:
                    self._by_proxy = True
            return self._proxied(cluster, method, path, headers, quiet_s)
        except Failures as error:
            raise self._silent(error) from error

    def _forwarded(self, cluster: Object, method: str, path: str, headers: Mapping[str, str], quiet_s: float) -> Stream:
        port = self._api.forward(self._head_pod(cluster), PORT)
        try:
            connection = wire.http_on(port, "localhost")
            connection.request(method, path, headers=dict(headers))
            port.settimeout(quiet_s)
            return self._answer(connection, port.sock)
        except BaseException:
            port.close()
            raise

    def _proxied(self, cluster: Object, method: str, path: str, headers: Mapping[str, str], quiet_s: float) -> Stream:
        head = (cluster.get("status") or {}).get("head") or {}
        service = head.get("serviceName") or f"{self.cluster}-head-svc"
        prefix = f"{self._api.mine('services', f'{service}:{PORT_NAME}', '/api/v1')}/proxy"
        connection, sock = self._api.send(method, prefix + path, headers, quiet_s)
        return self._answer(connection, sock)

    def _answer(self, connection: http.client.HTTPConnection, sock: Any) -> Stream:
        answer = connection.getresponse()
        if answer.status < 400:
            return Stream(connection, sock, answer)
        words = " ".join(answer.read(2000).decode("utf-8", "replace").split())
        connection.close()
        sock.close()
        if answer.status in (401, 403) and '"kind":"Status"' in words.replace(" ", ""):
            raise Forbidden(
                "kubernetes: neither pods/portforward (create) nor services/proxy (get, create) is allowed; ask for one"
            )
        if answer.status in (401, 403):
            raise UserError(
                f"ray: the head of {self.cluster!r} does not take the token of its secret, or of {TOKEN_ENV} "
                f"({answer.status}); pods that are older than the secret have to be made anew"
            )
        raise RayRefused(answer.status, f"ray: the head of {self.cluster!r} says: {words[-300:]} ({answer.status})")

    def _head_pod(self, cluster: Object) -> str:
        """The head's pod that is running now."""
        selector = f"ray.io/cluster={self.cluster},ray.io/node-type=head"
        try:
            pods = self._api.list(self._api.mine("pods", group="/api/v1"), labelSelector=selector)
        except Forbidden:
            pods = []
        running = [
            pod["metadata"]["name"]
            for pod in pods
            if (pod.get("status") or {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        named = ((cluster.get("status") or {}).get("head") or {}).get("podName")
        if running:
            return str(named if named in running else running[0])
        if named and not pods:
            return str(named)
        raise Unreachable(f"ray: the head of {self.cluster!r} is not running; sdp status shows the cluster")

    def _token(self, cluster: Object) -> dict[str, str]:
        """The header that a cluster with token authentication wants."""
        secret = token_secret(cluster)
        if secret is None:
            return {}
        token = self._environ.get(TOKEN_ENV, "")
        try:
            data = self._api.get(self._api.mine("secrets", secret, "/api/v1")).get("data") or {}
            token = base64.b64decode(data.get(TOKEN_KEY, "")).decode().strip() or token
        except (Forbidden, Missing) as error:
            if not token:
                raise UserError(
                    f"ray: the cluster's token is in secret {secret!r}, which cannot be read ({error}); "
                    f"or set {TOKEN_ENV} to it"
                ) from error
        return {"x-ray-authorization": f"Bearer {token}"} if token else {}

    def _silent(self, error: Exception) -> Unreachable:
        why = str(error) or type(error).__name__
        return Unreachable(f"ray: the head of {self.cluster!r} does not answer ({why}); try again")
