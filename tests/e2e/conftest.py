"""One release of charts/sdp-cluster in a namespace of its own, and what its jobs leave behind, for all of tests/e2e.

Datasets are fixtures: a test asks for `latents` and gets them, made by jobs from manifests/ when the first one asks.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e import jobs, site
from tests.e2e.kube import Failed, Kube
from tests.e2e.settings import Settings, read_settings
from tests.programs import ended

CHART = jobs.ROOT / "charts" / "sdp-cluster"
VALUES = Path(__file__).parent / "values.yaml"
READY_S = 600.0
LAST = ("test_uninstall", "test_releases")
"""The files whose tests remove what the others use."""
PRODUCT = "nvidia.com/gpu.product"
ENCODER = "MapBatches(Encoder))"
QUEUE = """
- {apiVersion: kueue.x-k8s.io/v1beta2, kind: ResourceFlavor, metadata: {name: NAME}}
- {apiVersion: kueue.x-k8s.io/v1beta2, kind: LocalQueue, metadata: {name: gpus}, spec: {clusterQueue: NAME}}
- apiVersion: kueue.x-k8s.io/v1beta2
  kind: ClusterQueue
  metadata: {name: NAME}
  spec:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAME}}
    resourceGroups:
      - coveredResources: [nvidia.com/gpu, cpu, memory]
        flavors:
          - name: NAME
            resources:
              - {name: nvidia.com/gpu, nominalQuota: 8}
              - {name: cpu, nominalQuota: 99}
              - {name: memory, nominalQuota: 99Gi}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests so that the release is uninstalled last, and give each time for a job or two."""
    items.sort(key=lambda item: LAST.index(item.path.stem) if item.path.stem in LAST else -1)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(2400))


@pytest.fixture(scope="session")
def settings() -> Settings:
    return read_settings()


@pytest.fixture(scope="session")
def kube(settings: Settings) -> Iterator[Kube]:
    """Make a namespace of the *restricted* Pod Security standard, with the servers that the jobs need."""
    kube = Kube(f"sdp-e2e-{secrets.token_hex(3)}")
    kube.run("create", "namespace", kube.namespace)
    enforce(kube, "restricted")
    try:
        with _gpus(kube, settings), site.mounts(kube, settings):
            site.begin(kube, settings)
            yield kube
    finally:
        kube.run("delete", "rayjobs,rayclusters", "--all", "--wait=true", timeout_s=120)
        kube.run("delete", "namespace", kube.namespace, "--wait=true", timeout_s=180)


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(kube: Kube) -> Iterator[None]:
    """Delete the jobs of a failed test, which would take CPUs and memory from the next tests."""
    yield
    for job in kube.find("rayjob"):
        if job.get("status", {}).get("jobDeploymentStatus") not in ("Complete", "Failed"):
            kube.run("delete", "rayjob", job["metadata"]["name"], "--wait=true")


def enforce(kube: Kube, standard: str) -> None:
    kube.run("label", "--overwrite", "namespace", kube.namespace, f"pod-security.kubernetes.io/enforce={standard}")


@contextlib.contextmanager
def _gpus(kube: Kube, settings: Settings) -> Iterator[None]:
    """Make nodes report GPUs if the cluster has none."""
    if settings.fake_gpus is None:
        yield
        return
    fake_gpus(kube, settings)
    try:
        yield
    finally:
        for node in settings.fake_gpus:
            kube.run("label", "node", node, f"{PRODUCT}-")
            patch = '[{"op": "remove", "path": "/status/capacity/nvidia.com~1gpu"}]'
            kube.run("patch", "node", node, "--subresource=status", "--type=json", "-p", patch)


def fake_gpus(kube: Kube, settings: Settings) -> None:
    """Make the nodes report GPUs. A kubelet forgets them when it restarts."""
    assert settings.fake_gpus is not None
    for node, count, product in zip(settings.fake_gpus, (1, 8), ("NVIDIA-A10G", "NVIDIA-A100-SXM4-80GB"), strict=True):
        kube.run("label", "--overwrite", "node", node, f"{PRODUCT}={product}")
        patch = f'[{{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "{count}"}}]'
        kube.run("patch", "node", node, "--subresource=status", "--type=json", "-p", patch)


@pytest.fixture(scope="session")
def helm(
    tool: Callable[[str], Path], kube: Kube, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """`helm("upgrade", "--set", "…")` on the release `sdp`, always with the tests' values."""
    repository, _, tag = settings.image.rpartition(":")
    file = tmp_path_factory.mktemp("values") / "mounted.yaml"
    file.write_text(yaml.safe_dump({**settings.values, "volumes": site.volumes(settings)}))
    values = ["-f", str(VALUES), "-f", str(file)]
    values += ["--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}"]

    def run(verb: str, *words: str) -> str:
        made = [str(CHART), *values] if verb in ("install", "upgrade") else []
        done = ended([tool("helm"), verb, "sdp", *made, "-n", kube.namespace, *words], timeout=180)
        if done.returncode:
            raise Failed(f"helm {verb}: {done.stderr.strip()}")
        return done.stdout

    return run


