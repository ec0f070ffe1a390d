"""The exporter as a process, over a fake driver with values, faults and hangs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from sdp.exporter.catalogue import CATALOGUE
from tests import nvml
from tests.exporter_kit import DEADLINE_S, Exporter, Scrape, exporting
from tests.nvml import GIB, GPU_IS_LOST, UNKNOWN, Scenario, a100s, uuid
from tests.programs import ROOT, ended
from tests.waiting import until

pytestmark = pytest.mark.needs("cc")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


Over = Callable[..., AbstractContextManager[tuple[Exporter, Scenario]]]


@pytest.fixture
def over(library: Path, tmp_path: Path) -> Over:
    """Run the exporter over a fake driver with these values; arguments are its own."""

    @contextmanager
    def run(values: Mapping[str, object], *arguments: str) -> Iterator[tuple[Exporter, Scenario]]:
        scenario = Scenario(tmp_path / "gpus", values)
        with exporting(scenario.environment(library), *arguments) as exporter:
            yield exporter, scenario

    return run


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process to be on a GPU."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


def gpus(scrape: Scrape, name: str) -> set[str]:
    """The indexes of the GPUs that have a metric."""
    return {sample.labels["gpu"] for sample in scrape.all(name)}


def errors(scrape: Scrape) -> set[tuple[str, str, str]]:
    return {(s.labels["gpu"], s.labels["call"], s.labels["error"]) for s in scrape.all("sdp_exporter_errors_total")}


EXPECTED: list[tuple[str, dict[str, str], float]] = [
    ("sdp_gpu_up", {}, 1),
    ("sdp_gpu_utilization_ratio", {}, 0.97),
    ("sdp_gpu_memory_utilization_ratio", {}, 0.41),
    ("sdp_gpu_memory_total_bytes", {}, 85899345920),
    ("sdp_gpu_memory_used_bytes", {}, 64424509440),
    ("sdp_gpu_memory_free_bytes", {}, 20937965568),
    ("sdp_gpu_power_watts", {}, 391.25),
    ("sdp_gpu_power_limit_watts", {}, 400),
    ("sdp_gpu_energy_joules_total", {}, 123456.789),
    ("sdp_gpu_temperature_celsius", {}, 61),
    ("sdp_gpu_memory_temperature_celsius", {}, 71),
    ("sdp_gpu_temperature_limit_celsius", {"limit": "slowdown"}, 89),
    ("sdp_gpu_clock_hertz", {"clock": "sm"}, 1.395e9),
    ("sdp_gpu_clock_hertz", {"clock": "memory"}, 1.593e9),
    ("sdp_gpu_clock_max_hertz", {"clock": "sm"}, 1.41e9),
    ("sdp_gpu_pcie_transmit_bytes_per_second", {}, 12e6),
    ("sdp_gpu_pcie_receive_bytes_per_second", {}, 34e6),
    ("sdp_gpu_pcie_link_width_max", {}, 16),
    ("sdp_gpu_nvlink_transmit_bytes_total", {}, 1024000),
    ("sdp_gpu_nvlink_receive_bytes_total", {}, 2048000),
    ("sdp_gpu_nvlink_links", {}, 12),
    ("sdp_gpu_nvlink_active_links", {}, 12),
    ("sdp_gpu_ecc_errors_total", {"kind": "corrected"}, 4),
    ("sdp_gpu_ecc_errors_total", {"kind": "uncorrected"}, 0),
    ("sdp_gpu_row_remap_failed", {}, 0),
]
"""The values of tests/nvml's A100 in base units, worked out by hand."""


