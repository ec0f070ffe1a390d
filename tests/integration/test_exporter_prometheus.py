"""A real Prometheus scrapes the exporter, and its queries return the driver's values."""

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import nvml
from tests.exporter_kit import DEADLINE_S, exporting
from tests.nvml import GPU_IS_LOST, Scenario, a100s, uuid
from tests.programs import free_port

pytestmark = pytest.mark.needs("cc")


@contextmanager
def prometheus(program: Path, folder: Path, scrape: dict[str, Any], *arguments: str) -> Iterator[str]:
    """Its URL. The configuration is JSON, which is YAML."""
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    address = f"127.0.0.1:{free_port()}"
    command = [str(program), f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address={address}", "--log.level=warn", *arguments]
    log = (folder / "prometheus.log").open("wb")
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://{address}"
        finally:
            process.kill()


def query(url: str, expression: str) -> list[dict[str, Any]]:
    address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(address, timeout=DEADLINE_S) as answer:
        result = json.load(answer)
    assert result["status"] == "success"
    return list(result["data"]["result"])


def until(url: str, expression: str, enough: Callable[[list[dict[str, Any]]], bool] = bool) -> list[dict[str, Any]]:
    end = time.monotonic() + 2 * DEADLINE_S
    while True:
        try:
            result = query(url, expression)
        except OSError:  # not listening yet
            result = []
        if enough(result):
            return result
        assert time.monotonic() < end, f"{expression}: {result}"


@pytest.mark.needs("prometheus")
def test_prometheus_scrapes_it_and_queries_return_the_drivers_values(
    tmp_path: Path, tool: Callable[[str], Path]
) -> None:
    library = nvml.build(tmp_path / "nvml")
    scenario = Scenario(tmp_path / "gpus", {**a100s(8), "gpu.3.power_mw": 123000, "xid.0": "3 31"})
    with exporting(scenario.environment(library)) as exporter:
        scrape = {
            "job_name": "sdp-exporter",
            "static_configs": [{"targets": [urllib.parse.urlsplit(exporter.url).netloc]}],
        }
        with prometheus(tool("prometheus"), tmp_path, scrape) as url:
            until(url, 'up{job="sdp-exporter"} == 1')
            (power,) = until(url, 'sdp_gpu_power_watts{gpu="3"}')
            assert power["value"][1] == "123"
            assert power["metric"]["uuid"] == uuid(3)
            assert power["metric"]["node"] == "n1"
            (total,) = query(url, "sum(sdp_gpu_memory_used_bytes) / sum(sdp_gpu_memory_total_bytes)")
            assert float(total["value"][1]) == 0.75
            assert len(query(url, "sdp_gpu_utilization_ratio == 0.97")) == 8
            (xid,) = until(url, "time() - sdp_gpu_xid_timestamp_seconds < 300")
            assert xid["metric"]["xid"] == "31"
            scenario.write({"gpu.5.error.nvmlDeviceGetHandleByIndex": GPU_IS_LOST})
            (down,) = until(url, "sdp_gpu_up == 0")
            assert down["metric"]["uuid"] == uuid(5)
            (energy,) = query(url, 'sdp_gpu_energy_joules_total{gpu="1"}')
            scenario.write({"gpu.1.energy_mj": 123456789 + 5_000_000})
            until(url, 'increase(sdp_gpu_energy_joules_total{gpu="1"}[1m]) > 4000')
            assert float(energy["value"][1]) == 123456.789


@pytest.mark.needs("promtool")
def test_promtool_finds_nothing_to_complain_about(tmp_path: Path, tool: Callable[[str], Path]) -> None:
    library = nvml.build(tmp_path / "nvml")
    lines = {**a100s(2), "gpu.0.error.nvmlDeviceGetPowerUsage": 999, "gpu.1.process.0": "C 1 1000", "xid.0": "0 31"}
    scenario = Scenario(tmp_path / "gpus", lines)
    with exporting(scenario.environment(library)) as exporter:
        text = exporter.until(lambda s: s.has("sdp_gpu_xid_timestamp_seconds")).text
    done = subprocess.run(
        [str(tool("promtool")), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
