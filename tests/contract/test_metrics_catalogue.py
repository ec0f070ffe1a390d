"""The metrics that are emitted, those of the catalogue and those of the documentation are the same."""

import ast
from pathlib import Path

import pytest

from scripts import generate_metrics_docs
from sdp.telemetry import CATALOGUE, Metric

ROOT = Path(__file__).resolve().parents[2]


def names_in_code() -> dict[str, set[str]]:
    """Every string in sdp/ that looks like a metric's name, and the files it is in."""
    result: dict[str, set[str]] = {}
    for path in sorted((ROOT / "sdp").rglob("*.py")):
        if path.is_relative_to(ROOT / "sdp" / "exporter") or path == ROOT / "sdp" / "telemetry" / "catalogue.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                stages = ("sdp_job_", "sdp_process_", "sdp_download_", "sdp_train_", "sdp_generate_")
                if text.startswith(stages) and text.replace("_", "").isalnum():
                    result.setdefault(text, set()).add(str(path.relative_to(ROOT)))
    return result


def test_every_name_that_is_emitted_is_in_the_catalogue() -> None:
    emitted = names_in_code()
    assert {name: files for name, files in emitted.items() if name not in CATALOGUE} == {}


def test_every_metric_of_the_catalogue_is_emitted() -> None:
    assert set(CATALOGUE) - set(names_in_code()) == set()


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=lambda metric: metric.name)
def test_names_are_as_prometheus_wants_them(metric: Metric) -> None:
    assert metric.name.startswith("sdp_")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith(".")
    assert "run" not in metric.labels


def test_no_two_metrics_are_one_family() -> None:
    families = [name.removesuffix("_total") for name in CATALOGUE]
    assert len(set(families)) == len(families)


def test_the_page_agrees_with_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_metrics_docs.main(["--check"]) == 0, capsys.readouterr().err