def test_every_value_of_every_gpu_arrives_in_base_units(over: Over) -> None:
    values = {
        **a100s(8),
        "gpu.5.power_mw": 87654,
        "gpu.5.throttle_reasons": 0x4 | 0x40,
        "gpu.6.nvlink.3": 0,
        "gpu.6.remapped": "3 2 1 1",
        "gpu.6.field.45": 9,
        "gpu.*.ecc_driver_load.0": 4,
    }
    with over(values) as (exporter, scenario):
        scrape = exporter.scrape()
        for name, labels, value in EXPECTED:
            assert scrape.value(name, gpu=0, **labels) == pytest.approx(value), name
        assert scrape.value("sdp_gpu_power_watts", gpu=5) == 87.654
        reasons = {s.labels["reason"] for s in scrape.all("sdp_gpu_throttle_reason", gpu=5) if s.value}
        assert reasons == {"sw_power_cap", "hw_thermal_slowdown"}
        assert not any(s.value for s in scrape.all("sdp_gpu_throttle_reason", gpu=4))
        assert scrape.value("sdp_gpu_nvlink_active_links", gpu=6) == 11
        assert scrape.value("sdp_gpu_nvlink_errors_total", gpu=6, kind="crc_data") == 9
        assert scrape.value("sdp_gpu_remapped_rows_total", gpu=6, cause="corrected") == 3
        assert scrape.value("sdp_gpu_remapped_rows_total", gpu=6, cause="uncorrected") == 2
        assert scrape.value("sdp_gpu_row_remap_pending", gpu=6) == 1
        assert scrape.value("sdp_gpu_row_remap_failed", gpu=6) == 1
        assert scrape.has("sdp_gpu_driver_info", driver="570.86.15", cuda="12.8")
        assert (scrape.value("sdp_exporter_up"), len(gpus(scrape, "sdp_gpu_up"))) == (1, 8)
        assert errors(scrape) == set()
        scenario.write({"gpu.5.power_mw": 99000})
        assert exporter.scrape().value("sdp_gpu_power_watts", gpu=5) == 99.0  # read at the scrape, not before


def test_a_gpu_that_counts_its_activity_has_it_between_two_scrapes(over: Over) -> None:
    values = {**a100s(3), "gpu.1.gpm": 1, "gpu.1.gpm.3": 61.5, "gpu.1.gpm.5": 40.25, "gpu.2.gpm": 1, "gpu.2.gpm.5": 7}
    values["gpu.*.pcie_block_ms"] = 0
    occupancy, tensors = "sdp_gpu_sm_occupancy_ratio", "sdp_gpu_tensor_activity_ratio"
    with over(values) as (exporter, scenario):
        for _ in range(100):  # more than the fake library keeps samples for
            scrape = exporter.scrape()
        assert (scrape.value(occupancy, gpu=1), scrape.value(tensors, gpu=1)) == (0.615, 0.4025)
        assert (gpus(scrape, occupancy), gpus(scrape, tensors)) == ({"1"}, {"1", "2"})
        assert errors(scrape) == set()
        scenario.write({"error.nvmlGpmSampleGet": UNKNOWN})
        assert not exporter.scrape().all(tensors)
        scenario.write({"error.nvmlGpmSampleGet": None})
        assert not exporter.scrape().all(tensors)
        assert exporter.scrape().value(tensors, gpu=2) == 0.07


def test_all_of_the_catalogue_is_exported_and_nothing_else(over: Over) -> None:
    everything = {
        **a100s(3),
        "gpu.1.gpm": 1,
        "gpu.1.gpm.3": 50,
        "gpu.1.gpm.5": 50,
        "gpu.0.process.0": f"C {os.getpid()} {GIB}",
        "gpu.2.error.nvmlDeviceGetPowerUsage": UNKNOWN,
    }
    with over(everything) as (exporter, scenario):
        exporter.scrape()
        scrape = until_reported(exporter, scenario, 0)
        rows = {row.name: row for row in CATALOGUE}
        assert {sample.name for sample in scrape.samples} == rows.keys()
        for family in scrape.families.values():
            for sample in family.samples:
                row = rows[sample.name]
                assert sample.labels.keys() == set(row.labels)
                assert family.type == row.type
                assert family.documentation == row.help


def test_a_gpu_that_is_lost_costs_its_own_series_and_comes_back(over: Over) -> None:
    with over(a100s(3)) as (exporter, scenario):
        exporter.scrape()
        scenario.write({"gpu.1.error.nvmlDeviceGetUtilizationRates": GPU_IS_LOST})
        scrape = exporter.scrape()
        assert [scrape.value("sdp_gpu_up", gpu=n, uuid=uuid(n)) for n in range(3)] == [1, 0, 1]
        assert gpus(scrape, "sdp_gpu_power_watts") == {"0", "2"}
        assert errors(scrape) == {("1", "nvmlDeviceGetUtilizationRates", "gpu_is_lost")}
        assert scrape.value("sdp_exporter_up") == 1
        scenario.write({"gpu.1.error.nvmlDeviceGetUtilizationRates": None})
        scrape = exporter.scrape()
        assert gpus(scrape, "sdp_gpu_power_watts") == {"0", "1", "2"}
        assert scrape.value("sdp_gpu_up", gpu=1) == 1


