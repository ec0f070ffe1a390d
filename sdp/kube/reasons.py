"""The reason why a cluster lacks pods, as the scheduler, the kubelet, KubeRay and a queue report it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from sdp.errors import SdpError, one_line
from sdp.kube import Finding, Object
from sdp.kube.api import Api
from sdp.kube.state import ClusterState

KUEUE = ("/apis/kueue.x-k8s.io/v1beta2", "/apis/kueue.x-k8s.io/v1beta1")
_HEAD_CHECK = "wait-gcs-ready"
"""KubeRay's init container of workers."""
_STUCK = {
    "ImagePullBackOff": "check image, tag and imagePullSecrets",
    "ErrImagePull": "check image, tag and imagePullSecrets",
    "InvalidImageName": "check image.repository and image.tag",
    "CrashLoopBackOff": "kubectl logs --previous shows the reason",
    "CreateContainerConfigError": "an object that it refers to is missing",
}


@dataclass
class Reasons:
    """The reasons in one namespace, whose queue is listed once."""

    api: Api

    def of(self, raycluster: Object, state: ClusterState, pods: Sequence[Object] | None = None) -> str:
        """Return why a cluster is not ready or lacks workers, in one line; empty if it lacks nothing.

        Without the cluster's `pods`, this lists them.
        """
        lacks = state.state != "ready" or state.workers < state.wanted
        with suppress(SdpError):
            if state.state == "suspended":
                return self.queued(raycluster) or state.message
            if lacks and not state.refused:
                pods = pods_of(self.api, state.name) if pods is None else pods
                if stuck := list(stuck_pods(pods)):
                    return min(stuck, key=lambda finding: finding.state).says  # "failed" before "warning"
                if len(pods) <= state.wanted:  # the head is one of them
                    return _last_warning(self.api, raycluster) or state.message
        return state.message

    def queued(self, item: Object) -> str:
        """Return why Kueue has not admitted a RayJob or RayCluster; empty if it is in no queue of Kueue."""
        return self._refusals.get(item["metadata"]["name"], "")

    @cached_property
    def _refusals(self) -> dict[str, str]:
        """The reasons of Kueue, by the names of what waits for it."""
        for group in KUEUE:
            with suppress(SdpError):
                return {
                    owner["name"]: f"queued by Kueue: {one_line(condition.get('message') or '')}"
                    for workload in self.api.list(self.api.path("workloads", group=group))
                    for condition in (workload.get("status") or {}).get("conditions") or ()
                    if condition["type"] == "QuotaReserved" and condition["status"] == "False"
                    for owner in workload["metadata"].get("ownerReferences") or ()
                }
        return {}


def pods_of(api: Api, cluster: str) -> list[Object]:
    """Return a cluster's pods."""
    return api.list(api.path("pods", group="/api/v1"), labelSelector=f"ray.io/cluster={cluster}")


def stuck_pods(pods: Sequence[Object]) -> Iterator[Finding]:
    """Yield what keeps pods from running."""
    for pod in pods:
        status, name = pod.get("status") or {}, pod["metadata"]["name"]
        for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
            waiting = (container.get("state") or {}).get("waiting") or {}
            reason = waiting.get("reason")
            # A worker's check for the head crashes for as long as there is none: the head's pod says why.
            if reason in _STUCK and (container.get("name"), reason) != (_HEAD_CHECK, "CrashLoopBackOff"):
                words = one_line(waiting.get("message") or "no message", 200)
                yield Finding("pods", "failed", f"{name}: {reason} ({words})", _STUCK[reason])
        for condition in status.get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                words = one_line(condition.get("message") or "")
                yield Finding("pods", "warning", f"{name} is not scheduled: {words}", "kubectl describe pod shows more")


def _last_warning(api: Api, item: Object) -> str:
    """Return the newest event of type Warning of an object."""
    selector = f"involvedObject.uid={item['metadata'].get('uid', '')},type=Warning"
    events = api.list(api.path("events", group="/api/v1"), fieldSelector=selector)
    newest = max(events, key=_moment, default={})
    return one_line(newest.get("message") or "")


def _moment(event: Object) -> str:
    series = event.get("series") or {}
    return series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
