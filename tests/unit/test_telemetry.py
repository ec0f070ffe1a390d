"""Emission to a registry of prometheus-client."""

import os
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sdp.telemetry import Telemetry, run_name
from sdp.telemetry.catalogue import CATALOGUE
from tests.registry import RegistryBackend


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def telemetry(registry: CollectorRegistry) -> Telemetry:
    return Telemetry(RegistryBackend(registry), "sd2")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"run": "sd2", **labels})


def test_counters_add_up_and_gauges_show_the_last(telemetry: Telemetry, registry: CollectorRegistry) -> None:
    telemetry.count("sdp_train_samples_total", 5)
    telemetry.count("sdp_train_samples_total", 7)
    telemetry.count("sdp_train_samples_total", 0)
    telemetry.show("sdp_train_loss", 0.5)
    telemetry.show("sdp_train_loss", 0.25)
    telemetry.show("sdp_train_mfu", None)
    assert value(registry, "sdp_train_samples_total") == 12
    assert value(registry, "sdp_train_loss") == 0.25
    assert value(registry, "sdp_train_mfu") is None


def test_a_process_reports_its_role_and_job(registry: CollectorRegistry) -> None:
    telemetry = Telemetry(RegistryBackend(registry), "sd2", "sdp-train-7xk2p")
    telemetry.process("trainer", 3)
    identity = {"pid": str(os.getpid()), "role": "trainer", "rank": "3", "job_name": "sdp-train-7xk2p"}
    assert value(registry, "sdp_process_info", **identity) == 1


def test_totals_are_reached_by_their_difference_and_never_go_back(
    telemetry: Telemetry, registry: CollectorRegistry
) -> None:
    for total, expected in ((3, 3), (3, 3), (10, 10), (2, 10), (4, 12)):
        telemetry.reach("sdp_download_rows_total", total, outcome="failed", reason="timeout")
        assert value(registry, "sdp_download_rows_total", outcome="failed", reason="timeout") == expected


@pytest.mark.parametrize(
    ("name", "labels"),
    [("sdp_train_samples_total", {"rank": 0}), ("sdp_download_rows_total", {"outcome": "x"}), ("sdp_train_loss", {})],
)
def test_metrics_outside_the_catalogue_are_refused(telemetry: Telemetry, name: str, labels: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=name):
        telemetry.count(name, 1, **labels)
    with pytest.raises(KeyError):
        telemetry.count("sdp_train_sample_total", 1)


class Broken:
    """A backend that always fails."""

    def emit(self, *_: object) -> None:
        raise RuntimeError("the agent is gone")


def test_a_failing_backend_is_reported_once_and_fails_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = Telemetry(Broken(), "sd2")
    for _ in range(2):
        telemetry.count("sdp_train_samples_total", 5)
        telemetry.reach("sdp_download_rows_total", 7, outcome="failed", reason="timeout")
        telemetry.show("sdp_train_loss", 0.5)
        telemetry.process("trainer")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("telemetry: sdp_train_samples_total and perhaps other metrics cannot be emitted")
    assert line.endswith("the agent is gone")


def test_a_name_that_is_not_ascii_reaches_ray_in_percent_encoding() -> None:
    """A real metric of Ray, which encodes its tags when it is set."""
    from sdp.telemetry.ray_metrics import RayBackend, ascii_tag

    assert (ascii_tag("bilder-ä"), ascii_tag("50% off/ok")) == ("bilder-%C3%A4", "50% off/ok")
    RayBackend().emit(CATALOGUE["sdp_train_samples_total"], 1, {"run": "bilder-ä"})


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("s3://bucket/runs/sd2", "sd2"),
        ("s3://bucket/runs/sd2/", "sd2"),
        ("s3://bucket/runs/sd2/phase-2", "sd2/phase-2"),
        ("s3://bucket", "bucket"),
        ("/data/images", "images"),
        ("images", "images"),
        ("/", "/"),
    ],
)
def test_a_run_goes_by_the_end_of_its_address(uri: str, name: str) -> None:
    assert run_name(uri) == name
