"""Whether the images that a rendered chart names are in their registry: asked without a login, as anybody may.

What pods that are there say of their images is in check_cluster. A registry that wants a login is not asked further:
the nodes' own rights count there, and ours say nothing of them.
"""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import urlencode, urlsplit

from sdp.errors import one_line
from sdp.kube.api import Object
from sdp.kube.clusters import templates
from sdp.kube.finding import Finding, failed, ok, warning
from sdp.kube.site import Site

PATIENCE_S = 10.0
"""For each of at most three answers of a registry."""
LONGEST_TOKEN = 1 << 20
_KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_ECR = re.compile(r"\d{12}\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com")
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_REFUSED = frozenset({401, 403})


@dataclass(frozen=True, slots=True)
class Image:
    """An image's name, taken apart as docker does."""

    registry: str
    repository: str
    reference: str
    """A tag, or a digest."""

    @property
    def url(self) -> str:
        host = "registry-1.docker.io" if self.registry == "docker.io" else self.registry
        return f"{scheme(host)}://{host}/v2/{self.repository}/manifests/{self.reference}"


def scheme(host: str) -> str:
    """A registry on this machine has seldom a certificate, and docker does not ask for it either."""
    name = urlsplit(f"//{host}").hostname or ""
    return "http" if name in _LOCAL else "https"


def parse(name: str) -> Image:
    """An image by its name, such as REGISTRY/FOLDER/ray:0.1.0 or python."""
    rest, _, digest = name.partition("@")
    first, slash, others = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry, rest = first, others
    else:
        registry = "docker.io"
    rest, _, tag = rest.partition(":")
    if registry == "docker.io" and "/" not in rest:
        rest = f"library/{rest}"
    return Image(registry, rest, digest or tag or "latest")


def images(site: Site) -> Iterator[Finding]:
    """That what is to be pulled is there to be pulled, before any pod tries."""
    cluster = site.cluster_or_none
    if cluster is None or not site.rendered:
        return
    for name in sorted(named_in(cluster)):
        yield look(name)


def named_in(cluster: Object) -> set[str]:
    """Each image that a cluster's pods are made from."""
    found = {(cluster["spec"].get("autoscalerOptions") or {}).get("image", "")}
    for _, pod in templates(cluster):
        for container in [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]:
            found.add(container.get("image", ""))
    return found - {""}


def look(name: str) -> Finding:
    """Ask the registry for an image's manifest."""
    image = parse(name)
    try:
        status = _status(image)
    except (OSError, HTTPException, ValueError) as error:
        why = one_line(getattr(error, "reason", "") or error, 200) or type(error).__name__
        return warning(
            "image", f"{name} is unchecked: {image.registry} gives no answer here ({why})", _by_hand(image, name)
        )
    if status == 200:
        return ok("image", f"{name} is in its registry")
    if status == 404:
        return failed("image", f"{name} is not in its registry", "push it, or mend image.repository and image.tag")
    why = "wants a login" if status in _REFUSED else f"answers {status}"
    return warning("image", f"{name} is unchecked: {image.registry} {why}", _by_hand(image, name))


def _by_hand(image: Image, name: str) -> str:
    ecr = _ECR.fullmatch(image.registry)
    if ecr is None:
        return f"docker manifest inspect {name} looks with your own login"
    kind = "imageDigest" if ":" in image.reference else "imageTag"
    return (
        f"aws ecr describe-images --region {ecr['region']} --repository-name {image.repository} "
        f"--image-ids {kind}={image.reference} looks with your own login"
    )


def _status(image: Image) -> int:
    """What a registry says to who asks for a manifest, with the token that it gives to anybody."""
    status, challenge = _head(image.url, "")
    if status == 401 and (asked := _where_tokens_are(challenge, image)):
        token = _token(asked)
        if token:
            status, _ = _head(image.url, token)
    return status


def _head(url: str, token: str) -> tuple[int, str]:
    headers = {"Accept": ", ".join(_KINDS), **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers, method="HEAD"), timeout=PATIENCE_S
        ) as answer:
            return int(answer.status), ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("WWW-Authenticate", "")


def _where_tokens_are(challenge: str, image: Image) -> str:
    """The address of a token for anybody; empty where the registry takes no such thing, as ECR's does not."""
    kind, _, words = challenge.partition(" ")
    told = dict(re.findall(r'(\w+)="([^"]*)"', words))
    realm = told.get("realm", "")
    at = urlsplit(realm)
    if kind.lower() != "bearer" or at.scheme != scheme(at.netloc):
        return ""
    query = {"scope": told.get("scope") or f"repository:{image.repository}:pull"}
    if told.get("service"):
        query["service"] = told["service"]
    return f"{realm}{'&' if at.query else '?'}{urlencode(query)}"


def _token(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            told = json.loads(answer.read(LONGEST_TOKEN))
    except urllib.error.HTTPError as error:
        with error:
            return ""
    return str(told.get("token") or told.get("access_token") or "") if isinstance(told, dict) else ""
