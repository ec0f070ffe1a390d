"""A pod's files with the jobs' configurations: a kubelet renews them up to 90 seconds after the ConfigMap."""

import json
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from sdp.console import say, starting
from sdp.errors import SdpError, one_line
from sdp.kube.rayjob import JOBS_FOLDER

READER = Path("/etc/sdp/reader")
"""The ConfigMap's name, and a token for reading it; the chart mounts them in the head."""
SERVER = "https://kubernetes.default.svc"
ANSWER_S, RENEWED_S, ASK_S = 10.0, 300.0, 3.0
"""Longest waits for an answer and for the kubelet, and the interval of checks."""


def wait_for_configuration(words: Sequence[str]) -> None:
    """Wait until a job's mounted configuration file is as new as the API server's.

    Returns at once if the configuration came with the job, or if the pod may not ask.
    """
    file = Path(words[words.index("--config") + 1]) if "--config" in words else Path()
    if file.parent != Path(JOBS_FOLDER) or not (READER / "token").is_file():
        return
    deadline, older = time.monotonic() + RENEWED_S, False
    with starting(words[0], f"waiting for the newest {file}, which the node renews within 90 s"):
        while time.monotonic() < deadline:
            try:
                older = _current().get(file.name) != _text(file)
                if not older:
                    return
            except (OSError, ValueError) as error:
                if not older or (isinstance(error, HTTPError) and error.code < 500):
                    cause = f"the API server: {one_line(error)}"
                    say(f"supervisor: {file} may be older than the chart's release ({cause})")
                    return
            time.sleep(ASK_S)
    raise SdpError(f"{file} is older than its ConfigMap, and its node does not renew it; sdp submit sends the new one")


def _current() -> Mapping[str, str]:
    """Return the ConfigMap's files. The official client would take a second of CPU to import, in each job."""
    token, namespace, name = ((READER / part).read_text().strip() for part in ("token", "namespace", "jobs"))
    tls = ssl.create_default_context(cafile=READER / "ca.crt")
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT  # which many clusters' authorities fail
    url = f"{SERVER}/api/v1/namespaces/{namespace}/configmaps/{name}"
    request = Request(url, headers={"Authorization": f"Bearer {token}"})
    with build_opener(ProxyHandler({}), HTTPSHandler(context=tls)).open(request, timeout=ANSWER_S) as answer:
        return json.load(answer).get("data") or {}


def _text(file: Path) -> str | None:
    try:
        return file.read_bytes().decode()
    except FileNotFoundError:
        return None
