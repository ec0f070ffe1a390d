"""A small load of every stage on the connected Ray: download, process, online training."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sdp import telemetry
from sdp.download import job as downloading
from sdp.process import job as processing
from sdp.train import job as training
from tests.download_kit import config_for, plain_urls, write_urls
from tests.misbehaving.server import ImageServer
from tests.monitoring.machines import GIB
from tests.process_kit import config_of
from tests.training import config
from tests.waiting import Waiter

RUN = "sd2"


def download(root: Path, rows: int) -> None:
    with ImageServer(images=rows + 20, distinct=20) as server:
        server.warm()
        urls = [*plain_urls(server, rows), *(server.image_url(rows + n, "404") for n in range(rows // 20))]
        slowly = {"at_once": 64, "per_second": rows / 12}
        downloading.run(config_for(write_urls(root / "meta", urls), root / "images", hosts=slowly))


def process(root: Path) -> None:
    settings = ["encode.batch_size=4", "encode.num_workers=1", "encode.accelerator=A10G"]
    settings += ["output.rows_per_file=4"]  # so that it takes some seconds, and figures are seen to grow
    processing.run(config_of(root / "images", root / "latents", "builtin:tiny", *settings))


def train(root: Path, epochs: int, workers: int = 2) -> None:
    """Train online."""
    how = config(
        root, RUN, source__uri=str(root / "images"), model__source="builtin:tiny", data__mode="online",
        encode__dtype="fp32", encode__batch_size=8, encode__accelerator="A10G", encode__num_workers=1,
        transform__node_labels={"ray.io/node-group": "cpu"}, scaling__accelerator="A100",
        scaling__num_workers=workers, data__batch_size=4, max_steps=None, max_epochs=epochs, log__every_steps=2,
        checkpoint__every_steps=10, prices__trainer_hour=3.0,
    )  # fmt: skip
    training.run(how)


def emit_other_metrics(run: str, workers: int) -> None:
    """Emit the metrics of GPUs, faults and other runs through the jobs' own calls: PyTorch's memory, MFU, bad rows,
    dead workers, a validation, a collocated run."""
    own = telemetry.begin(run)
    for rank in range(workers):
        for kind, amount in (("allocated", 14 * GIB), ("reserved", 29 * GIB), ("peak", 27 * GIB)):
            own.show("sdp_train_gpu_memory_bytes", amount, rank=rank, kind=kind)
        own.count("sdp_train_bad_rows_total", 1, rank=rank)
    own.show("sdp_train_mfu", 0.31)
    own.show("sdp_train_validation_loss", 0.5, timesteps="all")
    own.count("sdp_process_deaths_total", 1)
    own.count("sdp_generate_images_total", 1)
    telemetry.begin("collocated").show("sdp_train_info", 1, data_mode="collocated")


@contextmanager
def meanwhile(action: Callable[[], None], every_s: float = 1.0) -> Iterator[None]:
    """Repeat an action in another thread; its error is raised here at the end."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(every_s):
            action()

    worker = Waiter(work)
    worker.start()
    try:
        yield
    finally:
        over.set()
        worker.join(timeout=30)