@pytest.fixture(scope="session")
def notes(helm: Callable[..., str], kube: Kube) -> str:
    """Return the notes printed by `helm install`, once the cluster is ready."""
    printed = helm("install")
    kube.until(lambda: ready(kube, 1), READY_S, "the cluster is ready with a pod in a10g")
    return printed


@pytest.fixture(scope="session")
def cluster(notes: str, kube: Kube) -> Kube:  # noqa: ARG001 (it is there once these are)
    """Return the namespace once its cluster is ready."""
    return kube


def ready(kube: Kube, workers: int) -> bool:
    status = kube.get("raycluster", "sdp").get("status", {})
    return bool(status.get("state") == "ready" and status.get("readyWorkerReplicas", 0) >= workers)


@pytest.fixture
def queue(cluster: Kube, helm: Callable[..., str]) -> Iterator[None]:
    """Put jobs with own clusters into a queue of Kueue."""
    if not cluster.run("get", "crd", "clusterqueues.kueue.x-k8s.io", "--ignore-not-found"):
        pytest.skip("Kueue is not installed")
    cluster.apply(yaml.safe_load(QUEUE.replace("NAME", cluster.namespace)))
    helm("upgrade", "--force-conflicts", "--set-json", 'ownCluster.labels={"kueue.x-k8s.io/queue-name": "gpus"}')
    yield
    helm("upgrade", "--force-conflicts")
    cluster.run("delete", "localqueue/gpus", f"clusterqueue/{cluster.namespace}", f"resourceflavor/{cluster.namespace}")


@pytest.fixture(scope="session")
def where() -> dict[str, set[str]]:
    """The groups that a job's actors ran in, by job; looked up at once, since Ray's memory goes with its head."""
    return {}


@pytest.fixture(scope="session")
def images(cluster: Kube, where: dict[str, set[str]]) -> str:
    jobs.run(cluster, "download")
    where["download"] = jobs.groups(cluster, "MapBatches(Downloader))")
    return f"{jobs.OUTPUT}/images"


@pytest.fixture(scope="session")
def latents(cluster: Kube, images: str, where: dict[str, set[str]]) -> str:  # noqa: ARG001 (they are made from these)
    jobs.run(cluster, "process")
    where["process"] = jobs.groups(cluster, ENCODER)
    return f"{jobs.OUTPUT}/latents"


@pytest.fixture(scope="session")
def trained(cluster: Kube, latents: str, where: dict[str, set[str]]) -> str:  # noqa: ARG001 (it learns from these)
    jobs.run(cluster, "train")
    where["train"] = jobs.groups(cluster, "RayTrainWorker")
    return f"{jobs.OUTPUT}/run"
