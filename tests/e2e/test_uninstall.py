"""Upgrading and uninstalling a release, after all other tests."""

from collections.abc import Callable

from tests.e2e.conftest import READY_S
from tests.e2e.kube import Kube, Object

KINDS = (
    "pods,services,configmaps,secrets,serviceaccounts,networkpolicies,poddisruptionbudgets,"
    "rayclusters,roles,rolebindings"
)
EXTRA = ("cpu=700m", "memory=2Gi", "shmSize=256Mi", "minReplicas=1", "maxReplicas=1")


def replicas(kube: Kube) -> dict[str, int]:
    """Return the number of pods that each group should have."""
    return {
        group["groupName"]: group["replicas"] for group in kube.get("raycluster", "sdp")["spec"]["workerGroupSpecs"]
    }


def going(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def test_an_upgrade_adds_a_group_and_leaves_running_pods_alone(cluster: Kube, helm: Callable[..., str]) -> None:
    idle = {"cpu": 0, "a10g": 1, "a100": 0}
    cluster.until(lambda: replicas(cluster) == idle, READY_S, "the autoscaler has taken away what nobody needs")
    old_pods = cluster.find("pods", "sdp/group in (head,cpu,a10g)")
    before = {pod["metadata"]["uid"] for pod in old_pods if not going(pod)}  # those are on their way out already
    # The autoscaler has also written to the list of groups, and Helm 4 asks which change wins.
    helm("upgrade", "--force-conflicts", *(word for setting in EXTRA for word in ("--set", f"groups.extra.{setting}")))

    def grown() -> bool:
        new_pods = cluster.find("pods", "sdp/group=extra")
        conditions = [condition for pod in new_pods for condition in pod["status"].get("conditions", ())]
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    cluster.until(grown, READY_S, "the new group has a pod")
    assert replicas(cluster) == {**idle, "extra": 1}, "those of the autoscaler are kept"
    assert before <= {pod["metadata"]["uid"] for pod in cluster.find("pods", "ray.io/cluster=sdp")}


def test_an_upgrade_that_needs_new_pods_leaves_them_until_requested(cluster: Kube, helm: Callable[..., str]) -> None:
    def pod(group: str) -> tuple[str, str, str]:
        """Return a pod's name, uid and environment variable MARK."""
        (one,) = [pod for pod in cluster.find("pods", f"sdp/group={group}") if not going(pod)]
        env = {variable["name"]: variable.get("value", "") for variable in one["spec"]["containers"][0]["env"]}
        return one["metadata"]["name"], one["metadata"]["uid"], env.get("MARK", "")

    name, uid, _ = pod("a10g")
    head = pod("head")
    change = ("upgrade", "--force-conflicts", "--set", "groups.a10g.env.MARK=new")
    assert "Running pods stay as they are" in helm(*change)
    assert pod("a10g") == (name, uid, "")
    cluster.run("delete", "pod", name, "--wait=true", timeout_s=120)

    def replaced_pods() -> bool:
        pods = [pod for pod in cluster.find("pods", "sdp/group=a10g") if not going(pod)]
        return len(pods) == 1 and pod("a10g")[2] == "new"

    cluster.until(replaced_pods, READY_S, "a pod of the new template is in its place")
    assert pod("head") == head


def test_uninstall_leaves_nothing_behind(cluster: Kube, helm: Callable[..., str]) -> None:
    cluster.run("delete", "rayjobs", "--all", "--wait=true")  # the release does not own these
    helm("uninstall")

    def left() -> list[str]:
        expected = {"storage", "pictures", "code", "default", "kube-root-ca.crt"}
        objects = cluster.get(KINDS)["items"]
        return [
            f"{one['kind']}/{one['metadata']['name']}" for one in objects if one["metadata"]["name"] not in expected
        ]

    cluster.until(lambda: not left(), 180, "nothing is left of the release")
