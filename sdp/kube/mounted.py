"""A pod's files with the jobs' configurations: a kubelet renews them up to 90 seconds after the ConfigMap."""

import time
from collections.abc import Sequence
from pathlib import Path

from sdp.console import say, starting
from sdp.errors import SdpError
from sdp.kube.rayjob import JOBS_FOLDER

READER = Path("/etc/sdp/reader")
"""Credentials for reading the ConfigMap, whose name is the context's; the chart mounts them in the head."""
RENEWED_S, ASK_S = 300.0, 3.0
"""Longest wait for the kubelet, and the interval of checks."""


def wait_for_configuration(words: Sequence[str]) -> None:
    """Wait until a job's configuration file is the one that the API server has.

    Returns at once if the configuration came with the job, or if the pod may not ask.
    """
    file = Path(words[words.index("--config") + 1]) if "--config" in words else Path()
    if file.parent != Path(JOBS_FOLDER) or not (READER / "token").is_file():
        return
    from sdp.kube.access import connect
    from sdp.kube.api import Unreachable
    from sdp.kube.clusters import yaml_entries

    deadline, older = time.monotonic() + RENEWED_S, False
    with starting(words[0], f"waiting for the newest {file}, which the node renews within 90 s"):
        while time.monotonic() < deadline:
            try:
                api = connect(environ={"KUBECONFIG": str(READER / "kubeconfig")})
                wanted = yaml_entries(api.get(api.path("configmaps", api.context, "/api/v1"))).get(file.stem)
                older = wanted != _text(file)
                if not older:
                    return
            except SdpError as error:
                if not (older and isinstance(error, Unreachable)):
                    say(f"supervisor: {file} may be older than the chart's release: {str(error).partition(';')[0]}")
                    return
            time.sleep(ASK_S)
    raise SdpError(f"{file} is older than its ConfigMap, and its node does not renew it; sdp submit sends the new one")


def _text(file: Path) -> str | None:
    try:
        return file.read_bytes().decode()
    except FileNotFoundError:
        return None
