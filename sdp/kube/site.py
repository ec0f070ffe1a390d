"""The objects that the doctor checks, each read once, and the findings that it reports."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from sdp.errors import UserError, one_line
from sdp.kube import Object
from sdp.kube.api import Api, Forbidden, Missing, NoSuchKind
from sdp.kube.clusters import find_cluster, job_texts, jobs_map, yaml_entries
from sdp.kube.rayjob import JOBS_FOLDER


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: one line of output."""

    check: str
    state: Literal["ok", "warning", "failed"]
    says: str
    do: str = ""
    """The remedy; empty if none is needed."""

    def __str__(self) -> str:
        line = f"{self.state:8}{self.check}: {self.says}"
        return f"{line}; {self.do}" if self.do else line


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def warning(check: str, detail: str, remedy: str = "") -> Finding:
    return Finding(check, "warning", detail, remedy)


def failed(check: str, detail: str, remedy: str = "") -> Finding:
    return Finding(check, "failed", detail, remedy)


@dataclass
class Site:
    """A cluster as it exists, or as a rendered chart would create it."""

    api: Api
    cluster_name: str | None = None
    rendered: list[Object] = field(default_factory=list)
    """Manifests not applied yet; if empty, the existing objects are checked."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def cluster(self) -> Object:
        """The RayCluster; raises UserError if there is none."""
        for document in self.rendered:
            if document["kind"] == "RayCluster" and self.cluster_name in (None, document["metadata"]["name"]):
                return document
        if self.rendered:
            raise UserError("--manifest: expected a RayCluster in it, got none; helm template writes one")
        # In a pod, KubeRay names the pod's cluster; the account may read no other.
        own = not self.api.context and self.environ.get("RAY_CLUSTER_NAMESPACE") == self.api.namespace
        return find_cluster(self.api, self.cluster_name or (self.environ.get("RAY_CLUSTER_NAME") if own else None))

    @cached_property
    def cluster_or_none(self) -> Object | None:
        try:
            return self.cluster
        except UserError:
            return None

    @cached_property
    def nodes(self) -> list[Object]:
        return self.api.list("/api/v1/nodes")

    @cached_property
    def autoscalers(self) -> list[str]:
        """The names of the autoscalers that add nodes for waiting pods."""
        names = ["Karpenter"] if self.serves("/apis/karpenter.sh/v1") else []
        try:
            self.api.get("/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status")
        except (Forbidden, Missing):
            return names
        return [*names, "the cluster autoscaler"]

    @cached_property
    def texts(self) -> dict[str, str]:
        """The jobs' configurations, by name."""
        if self.cluster_or_none is None:
            return {}
        if self.rendered:
            return yaml_entries(self.rendered_object("ConfigMap", jobs_map(self.cluster_or_none) or "") or {})
        return job_texts(self.api, self.cluster_or_none)

    def rendered_object(self, kind: str, name: str) -> Object | None:
        """Return an object of the rendered manifests; None if they do not contain it."""
        of_kind = [document for document in self.rendered if document["kind"] == kind]
        return next((document for document in of_kind if document["metadata"]["name"] == name), None)

    def serves(self, path: str, resource: str = "") -> bool:
        """Return whether the API server serves a group, or a resource in it."""
        try:
            group: dict[str, Any] = self.api.get(path)
        except (NoSuchKind, Missing):
            return False
        return not resource or resource in {resource_type["name"] for resource_type in group.get("resources") or ()}


def read_manifests(text: str, name: str) -> list[Object]:
    """Parse a file that `helm template` wrote."""
    try:
        objects = [document for document in yaml.safe_load_all(text) if document]
    except yaml.YAMLError as error:
        raise UserError(f"--manifest: {name}: expected YAML ({one_line(error)})") from error
    if not all(isinstance(document, dict) and "kind" in document for document in objects):
        raise UserError(f"--manifest: {name}: expected Kubernetes objects; helm template writes them")
    return objects


def mounted_texts(folder: Path | None = None) -> dict[str, str]:
    """Return the jobs' configurations in a pod of the chart; {} elsewhere."""
    return {path.stem: path.read_text("utf-8") for path in sorted((folder or Path(JOBS_FOLDER)).glob("*.yaml"))}