def test_a_gpu_that_the_driver_never_opened_or_no_longer_lists_is_down(over: Over) -> None:
    error = "gpu.1.error.nvmlDeviceGetHandleByIndex"
    with over({**a100s(2), error: GPU_IS_LOST}) as (exporter, scenario):
        scrape = exporter.scrape()
        assert scrape.value("sdp_gpu_up", gpu=1, uuid="", product="") == 0
        assert scrape.value("sdp_gpu_up", gpu=0) == 1
        scenario.write({error: None})
        exporter.scrape()
        scenario.write({"gpus": 1})
        scrape = exporter.scrape()
        assert [scrape.value("sdp_gpu_up", uuid=uuid(n)) for n in range(2)] == [1, 0]


def test_a_call_that_fails_costs_one_series_and_is_counted_and_one_that_is_unsupported_is_not(over: Over) -> None:
    values = {
        **a100s(2),
        "gpu.0.error.nvmlDeviceGetPowerUsage": UNKNOWN,
        "gpu.0.field.82.error": UNKNOWN,
        "gpu.1.error.nvmlDeviceGetPowerUsage": nvml.NOT_SUPPORTED,
    }
    with over(values) as (exporter, _):
        first, second = exporter.scrape(), exporter.scrape()
        assert gpus(second, "sdp_gpu_power_watts") == set()
        assert gpus(second, "sdp_gpu_memory_temperature_celsius") == {"1"}
        assert gpus(second, "sdp_gpu_temperature_celsius") == {"0", "1"}
        assert gpus(second, "sdp_gpu_up") == {"0", "1"}
        counted = ("0", "nvmlDeviceGetPowerUsage", "unknown")
        assert errors(second) == {counted, ("0", "nvmlDeviceGetFieldValues:MEMORY_TEMP", "unknown")}
        labels = dict(zip(("gpu", "call", "error"), counted, strict=True))
        grown = second.value("sdp_exporter_errors_total", **labels) - first.value("sdp_exporter_errors_total", **labels)
        assert grown == 1


def test_a_gpu_that_hangs_delays_one_scrape_until_the_deadline_and_the_later_ones_not_at_all(over: Over) -> None:
    with over(a100s(4), "--timeout-s", "3") as (exporter, scenario):
        exporter.scrape()
        scenario.write({"gpu.2.hang.nvmlDeviceGetPowerUsage": 3600})
        began = time.monotonic()
        first = exporter.scrape()
        took = time.monotonic() - began
        assert 2.9 < took < 9
        began = time.monotonic()
        later = [exporter.scrape() for _ in range(5)]
        assert time.monotonic() - began < 8  # five in less than three times that
        for scrape in (first, *later):
            assert gpus(scrape, "sdp_gpu_power_watts") == {"0", "1", "3"}
            assert scrape.value("sdp_gpu_up", gpu=2, uuid=uuid(2)) == 0
            assert scrape.value("sdp_exporter_up") == 1
            assert errors(scrape) == {("2", "nvmlDeviceGetPowerUsage", "timeout")}
        scenario.write({"gpu.2.hang.nvmlDeviceGetPowerUsage": None})
        exporter.until(lambda s: gpus(s, "sdp_gpu_power_watts") == {"0", "1", "2", "3"})


