"""The settings for the cluster under test, from environment variables; docs/e2e.md is the manual."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

IMAGE = "SDP_E2E_IMAGE"
VALUES = "SDP_E2E_VALUES"
S3_IMAGE = "SDP_E2E_S3_IMAGE"
EXPORTER_IMAGE = "SDP_E2E_EXPORTER_IMAGE"
PROMETHEUS_IMAGE = "SDP_E2E_PROMETHEUS_IMAGE"
FAKE_GPUS = "SDP_E2E_FAKE_GPUS"
LOSE_NODE = "SDP_E2E_LOSE_NODE"
BRING_BACK = "SDP_E2E_BRING_BACK"


class SettingsError(Exception):
    """A required setting is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One cluster, as far as it differs from others."""

    image: str
    """The image of every Ray pod, built by images/ray/Dockerfile."""
    values: dict[str, Any]
    """Further values of the chart, over those of the tests."""
    values_file: Path | None
    s3_image: str
    """With versitygw as its entry point."""
    exporter_image: str
    """As images/exporter/Dockerfile builds it."""
    prometheus_image: str | None
    """With prometheus as its entry point: 2.43 or later, with discovery of Kubernetes, which Debian's lacks."""
    fake_gpus: tuple[str, str] | None
    """Nodes that will report an A10G and eight A100s, which they do not have."""
    lose_node: str
    """Shell command that removes a node, named by $1; empty if there is none."""
    bring_back: str
    """The command that brings it back."""


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of this environment."""
    image = _image(environ.get(IMAGE, ""), IMAGE, "images/ray")
    file = Path(environ[VALUES]).resolve() if environ.get(VALUES) else None
    nodes = tuple(name for name in environ.get(FAKE_GPUS, "").split(",") if name)
    if len(nodes) not in (0, 2):
        raise SettingsError(f"{FAKE_GPUS}: expected two nodes, NAME,NAME, got {environ[FAKE_GPUS]!r}")
    return Settings(
        image=image,
        values=yaml.safe_load(file.read_text()) if file else {},
        values_file=file,
        s3_image=environ.get(S3_IMAGE, "ghcr.io/versity/versitygw:v1.8.0"),
        exporter_image=_image(environ.get(EXPORTER_IMAGE, image), EXPORTER_IMAGE, "images/exporter"),
        prometheus_image=_or_none(environ.get(PROMETHEUS_IMAGE, "docker.io/prom/prometheus:v3.5.0")),
        fake_gpus=(nodes[0], nodes[1]) if nodes else None,
        lose_node=environ.get(LOSE_NODE, ""),
        bring_back=environ.get(BRING_BACK, ""),
    )


def _image(image: str, name: str, what: str) -> str:
    if ":" not in image.rpartition("/")[2]:
        raise SettingsError(f"{name}: expected {what}, built, with its tag, got {image!r}")
    return image


def _or_none(image: str) -> str | None:
    return None if image == "none" else image
