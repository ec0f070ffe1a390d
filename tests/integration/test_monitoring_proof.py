"""Rules and dashboards on a real Prometheus that watches a real Ray at work, and the real exporter over fake GPUs."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.monitoring import chart, promql
from tests.monitoring.machines import CLUSTER, GIB, JOB, NAMESPACE
from tests.monitoring.proof import EPOCHS, ROWS, Recorded, recorded
from tests.monitoring.ray_names import RAY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("prometheus", "helm", "cc"),
    pytest.mark.timeout(900),  # a minute or two, and more on a busy machine
]


@pytest.fixture(scope="module")
def run(tool: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    with recorded(tool("helm"), tool("prometheus"), tmp_path_factory.mktemp("proof")) as recording:
        yield recording


def silent(run: Recorded, expressions: list[tuple[str, str]]) -> dict[str, str]:
    """Return the expressions without a value at any time of the load."""
    return {where: text for where, text in expressions if not run.prometheus.history(text, run.start, run.end)}


def test_every_query_of_every_panel_returns_series(run: Recorded) -> None:
    asked = [(query.where, query.filled(__rate_interval="20s")) for query in chart.queries()]
    assert len(asked) > 100
    assert silent(run, asked) == {}


def test_every_recording_rule_has_recorded(run: Recorded) -> None:
    assert silent(run, [(record.where, record.where) for record in chart.records()]) == {}


def test_every_series_that_an_alert_asks_for_is_there(run: Recorded) -> None:
    asked = {
        f"{alert.where}: {selector.text}": selector.text
        for alert in chart.alerts()
        for selector in promql.selectors(alert.text)
    }
    assert silent(run, list(asked.items())) == {}


def test_every_name_of_ray_s_is_one_that_ray_has(run: Recorded) -> None:
    for name, labels in RAY.items():
        history = run.prometheus.history(name, run.start, run.end)
        assert history, name
        assert labels <= {label for series, _ in history for label in series}, (name, labels, history[0][0])
        assert all(not label.startswith("otel_") and label != "Version" for series, _ in history for label in series)


def test_jobs_metrics_have_the_catalogue_s_names_and_say_where_they_come_from(run: Recorded) -> None:
    assert run.prometheus.history('{__name__=~"ray_sdp_.+"}', run.start, run.end) == []
    for series, _ in run.prometheus.history('{__name__=~"sdp_train_.+"}', run.start, run.end):
        assert (series["namespace"], series["ray_cluster"], series["ray_io_cluster"]) == (NAMESPACE, CLUSTER, CLUSTER)
        assert series["ray_group"] in {"headgroup", "a100"}
        assert "SessionName" not in series


def test_a_job_s_rows_are_told_by_its_stage(run: Recorded) -> None:
    """Their own label is `job`, which is the name of one that Prometheus puts on everything."""
    history = run.prometheus.history("sdp_job_rows", run.start, run.end)
    assert {(series["stage"], series["run"], series["job"]) for series, _ in history} == {
        ("download", "images", "ray"),
        ("process", "latents", "ray"),
    }
    assert all("exported_job" not in series for series, _ in history)


def test_a_gauge_that_was_set_once_is_there_as_long_as_its_process(run: Recorded) -> None:
    """Ray leaves out what was not set again between two exports. This one was set before the download."""
    ((series, values),) = run.prometheus.history("sdp_train_mfu", run.start, run.end)
    ((_, scraped),) = run.prometheus.history(f'up{{pod="{series["pod"]}"}} == 1', values[0][0], run.end)
    assert len(scraped) > 20
    assert len(values) > 0.9 * len(scraped)


def test_gpu_memory_is_reported_by_role_and_rank(run: Recorded) -> None:
    """The exporter knows the driver's pids, the jobs their own: joined by the pid inside the pod."""
    history = run.prometheus.history("sdp:gpu_process_memory:bytes", run.start, run.end)
    memory = {
        (s["role"], s.get("rank", ""), s.get("ray_group", ""), s["node"], s["gpu"], values[-1][1])
        for s, values in history
    }
    assert {
        ("trainer", "0", "a100", "node-2", "0", 30.0 * GIB),
        ("trainer", "1", "a100", "node-2", "1", 30.0 * GIB),
        ("encoder", "", "a10g", "node-1", "0", 2.0 * GIB),
    } <= memory
    assert {series["run"] for series, _ in history if series["role"] == "trainer"} == {"sd2"}
    assert {series["job_name"] for series, _ in history if series["role"] != "other"} == {JOB}