@pytest.mark.parametrize("call", ["nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_a_hanging_driver_is_reported_and_the_exporter_recovers(over: Over, call: str) -> None:
    with over(a100s(2), "--timeout-s", "1") as (exporter, scenario):
        exporter.until(lambda s: s.value("sdp_exporter_up") == 1)
        scenario.write({f"hang.{call}": 3600})
        first = exporter.scrape()
        assert first.value("sdp_exporter_up") == 0
        assert [first.value("sdp_gpu_up", uuid=uuid(n)) for n in range(2)] == [0, 0]
        assert not first.has("sdp_gpu_power_watts")
        assert call in {name for _, name, error in errors(first) if error == "timeout"}
        scenario.write({f"hang.{call}": None})
        exporter.until(lambda s: s.value("sdp_exporter_up") == 1 and s.has("sdp_gpu_power_watts", gpu=1))


def test_without_a_driver_it_says_so_and_finds_one_that_comes_later(over: Over) -> None:
    with over({**a100s(1), "error.nvmlInit": nvml.DRIVER_NOT_LOADED}) as (exporter, scenario):
        scrape = exporter.scrape()
        assert scrape.value("sdp_exporter_up") == 0
        assert not any(s.name.startswith("sdp_gpu_") for s in scrape.samples)
        assert errors(scrape) == {("", "nvmlInit", "driver_not_loaded")}
        scenario.write({"error.nvmlInit": None})
        assert exporter.scrape().value("sdp_exporter_up") == 1
        code, log = exporter.stop()
        lines = [line.partition(" ")[2].partition(" ")[2] for line in log.splitlines()]
        assert lines[:2] == [
            "WARNING no GPU can be read: nvmlInit: driver_not_loaded",
            "INFO reading 1 GPUs, driver 570.86.15",
        ]
        assert (code, len(lines)) == (0, 3)


def test_without_the_drivers_library_it_answers_too(tmp_path: Path) -> None:
    # Found before any real one, and no library.
    (tmp_path / "libnvidia-ml.so.1").touch()
    with exporting({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}) as exporter:
        scrape = exporter.scrape()
        assert scrape.value("sdp_exporter_up") == 0
        assert errors(scrape) == {("", "nvmlInit", "library_not_found")}
        assert "WARNING no GPU can be read: nvmlInit: library_not_found\n" in exporter.stop()[1]


def test_a_driver_that_was_reloaded_is_opened_again(over: Over) -> None:
    with over(a100s(1)) as (exporter, scenario):
        exporter.scrape()
        scenario.write({"error.nvmlDeviceGetCount": 1, "error.nvmlInit": nvml.DRIVER_NOT_LOADED})
        assert exporter.scrape().value("sdp_exporter_up") == 0
        assert errors(exporter.scrape()) == {
            ("", "nvmlDeviceGetCount", "uninitialized"),
            ("", "nvmlInit", "driver_not_loaded"),
        }
        scenario.write({"error.nvmlDeviceGetCount": None, "error.nvmlInit": None})
        assert exporter.scrape().value("sdp_exporter_up") == 1


def test_a_process_has_its_memory_and_its_name(over: Over) -> None:
    with sleeping() as process:
        pid = process.pid
        lines = {
            **a100s(2),
            "gpu.0.process.0": f"C {pid} {7 * GIB}",
            "gpu.0.process.1": f"G {pid} {GIB}",  # the same process: the larger counts
            "gpu.0.process.2": "C 4194300 -",  # not in /proc, and its memory is not known
            "gpu.1.process.0": f"M {pid} {2 * GIB}",
        }
        with over(lines) as (exporter, _):
            scrape = exporter.scrape()
            sample = scrape.one("sdp_gpu_process_memory_bytes", gpu=0, pid=pid)
            assert sample.value == 7 * GIB
            assert (sample.labels["process"], sample.labels["container_pid"]) == ("sleep", str(pid))
            assert scrape.value("sdp_gpu_process_memory_bytes", gpu=1) == 2 * GIB
            assert not scrape.has("sdp_gpu_process_memory_bytes", pid=4194300)
            states = {s.labels["state"]: s.value for s in scrape.all("sdp_exporter_processes")}
            assert states == {"known": 1, "unknown": 1}
            process.kill()
            process.wait()
            gone = exporter.scrape()
            sample = gone.one("sdp_gpu_process_memory_bytes", gpu=0, pid=pid)
            assert (sample.value, sample.labels["process"]) == (7 * GIB, "")
            assert gone.value("sdp_exporter_processes", state="unknown") == 2


def test_scrapes_leave_neither_threads_nor_open_files(over: Over) -> None:
    with over(a100s(2)) as (exporter, _):

        def held() -> list[int]:
            process = Path(f"/proc/{exporter.process.pid}")
            return [len(list((process / what).iterdir())) for what in ("task", "fd")]

        exporter.scrape()
        before = held()
        for _ in range(50):
            exporter.scrape()
        until(lambda: held() == before, "what scrapes took is given back", DEADLINE_S)


def next_event(scenario: Scenario) -> int:
    return sum(key.startswith("xid.") for key in scenario.lines)


def until_reported(exporter: Exporter, scenario: Scenario, gpu: int, xid: int = 31) -> Scrape:
    """Send XIDs until one arrives, since nothing tells when listening begins, and earlier events are lost."""
    sent, before = next_event(scenario), time.time()

    def reported(scrape: Scrape) -> bool:
        nonlocal sent
        scenario.write({f"xid.{sent}": f"{gpu} {xid}"})
        sent += 1
        return any(
            s.value >= before
            for s in scrape.all("sdp_gpu_xid_timestamp_seconds", uuid=scenario.lines[f"gpu.{gpu}.uuid"], xid=xid)
        )

    return exporter.until(reported)


def xids(scrape: Scrape, gpu: int) -> set[str]:
    return {s.labels["xid"] for s in scrape.all("sdp_gpu_xid_timestamp_seconds", uuid=uuid(gpu))}


def test_xids_are_reported_even_if_their_gpu_is_lost_and_also_after_it_came_back(over: Over) -> None:
    lost = "gpu.1.error.nvmlDeviceGetHandleByIndex"
    with over(a100s(2)) as (exporter, scenario):
        scrape = until_reported(exporter, scenario, 1, 31)
        assert xids(scrape, 0) == set()
        scenario.write({f"xid.{next_event(scenario)}": "1 79", lost: GPU_IS_LOST})
        scrape = exporter.until(lambda s: xids(s, 1) == {"31", "79"})
        assert scrape.value("sdp_gpu_up", gpu=1) == 0
        assert scrape.value("sdp_gpu_xid_timestamp_seconds", xid=79) <= time.time()
        scenario.write({lost: None})
        assert exporter.scrape().value("sdp_gpu_up", gpu=1) == 1
        scrape = until_reported(exporter, scenario, 1, 48)
        assert xids(scrape, 1) == {"31", "48", "79"}
        scrape = until_reported(exporter, scenario, 0, 31)  # and the other one, still
        assert xids(scrape, 0) == {"31"}
        assert "gpu 1: XID 79\n" in exporter.stop()[1]


def test_a_gpu_that_takes_anothers_index_has_not_its_xids(over: Over) -> None:
    with over(a100s(1)) as (exporter, scenario):
        until_reported(exporter, scenario, 0, 79)
        # Replaced: the reloaded driver finds another board.
        scenario.write({"gpu.0.error.nvmlDeviceGetHandleByIndex": GPU_IS_LOST})
        exporter.scrape()
        scenario.write({"gpu.0.error.nvmlDeviceGetHandleByIndex": None, "gpu.0.uuid": uuid(9)})
        scrape = until_reported(exporter, scenario, 0, 31)
        assert "79" in xids(scrape, 0)
        assert xids(scrape, 9) == {"31"}


def test_a_gpu_that_cannot_be_listened_to_is_logged_and_read(over: Over) -> None:
    call = "gpu.1.error.nvmlDeviceRegisterEvents"
    with over({**a100s(2), call: UNKNOWN}) as (exporter, scenario):
        scrape = until_reported(exporter, scenario, 0)
        assert gpus(scrape, "sdp_gpu_power_watts") == {"0", "1"}
        assert "gpu 1: cannot listen for XID errors" in exporter.stop()[1]


CANNOT = {
    "no time": (["--timeout-s", "0"], "--timeout-s: expected more than 0"),
    "a port that is none": (["--port", "70000"], "cannot listen on 127.0.0.1 port 70000: "),
    "an address that is not here": (["--port", "0", "--address", "192.0.2.1"], "cannot listen on 192.0.2.1 port 0: "),
}


@pytest.mark.parametrize(("arguments", "message"), CANNOT.values(), ids=CANNOT)
def test_settings_that_cannot_work_are_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    done = ended([sys.executable, "-m", "sdp.exporter", "--address", "127.0.0.1", *arguments], timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stderr.startswith(f"sdp.exporter: {message}")
    assert done.stderr.count("\n") == 1


def test_it_ends_on_ctrl_c_with_code_0(over: Over) -> None:
    with over(a100s(1)) as (exporter, _):
        exporter.scrape()
        exporter.process.send_signal(signal.SIGINT)
        assert exporter.process.wait(DEADLINE_S) == 0
        assert exporter.process.stderr is not None
        assert exporter.process.stderr.read().endswith("sdp.exporter: stopped\n")


def test_it_ends_with_code_0_while_the_driver_hangs(over: Over) -> None:
    with over(a100s(2), "--timeout-s", "2") as (exporter, scenario):
        exporter.scrape()
        scenario.write({"hang.nvmlDeviceGetPowerUsage": 3600, "hang.exit": 3600})
        assert exporter.scrape().value("sdp_exporter_up") == 0
        code, log = exporter.stop()
        assert code == 0
        assert log.endswith("sdp.exporter: stopped\n")


@pytest.mark.needs("promtool")
def test_promtool_finds_nothing_to_complain_about(over: Over, tool: Callable[[str], Path]) -> None:
    lines = {**a100s(2), "gpu.0.error.nvmlDeviceGetPowerUsage": 999, "gpu.1.process.0": "C 1 1000", "xid.0": "0 31"}
    with over(lines) as (exporter, _):
        text = exporter.until(lambda s: s.has("sdp_gpu_xid_timestamp_seconds")).text
    done = ended([str(tool("promtool")), "check", "metrics"], input=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
