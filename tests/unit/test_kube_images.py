"""The doctor's look at images: names taken apart as docker does, and a registry asked as anybody may ask it."""

import socket

import pytest

from sdp.kube import check_images
from sdp.kube.check_images import Image, look, named_in, parse
from tests.image_registry import Asks, Registry
from tests.kube_server import group, raycluster

ECR = "111122223333.dkr.ecr.us-east-1.amazonaws.com"


@pytest.mark.parametrize(
    ("name", "image"),
    [
        (f"{ECR}/sdp/ray:0.1.0", Image(ECR, "sdp/ray", "0.1.0")),
        ("registry:5000/ray", Image("registry:5000", "ray", "latest")),
        ("localhost/ray:a", Image("localhost", "ray", "a")),
        ("ghcr.io/o/ray:a@sha256:ab", Image("ghcr.io", "o/ray", "sha256:ab")),
        ("python", Image("docker.io", "library/python", "latest")),
        ("rayproject/ray:2.60.0", Image("docker.io", "rayproject/ray", "2.60.0")),
    ],
)
def test_an_image_s_name_is_taken_apart_as_docker_does(name: str, image: Image) -> None:
    assert parse(name) == image


def test_docker_s_own_registry_has_another_name_and_only_this_machine_s_is_asked_without_tls() -> None:
    assert parse("python").url == "https://registry-1.docker.io/v2/library/python/manifests/latest"
    assert parse("localhost:5000/ray").url == "http://localhost:5000/v2/ray/manifests/latest"
    assert parse("127.0.0.1.example.org/ray").url.startswith("https://")


@pytest.mark.parametrize(
    ("asks", "tag", "state", "says"),
    [
        ("nothing", "1", "ok", "is in its registry"),
        ("nothing", "2", "failed", "is not in its registry; push it, or mend image.repository and image.tag"),
        ("token", "1", "ok", "is in its registry"),
        ("token", "2", "failed", "is not in its registry"),
        ("other token", "1", "warning", "wants a login; docker manifest inspect "),
        ("login", "1", "warning", "is unchecked: "),
    ],
)
def test_an_image_is_looked_for_without_a_login_and_unchecked_where_one_is_wanted(
    asks: Asks, tag: str, state: str, says: str
) -> None:
    with Registry({"sdp/ray:1"}, asks) as registry:
        found = look(f"{registry.host}/sdp/ray:{tag}")
        assert found.state == state
        assert says in str(found)
        assert len(registry.requests) <= 3
        assert any(line.startswith("GET /token?scope=") for line in registry.requests) == ("token" in asks)


def test_a_registry_that_is_not_there_or_says_nothing_is_a_warning_within_the_time_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_images, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}/ray:1"
        found = look(name)
    assert (found.state, "is unchecked" in found.says) == ("warning", True)
    assert look(name).says.endswith("gives no answer here ([Errno 111] Connection refused)")
    assert look("[/ray:1").state == "warning"


def test_how_to_look_with_one_s_own_login_is_said_for_ecr_as_well() -> None:
    image = parse(f"{ECR}/sdp/ray:0.1.0")
    assert check_images._by_hand(image, "x") == (
        "aws ecr describe-images --region us-east-1 --repository-name sdp/ray --image-ids imageTag=0.1.0 "
        "looks with your own login"
    )
    assert "imageDigest=sha256:ab" in check_images._by_hand(parse(f"{ECR}/sdp/ray@sha256:ab"), "x")


def test_a_token_is_fetched_from_nowhere_that_has_no_tls() -> None:
    image = parse("ghcr.io/o/ray:1")
    asked = check_images._where_tokens_are
    assert asked('Bearer realm="https://ghcr.io/token",service="ghcr.io"', image) == (
        "https://ghcr.io/token?scope=repository%3Ao%2Fray%3Apull&service=ghcr.io"
    )
    assert asked('Bearer realm="http://example.org/token"', image) == ""
    assert asked('Bearer realm="file:///etc/passwd"', image) == ""
    assert asked('Basic realm="x"', image) == ""


def test_each_image_of_a_cluster_is_looked_for_once() -> None:
    cluster = raycluster(group("cpu"), group("other"))
    for each in cluster["spec"]["workerGroupSpecs"]:
        each["template"]["spec"]["containers"][0]["image"] = "r/ray:1"
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["initContainers"] = [{"image": "busybox"}]
    cluster["spec"]["autoscalerOptions"] = {"image": "r/ray:2"}
    assert named_in(cluster) == {"r/ray:1", "r/ray:2", "busybox"}
