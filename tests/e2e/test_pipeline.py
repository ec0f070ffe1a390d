"""Helm install, and the pipeline from manifests/: each job ends well, where it should, and its output is whole."""

import json

from tests.e2e import jobs, site
from tests.e2e.conftest import ENCODER
from tests.e2e.kube import Kube

ASK = """
import sys, urllib.error, urllib.request
headers = dict(argument.split("=", 1) for argument in sys.argv[1:])
request = urllib.request.Request("http://localhost:8265/api/jobs/", headers=headers)
try:
    print(urllib.request.urlopen(request, timeout=30).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def test_the_release_becomes_a_ready_cluster_with_each_group_on_its_nodes(cluster: Kube, notes: str) -> None:
    assert f"sdp submit download --namespace {cluster.namespace} --cluster sdp" in notes
    products = {
        node["metadata"]["name"]: node["metadata"]["labels"].get("nvidia.com/gpu.product", "")
        for node in cluster.find("nodes")
    }
    where = {
        pod["metadata"]["labels"]["sdp/group"]: products[pod["spec"]["nodeName"]]
        for pod in cluster.find("pods", "ray.io/cluster=sdp")
    }
    assert (where["head"], where["a10g"]) == ("", "NVIDIA-A10G")


def test_a_process_in_the_image_compiles_no_python_again(cluster: Kube) -> None:
    imports = "python -v -c 'import ray, kubernetes, torch' 2>&1 | grep 'code object from .*site-packages'"
    loaded = cluster.run("exec", jobs.head(cluster), "-c", "ray-head", "--", "sh", "-c", imports).splitlines()
    assert loaded
    assert not [line for line in loaded if "__pycache__" not in line]


def test_a_request_without_a_token_is_refused(cluster: Kube) -> None:
    def answer(*headers: str) -> str:
        return cluster.python(jobs.head(cluster), ASK, *headers, container="ray-head").strip()

    token = cluster.run("get", "secret", "sdp", "-o", "go-template={{.data.auth_token | base64decode}}")
    assert answer() == "401"
    assert answer("Authorization=Bearer wrong") in ("401", "403")
    assert answer(f"Authorization=Bearer {token}") == "200"


def test_download_accounts_for_every_row_in_a_pod_that_came_for_it(
    cluster: Kube, images: str, where: dict[str, set[str]]
) -> None:
    description = jobs.inspect(cluster, images)
    counts = description["counts"]
    assert (description["complete"], description["problems"], counts["input"]) == (True, [], site.IMAGES)
    assert counts["written"] + counts["filtered"] + counts["failed"] == site.IMAGES
    assert counts["reasons"]["http_status"] > 0, "the server has refused some"
    assert where["download"] == {"cpu"}, "although the pod in a10g has a CPU, too"


def test_process_encodes_all_images_in_pods_of_the_a10g_group(
    cluster: Kube, images: str, latents: str, where: dict[str, set[str]]
) -> None:
    description = jobs.inspect(cluster, latents)
    assert (description["complete"], description["problems"]) == (True, [])
    assert description["counts"]["input"] == jobs.inspect(cluster, images)["counts"]["written"]
    assert description["counts"]["written"] > 0.8 * site.IMAGES
    assert where["process"] == {"a10g"}


def test_train_runs_in_a_pod_that_came_for_it_and_accounts_for_epochs(
    cluster: Kube, trained: str, latents: str, where: dict[str, set[str]]
) -> None:
    rows = jobs.inspect(cluster, latents)["counts"]["written"]
    run = jobs.inspect(cluster, trained)
    assert run["step"] == 40
    assert not {"recovered", "gave_up", "bad_step"} & run["history"].keys()
    consumed = list(run["newest"]["consumed"].values())
    assert consumed[:-1] == [rows] * (len(consumed) - 1), "each epoch but the last, every row once"
    assert sum(consumed) + run["newest"].get("skipped", 0) <= 40 * 32
    assert where["train"] == {"a100"}


def test_train_online_has_encoders_on_a10g_and_trainers_on_a100(cluster: Kube, images: str) -> None:
    jobs.run(cluster, "train-online")
    run = jobs.inspect(cluster, f"{jobs.OUTPUT}/run-online")
    assert run["step"] == 40
    rows = jobs.inspect(cluster, images)["counts"]["written"]
    assert next(iter(run["newest"]["consumed"].values())) in range(int(0.8 * rows), rows + 1)
    assert jobs.groups(cluster, "RayTrainWorker") == {"a100"}
    assert jobs.groups(cluster, ENCODER) == {"a10g"}


def test_generate_draws_the_requested_pictures(cluster: Kube, trained: str) -> None:
    jobs.run(cluster, "generate")
    description = jobs.inspect(cluster, f"{jobs.OUTPUT}/pictures")
    assert (description["complete"], description["counts"]["written"]) == (True, 2)
    assert trained in json.dumps(description)