def test_a_gpu_belongs_to_its_run_and_an_idle_one_to_none(run: Recorded) -> None:
    history = run.prometheus.history("sdp:gpu:owner", run.start, run.end)
    runs = {(s["node"], s["gpu"]): set[str]() for s, _ in history}
    for series, _ in history:
        runs[series["node"], series["gpu"]].add(series.get("run", ""))
    assert "sd2" in runs["node-2", "0"]
    assert runs["node-2", "2"] == {""}
    assert len(runs) == 7
    chosen = 'max(sdp_gpu_utilization_ratio and on (node, uuid) sdp:gpu:owner{run="sd2", ray_group="a100"})'
    assert run.prometheus.history(chosen, run.start, run.end)


def test_alerts_of_the_faults_that_were_made_are_pending_or_firing(run: Recorded) -> None:
    run.prometheus.until('ALERTS{alertname="SdpGpuThrottled"}')
    alerts = {(a["labels"]["alertname"], a["labels"].get("gpu", "")) for a in run.prometheus.ask("alerts")["alerts"]}
    assert {
        ("SdpGpuXid", "2"),
        ("SdpGpuXidFatal", "2"),
        ("SdpGpuThrottled", "2"),
        ("SdpGpuFaulty", "2"),
        ("SdpGpuLost", "4"),
        ("SdpGpuMemoryAlmostFull", "1"),
        ("SdpJobFailed", ""),
        ("SdpPodPending", ""),
        ("SdpPodCannotStart", ""),
    } <= alerts
    assert {a["labels"]["name"] for a in run.prometheus.ask("alerts")["alerts"]
            if a["labels"]["alertname"] == "SdpJobWaitsForFailed"} == {"idle"}  # fmt: skip
    scraped = {s["job"] for s, _ in run.prometheus.history("go_goroutines", run.start, run.end)}
    assert scraped == {"kube-state-metrics"}, "the operator's own are dropped"
    quiet = {"SdpExporterDown", "SdpExporterBlind", "SdpLedgerMismatch", "SdpSpilling"}
    quiet |= {"SdpTrainingRecovers", "SdpTrainingDied", "SdpHeadRestarts", "SdpJobStalled"}
    assert not quiet & {name for name, _ in alerts}


def test_figures_are_those_of_the_load(run: Recorded) -> None:
    def last(expr: str) -> float:
        ((_, values),) = run.prometheus.history(expr, run.start, run.end)
        return values[-1][1]

    written = last('sum(sdp_download_rows_total{outcome="written"})')
    assert written == ROWS
    # What a trainer says in its last seconds, before its process is ended, Ray need not have exported.
    assert ROWS < last("max(sdp_train_samples_seen)") <= EPOCHS * ROWS
    free = 80 - 0.5 - 20  # of a trainer's GPU: the driver keeps half a GiB, and a quarter is in use
    assert last("max(sdp:train_gpu_memory_peak:ratio)") == pytest.approx(27 / (29 + free))
    assert last("min(sdp:train_batch_room:ratio)") == pytest.approx(1 + (0.95 * (29 + free) - 27) / (27 - 14))
    assert math.isclose(last('max(sdp:gpu_memory:ratio{node="node-1"})'), int(23.8 * GIB) / (24 * GIB))
