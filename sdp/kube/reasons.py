"""The reason why a cluster lacks pods, as the scheduler, the kubelet, KubeRay and a queue report it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from sdp.errors import SdpError, one_line
from sdp.kube import Finding, Object
from sdp.kube.api import Api
from sdp.kube.state import ClusterState

KUEUE = ("/apis/kueue.x-k8s.io/v1beta2", "/apis/kueue.x-k8s.io/v1beta1")
_STUCK = {
    "ImagePullBackOff": "check image, tag and imagePullSecrets",
    "ErrImagePull": "check image, tag and imagePullSecrets",
    "InvalidImageName": "check image.repository and image.tag",
    "CrashLoopBackOff": "kubectl logs --previous shows the reason",
    "CreateContainerConfigError": "an object that it refers to is missing",
}


def reason_of(api: Api, raycluster: Object, state: ClusterState) -> str:
    """Return why a cluster is not ready or lacks workers, in one line; empty if it lacks nothing."""
    lacks = state.state != "ready" or state.workers < state.wanted
    with suppress(SdpError):
        if state.state == "suspended":
            return queued(api, raycluster) or state.message
        if lacks and not state.refused:
            pods = pods_of(api, state.name)
            for finding in sorted(stuck_pods(pods), key=lambda finding: finding.state):
                return finding.says
            if len(pods) <= state.wanted:  # the head is one of them
                return _last_warning(api, raycluster) or state.message
    return state.message


def pods_of(api: Api, cluster: str) -> list[Object]:
    """Return a cluster's pods."""
    return api.list(api.path("pods", group="/api/v1"), labelSelector=f"ray.io/cluster={cluster}")


def stuck_pods(pods: Sequence[Object]) -> Iterator[Finding]:
    """Yield what keeps pods from running."""
    for pod in pods:
        status, name = pod.get("status") or {}, pod["metadata"]["name"]
        for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if (reason := waiting.get("reason")) in _STUCK:
                words = one_line(waiting.get("message") or "no message", 200)
                yield Finding("pods", "failed", f"{name}: {reason} ({words})", _STUCK[reason])
        for condition in status.get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                words = one_line(condition.get("message") or "")
                yield Finding("pods", "warning", f"{name} is not scheduled: {words}", "kubectl describe pod shows more")


def queued(api: Api, item: Object) -> str:
    """Return why Kueue has not admitted a RayJob or RayCluster; empty if it is in no queue of Kueue."""
    name = item["metadata"]["name"]
    for group in KUEUE:
        with suppress(SdpError):
            for workload in api.list(api.path("workloads", group=group)):
                if name in (owner["name"] for owner in workload["metadata"].get("ownerReferences") or ()):
                    for condition in (workload.get("status") or {}).get("conditions") or ():
                        if condition["type"] == "QuotaReserved" and condition["status"] == "False":
                            return f"queued by Kueue: {one_line(condition.get('message') or '')}"
            return ""
    return ""


def _last_warning(api: Api, item: Object) -> str:
    """Return the newest event of type Warning of an object."""
    selector = f"involvedObject.uid={item['metadata'].get('uid', '')},type=Warning"
    events = api.list(api.path("events", group="/api/v1"), fieldSelector=selector)
    newest = max(events, key=_moment, default={})
    return one_line(newest.get("message") or "")


def _moment(event: Object) -> str:
    series = event.get("series") or {}
    return series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
