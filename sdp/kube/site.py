"""What the doctor's checks look at, each thing read once: a RayCluster, its nodes, its jobs' configurations."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from sdp.errors import UserError, one_line
from sdp.kube.answers import Forbidden, Missing, NoSuchKind
from sdp.kube.api import Api, Object
from sdp.kube.clusters import find_cluster, job_texts, jobs_map
from sdp.kube.rayjob import JOBS_FOLDER


@dataclass
class Site:
    """A cluster as it is, or as a rendered chart would make it."""

    api: Api
    cluster_name: str | None = None
    rendered: list[Object] = field(default_factory=list)
    """Manifests that are not applied yet; none looks at what is there."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def cluster(self) -> Object:
        """The RayCluster; UserError where there is none."""
        for each in self.rendered:
            if each.get("kind") == "RayCluster" and self.cluster_name in (None, each["metadata"]["name"]):
                return each
        if self.rendered:
            raise UserError("--manifest: expected a RayCluster in it, got none; helm template makes one")
        return find_cluster(self.api, self.cluster_name or self._own_cluster)

    @property
    def _own_cluster(self) -> str | None:
        """The cluster that this pod is one of, which KubeRay tells each; its account may look at no other."""
        here = not self.api.context and self.environ.get("RAY_CLUSTER_NAMESPACE") == self.api.namespace
        return self.environ.get("RAY_CLUSTER_NAME") if here else None

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
    def operators(self) -> list[Object]:
        """The deployments of KubeRay's operator, in whichever namespace."""
        wanted = "app.kubernetes.io/name in (kuberay-operator,kuberay)"
        return self.api.list("/apis/apps/v1/deployments", labelSelector=wanted)

    @cached_property
    def makers_of_nodes(self) -> list[str]:
        """Who would add nodes when pods wait for some."""
        makers = []
        if self.serves("/apis/karpenter.sh/v1"):
            makers.append("Karpenter")
        try:
            self.api.get("/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status")
            makers.append("the cluster autoscaler")
        except (Forbidden, Missing):
            return makers
        return makers

    @cached_property
    def texts(self) -> dict[str, str]:
        """The jobs' configurations, by name."""
        cluster = self.cluster_or_none
        if cluster is None:
            return {}
        if self.rendered:
            found = self.made("ConfigMap", jobs_map(cluster) or "")
            data = (found or {}).get("data") or {}
            return {key.removesuffix(".yaml"): text for key, text in data.items() if key.endswith(".yaml")}
        return job_texts(self.api, cluster)

    def made(self, kind: str, name: str) -> Object | None:
        """An object that the manifests would make."""
        found = (each for each in self.rendered if each.get("kind") == kind and each["metadata"]["name"] == name)
        return next(found, None)

    def serves(self, path: str, resource: str = "") -> bool:
        """Whether the API server knows a group, or a resource in it."""
        try:
            listed: dict[str, Any] = self.api.get(path)
        except (NoSuchKind, Missing):
            return False
        return not resource or resource in {each["name"] for each in listed.get("resources") or ()}


def read_manifests(text: str, name: str) -> list[Object]:
    """The objects of a file that `helm template` wrote."""
    try:
        found = [each for each in yaml.safe_load_all(text) if each]
    except yaml.YAMLError as error:
        raise UserError(f"--manifest: {name}: expected YAML ({one_line(error)})") from error
    if not all(isinstance(each, dict) and "kind" in each for each in found):
        raise UserError(f"--manifest: {name}: expected Kubernetes objects; helm template writes them")
    return found


def mounted_texts(folder: Path | None = None) -> dict[str, str]:
    """The jobs' configurations in a pod of the chart's; {} anywhere else."""
    folder = folder or Path(JOBS_FOLDER)
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(_yaml(folder))}


def _yaml(folder: Path) -> Iterable[Path]:
    return folder.glob("*.yaml") if folder.is_dir() else ()
