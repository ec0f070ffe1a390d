"""The figures of a run, for a person and for Prometheus."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sdp.config import parse
from sdp.config.process import ProcessConfig
from sdp.datasets.outcomes import Counts
from sdp.process.messages import ProcessFigures, emit, progress_line, suggestion, summary
from sdp.runners.desk import State
from sdp.runners.stages import PrepareStats
from sdp.telemetry import Telemetry
from sdp.telemetry.catalogue import CATALOGUE
from tests.registry import RegistryBackend


def running(**changed: Any) -> ProcessFigures:
    figures = ProcessFigures(
        rows_total=1000,
        images_total=3000,
        rows_done=100,
        counts=Counts(90, 0, 10),
        pipeline=State(prepared=PrepareStats(800)),
        images_encoded=750,
        bytes_written=810_000,
        busy_s=59.0,
        idle_s=41.0,
        elapsed_s=50.0,
    )
    return replace(figures, **changed)


def transformed(seconds: float, reading_s: float = 0.0) -> State:
    return State(prepared=PrepareStats(800, seconds, reading_s))


# --- progress --------------------------------------------------------------------------------------------------------


def test_the_line_says_rates_waiting_bytes_and_when_it_ends() -> None:
    line = progress_line(running())
    assert "100 of 1,000 rows" in line
    assert "transform 16 img/s" in line
    assert "encode 15 img/s" in line
    assert "encoders wait 41 %" in line
    assert "9.0 kB an image" in line
    assert line.endswith("ETA 2:30"), "a quarter of the images took 50 s"
    without_images = progress_line(running(rows_done=500, images_encoded=300))
    assert without_images.endswith("ETA 50 s"), "half of the rows, many without an image"


def test_there_is_neither_rate_nor_eta_before_anything_is_known() -> None:
    assert progress_line(ProcessFigures(rows_total=10, images_total=10)) == "0 of 10 rows"


def test_the_summary_counts_gpu_hours_where_encoders_have_gpus() -> None:
    counts = SimpleNamespace(written=90, input=100, failed=10, reasons={})
    dataset: Any = SimpleNamespace(rows=100, manifest=SimpleNamespace(size=810_000, counts=counts))
    config = parse("process", {name: {"uri": name} for name in ("source", "output")} | {"model": {"source": "m"}})
    assert isinstance(config, ProcessConfig)
    for gpu_share, expected in (0.5, ", 1.00 GPU-hours,"), (0.0, " s, "):
        ended = running(parts_written=1, busy_s=5000.0, idle_s=2200.0, gpus_each=gpu_share)
        assert expected in dict(summary(config, dataset, ended))["this run"]
        assert ("1.00 GPU-hours" in progress_line(ended)) == bool(gpu_share)
    for busy_s, elapsed_s, named in (1.7, 15.8, False), (7.0, 100.0, False), (70.0, 100.0, True):
        ended = running(parts_written=1, busy_s=busy_s, idle_s=0.0, elapsed_s=elapsed_s)
        assert ("bottleneck" in dict(summary(config, dataset, ended))) == named


# --- the bottleneck --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (running(idle_s=1.0), "the encoders (waited 2 % of their time for input); raise encode.num_workers or"),
        (
            running(pipeline=transformed(seconds=9.0)),
            "the transforms (encoders waited 41 % of their time for input); add CPU nodes, or use fewer encoders",
        ),
        (
            running(pipeline=transformed(seconds=1.0, reading_s=9.0)),
            "the source's storage (encoders waited 41 % of their time for input); add CPU nodes",
        ),
    ],
)
def test_the_bottleneck_is_named_with_its_remedy(figures: ProcessFigures, line: str) -> None:
    assert suggestion(figures).startswith(line)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_the_same_figures_are_metrics() -> None:
    registry = CollectorRegistry()
    telemetry = Telemetry(RegistryBackend(registry), "latents")
    state = transformed(seconds=70.0, reading_s=30.0)
    state.workers, state.preparing, state.ready, state.deaths["work"] = 3, 12, 5, 1
    emit(telemetry, running(pipeline=state))
    later = replace(state, workers=2)
    emit(telemetry, running(counts=Counts(190, 0, 10), pipeline=later, busy_s=118.0))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"run": "latents", **labels})

    assert value("sdp_job_rows", job="process") == 1000
    assert value("sdp_job_rows_done", job="process") == 100
    assert value("sdp_process_rows_total", outcome="written") == 190
    assert value("sdp_process_rows_total", outcome="failed") == 10
    assert value("sdp_process_encoded_total") == 750
    assert value("sdp_process_transformed_total") == 800
    assert value("sdp_process_encoder_busy_seconds_total") == 118
    assert value("sdp_process_encoder_waiting_seconds_total") == 41
    assert value("sdp_process_reading_seconds_total") == 30
    assert value("sdp_process_encoders") == 2
    names = {family.name for family in registry.collect()}
    of_process = {name.removesuffix("_total") for name in CATALOGUE if name.startswith("sdp_process_")}
    assert names >= of_process - {"sdp_process_info"}
