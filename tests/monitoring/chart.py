"""The chart as helm renders it, and every expression in it."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.programs import ROOT, ended

CHART = ROOT / "charts" / "sdp-monitoring"
Manifest = dict[str, Any]

VARIABLES: Mapping[str, str] = {
    "namespace": ".*",
    "cluster": ".*",
    "run": ".*",
    "group": ".*",
    "node": ".*",
    "__rate_interval": "1m",
}
"""Grafana's replacement of $NAME; All is `.*`."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression and its place, with Grafana's variables in it."""

    where: str
    text: str

    def filled(self, **values: str) -> str:
        text = self.text
        for name, value in {**VARIABLES, **values}.items():
            text = text.replace(f"${name}", value)
        assert "$" not in text.replace('"$1"', ""), f"{self.where}: {text}"
        return text


def helm_template(helm: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    named = ("exporter.image.repository=registry.example.com/sdp/exporter", *settings)
    arguments = [argument for setting in named for argument in ("--set", setting)]
    return ended([helm, "template", "sdp", CHART, *arguments])


def rendered(helm: Path, *settings: str) -> list[Manifest]:
    done = helm_template(helm, *settings)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def one(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    (manifest,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(name)]
    return manifest


def rules(kind: str) -> Iterator[dict[str, Any]]:
    """Yield the chart's rules of a kind, `record` or `alert`, as they are written."""
    for path in sorted((CHART / "rules").glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from (rule for rule in group["rules"] if kind in rule)


def records() -> list[Expression]:
    return [Expression(rule["record"], rule["expr"]) for rule in rules("record")]


def alerts() -> list[Expression]:
    return [Expression(rule["alert"], rule["expr"]) for rule in rules("alert")]


def dashboards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))}


def laid_out(dashboard: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield rows and panels in their order, as if all rows were open."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def panels(dashboard: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the panels that have queries, those inside rows too."""
    for panel in dashboard["panels"]:
        yield from ([panel] if panel["type"] != "row" else panel.get("panels", []))


def queries() -> list[Expression]:
    """Yield the expressions of every panel of every dashboard."""
    return [
        Expression(f"{name}: {panel['title']}", target["expr"])
        for name, dashboard in dashboards().items()
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]
