"""A load under the eyes of Prometheus, with the chart's rules; what it recorded is what dashboards are tried on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.monitoring import load
from tests.monitoring.chart import one, rendered
from tests.monitoring.machines import all_gpus, kubernetes_metrics, ray_of, scraping, settle
from tests.monitoring.prometheus import Prometheus, running
from tests.nvml import GPU_IS_LOST

RULES_EVERY = "2s"
ROWS, EPOCHS = 160, 3


@dataclass(frozen=True, slots=True)
class Recorded:
    prometheus: Prometheus
    start: float
    end: float


@contextmanager
def recorded(helm: Path, program: Path, folder: Path) -> Iterator[Recorded]:
    """Record a whole load, during which GPUs fail and one is lost."""
    manifests = rendered(helm, f"rules.interval={RULES_EVERY}")
    rules = folder / "rules.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    rules.write_text(yaml.safe_dump(one(manifests, "PrometheusRule")["spec"]))
    with all_gpus(folder / "gpus") as gpus, ray_of() as ports, kubernetes_metrics() as kubernetes:
        config = {**scraping(manifests, ports, gpus, kubernetes), "rule_files": [str(rules)]}
        with running(program, folder / "prometheus", config) as prometheus:
            start = time.time()
            with load.meanwhile(lambda: settle(prometheus, gpus)):
                prometheus.until("sum(sdp_gpu_up)", lambda samples: bool(samples) and samples[0][1] == 7)
                gpus["a100"].scenario.write({"gpu.4.error.nvmlDeviceGetHandleByIndex": GPU_IS_LOST})
                load.emit_other_metrics(load.RUN, workers=2)
                load.download(folder, ROWS)
                load.process(folder)
                load.train(folder, EPOCHS)
            yield Recorded(prometheus, start, time.time())
