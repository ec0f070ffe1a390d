"""A load under the eyes of Prometheus, with the chart's rules; what it recorded is what dashboards are tried on.

`python -m tests.monitoring.proof FOLDER` makes a longer one in FOLDER and draws docs/pictures from it.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from scripts import draw_dashboards, tools
from scripts.draw_dashboards import Moment
from tests.monitoring import load
from tests.monitoring.chart import one, rendered
from tests.monitoring.machines import all_gpus, ray_of, scraping, settle
from tests.monitoring.prometheus import Prometheus, running
from tests.nvml import GPU_IS_LOST

RULES_EVERY = "2s"
BEFORE_THE_END_S = 8.0
"""The time of instant queries: during training."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a load."""

    rows: int
    epochs: int
    pictures: int


SMALL, LONG = Size(160, 5, 0), Size(300, 4, 8)


@dataclass(frozen=True, slots=True)
class Recorded:
    prometheus: Prometheus
    start: float
    trained: float
    """Time when training ended."""
    end: float


@contextmanager
def recorded(helm: Path, program: Path, folder: Path, size: Size) -> Iterator[Recorded]:
    """Record a whole load, during which GPUs fail and one is lost."""
    manifests = rendered(helm, f"rules.interval={RULES_EVERY}")
    rules = folder / "rules.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    rules.write_text(yaml.safe_dump(one(manifests, "PrometheusRule")["spec"]))
    with all_gpus(folder / "gpus") as gpus, ray_of() as ports:
        config = {**scraping(manifests, ports, gpus), "rule_files": [str(rules)]}
        with running(program, folder / "prometheus", config) as prometheus:
            start = time.time()
            with load.meanwhile(lambda: settle(prometheus, gpus)):
                prometheus.until("sum(sdp_gpu_up)", lambda samples: bool(samples) and samples[0][1] == 7)
                gpus["a100"].scenario.write({"gpu.4.error.nvmlDeviceGetHandleByIndex": GPU_IS_LOST})
                load.emit_other_metrics(load.RUN, workers=2)
                load.download(folder, size.rows)
                load.process(folder)
                checkpoint = load.train(folder, size.epochs)
                trained = time.time()
                if size.pictures:
                    load.generate(folder, checkpoint, size.pictures)
            yield Recorded(prometheus, start, trained, time.time())


def main(arguments: list[str]) -> int:
    (folder,) = map(Path, arguments)
    helm, program = tools.find("helm"), tools.find("prometheus")
    assert helm is not None and program is not None  # noqa: PT018
    with recorded(helm, program, folder.resolve(), LONG) as recording:
        moment = Moment(recording.start, recording.end, recording.trained - BEFORE_THE_END_S)
        draw_dashboards.draw_all(recording.prometheus.url, moment, draw_dashboards.PICTURES)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
