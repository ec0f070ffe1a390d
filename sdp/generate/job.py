"""`sdp generate`: units of addresses, each drawn and written whole by one generator, on Ray Data.

A single generator that may run anywhere draws in this process: no cluster is started for it.
"""

import os
import pickle
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdp import cluster, telemetry
from sdp.config import GenerateConfig, Range, identity
from sdp.console import Progress, say, table
from sdp.datasets import manifest
from sdp.datasets.manifest import Dataset
from sdp.datasets.output import HEAD, Head, Output, open_output, peek_output, read_head
from sdp.datasets.parts import PartInfo, iter_rows
from sdp.errors import SdpError, UserError
from sdp.generate.layout import KIND, SHEET
from sdp.generate.prompts import FOLDER, Prompt, freeze, frozen_prompts, read_prompts
from sdp.generate.report import Figures, closing, emit, forecast, progress_line
from sdp.generate.source import Drawer, choose
from sdp.lease import Lease
from sdp.storage import open_storage

if TYPE_CHECKING:
    import pyarrow as pa

    from sdp.generate.worker import Orders, Task

_TASK_RETRIES = 30
"""Against pictures that kill their generator for ever. Of a node that has gone Ray hears after seconds, and each try
meanwhile to reach its actors counts as one."""
_STRIP = 8
"""Pictures of a prompt on the contact sheet."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run has come to."""

    dataset: Dataset | None
    """None after a dry run."""
    figures: Figures
    """Of this run."""
    sheet: str | None = None
    """Where the contact sheet is."""


def run(config: GenerateConfig, *, dry_run: bool = False) -> Summary:
    """Draw what is not drawn yet."""
    storage = open_storage(config.output.uri, config.storage.options())
    prompts = read_prompts(config)
    begun = read_head(storage).identity.get("checkpoint") if storage.exists(HEAD) else None
    drawer = choose(config, begun)
    head = Head(KIND, config.output.rows_per_file, False, _identity(config, drawer))
    planned = freeze(peek_output(storage, head), prompts, config, publish=False)
    if dry_run:
        say(table(forecast(config, planned, drawer, len(prompts))))
        return Summary(None, Figures())
    if not _alone(config):
        cluster.require_reachable()
    with Lease.acquire(storage, "sdp generate") as lease:
        output = freeze(open_output(storage, head), prompts, config)
        infos, figures = _Run(config, output, prompts, drawer, lease).work_off()
        lease.check()
        dataset = manifest.finish(
            output,
            infos=infos,
            config=config.model_dump(mode="json"),
            models={
                "checkpoint": f"{drawer.uri} sha256:{drawer.digest}",
                "model": f"{drawer.model} sha256:{drawer.model.sha256}",
            },
            input={"uri": config.source.uri or storage.uri_of(FOLDER.rstrip("/"))},
        )
        sheet = _write_sheet(dataset, prompts, config)
    say(table(closing(dataset, figures, sheet, config.output.image_files)))
    return Summary(dataset, figures, sheet)


def _identity(config: GenerateConfig, drawer: Drawer) -> dict[str, Any]:
    """What decides the pictures: the checkpoint counts by what it has turned out to be."""
    return {
        **identity(config),
        "checkpoint": drawer.uri,
        "checkpoint.digest": drawer.digest,
        "model.digest": drawer.model.sha256,
    }


class _Run:
    """One run over the pending works."""

    def __init__(
        self, config: GenerateConfig, output: Output, prompts: Sequence[Prompt], drawer: Drawer, lease: Lease
    ) -> None:
        self._config, self._output, self._prompts = config, output, prompts
        self._drawer, self._lease = drawer, lease
        self._figures = Figures()
        self._began = time.monotonic()

    def work_off(self) -> tuple[list[PartInfo], Figures]:
        """Make all parts that are missing."""
        pending = self._output.pending()
        if not pending:
            return [], self._figures
        works = len(self._output.index.works())
        say(f"generate: {len(pending)} of {works} parts to make, with {self._drawer.uri}")
        from sdp.generate.worker import tasks_of  # brings torch

        known = [*self._prompts, *self._held_back()]
        tasks = tasks_of(pending, known, self._config.images_per_prompt)
        self._figures.total = sum(len(work.unit) for work in pending)
        if not _alone(self._config):
            _refuse_what_cannot_start(self._config, cluster.connect())
        self._telemetry = telemetry.begin(self._config.output.uri)
        with Progress("generate") as progress:
            self._progress = progress
            infos = self._here(tasks) if _alone(self._config) else self._on_ray(tasks)
        return infos, self._figures

    def _held_back(self) -> list[Prompt]:
        """Prompts that a lower limit leaves out, and that have addresses from before."""
        return frozen_prompts(self._output.storage, self._output.index)[len(self._prompts) :]

    def _orders(self) -> "Orders":
        from sdp.generate.sample import Sampling
        from sdp.generate.worker import Orders

        config = self._config
        sampler = config.sampler
        return Orders(
            drawer=self._drawer,
            how=Sampling(sampler.scheduler, sampler.steps, sampler.guidance_scale, config.resolution),
            negative_prompt=sampler.negative_prompt,
            seed=config.seed,
            batch_size=config.scaling.batch_size,
            precision=config.precision,
            output=self._output.storage,
            image_files=config.output.image_files,
            storage=config.storage.options(),
        )

    def _here(self, tasks: "Sequence[Task]") -> list[PartInfo]:
        from sdp.generate.worker import Worker

        worker, infos = Worker(self._orders()), list[PartInfo]()
        for task in tasks:
            before = self._figures.done
            infos.append(worker.make(task, self._drawn))
            self._part_made(infos[-1], before)
        return infos

    def _on_ray(self, tasks: "Sequence[Task]") -> list[PartInfo]:
        from ray.exceptions import RayError

        infos: list[PartInfo] = []
        try:
            for row in _pipeline(self._config, self._orders(), tasks).iter_rows():
                made: PartInfo | SdpError = pickle.loads(row["made"])
                if isinstance(made, SdpError):
                    raise made
                infos.append(made)
                self._part_made(made, self._figures.done)
        except RayError as error:
            raise _in_our_words(error, self._config) from error
        return infos

    def _drawn(self, pictures: int) -> None:
        self._lease.check()
        self._figures.done += pictures
        self._show()

    def _part_made(self, info: PartInfo, before: int) -> None:
        self._lease.check()
        self._figures.done = before + len(info.unit)
        self._figures.parts += 1
        self._show()

    def _show(self) -> None:
        self._figures.elapsed_s = time.monotonic() - self._began
        self._progress.update(progress_line(self._figures))
        emit(self._telemetry, self._figures)


def _workers(config: GenerateConfig) -> tuple[int, int]:
    workers = config.scaling.num_workers
    return (workers.min, workers.max) if isinstance(workers, Range) else (workers, workers)


def _alone(config: GenerateConfig) -> bool:
    """Whether one generator, which may run anywhere, is all that is asked for, and no cluster has been joined."""
    ray = sys.modules.get("ray")
    joined = "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())
    return not joined and _workers(config)[1] == 1 and config.scaling.accelerator is None


def _gpus(config: GenerateConfig, resources: dict[str, float]) -> float:
    return 1.0 if resources.get("GPU") or config.scaling.accelerator else 0.0


def _refuse_what_cannot_start(config: GenerateConfig, resources: dict[str, float]) -> None:
    can_grow = "RAY_ADDRESS" in os.environ
    cluster.require_accelerator("scaling.accelerator", config.scaling.accelerator, can_grow=can_grow)
    what = "GPU" if _gpus(config, resources) else "CPU"
    there, least = int(resources.get(what, 0)), _workers(config)[0]
    if least > there and not can_grow:
        raise UserError(
            f"scaling.num_workers: expected at most {there} here, got {least}; each takes a {what}, lower it or join "
            "a larger cluster (RAY_ADDRESS)"
        )


def _pipeline(config: GenerateConfig, orders: "Orders", tasks: "Sequence[Task]") -> Any:
    import ray
    from ray.data import ActorPoolStrategy
    from ray.util.annotations import RayDeprecationWarning

    least, most = _workers(config)
    gpus = _gpus(config, ray.cluster_resources())  # type: ignore[no-untyped-call]  # Ray's
    items = [{"task": pickle.dumps(task)} for task in tasks]
    patience = cluster.data_settings(wait_for_min_actors_s=round(config.scaling.start_timeout_s))
    with patience, warnings.catch_warnings():
        # That further arguments go away in 2.64. By default Ray tries again without end what kills its process.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            _Generator,
            fn_constructor_args=(orders,),
            batch_size=1,
            batch_format="pyarrow",
            num_cpus=None if gpus else 1,  # Ray Data warns of asking for both
            compute=ActorPoolStrategy(
                min_size=min(least, len(items)), max_size=min(most, len(items)), max_tasks_in_flight_per_actor=2
            ),
            max_restarts=_TASK_RETRIES,
            max_task_retries=_TASK_RETRIES,
            **cluster.placement(config.scaling.accelerator, gpus),
        )


class _Generator:
    """An actor of the pool."""

    def __init__(self, orders: "Orders") -> None:
        from sdp.generate.worker import Worker

        self._worker = Worker(orders)
        telemetry.begin(orders.output.uri).process("generator")

    def __call__(self, batch: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        made = [pickle.dumps(self._make(pickle.loads(data))) for data in batch["task"].to_pylist()]
        return pa.table({"made": pa.array(made, pa.binary())})

    def _make(self, task: "Task") -> PartInfo | SdpError:
        """An error of ours is handed over as it is: raised here, it would reach the driver as a text of Ray Data's."""
        try:
            return self._worker.make(task)
        except SdpError as error:
            return error


def _in_our_words(error: BaseException, config: GenerateConfig) -> SdpError:
    """One line about what Ray says."""
    from ray.exceptions import GetTimeoutError

    if isinstance(error, GetTimeoutError):
        return UserError(
            f"scaling.num_workers: {_workers(config)[0]} generators have not started within "
            f"{config.scaling.start_timeout_s:g} s; let the cluster grow, ask for fewer or for another accelerator, or "
            "raise scaling.start_timeout_s"
        )
    line = " ".join(str(error).split())[-300:]
    return SdpError(f"the drawing was broken off ({line}); run it again: it goes on where it was")


def _write_sheet(dataset: Dataset, prompts: Sequence[Prompt], config: GenerateConfig) -> str | None:
    """The first prompts' pictures on one sheet, written anew by every run."""
    per_prompt, shown = config.images_per_prompt, min(config.output.sheet_prompts, len(prompts))
    if not shown:
        return None
    from sdp.generate.sheet import Strip, contact_sheet

    wanted = {p * per_prompt + k for p in range(shown) for k in range(min(per_prompt, _STRIP))}
    pictures = _pictures(dataset, wanted)
    strips = [
        Strip(prompt or "(no caption)", [pictures.get(p * per_prompt + k) for k in range(min(per_prompt, _STRIP))])
        for p, prompt in enumerate(prompts[:shown])
    ]
    dataset.storage.publish(SHEET, contact_sheet(strips, side=max(128, min(256, config.resolution))))
    return dataset.storage.uri_of(SHEET)


def _pictures(dataset: Dataset, wanted: set[int]) -> dict[int, bytes]:
    """The pictures of some addresses."""
    found: dict[int, bytes] = {}
    columns = (dataset.parts[name].to_pylist() for name in ("path", "start", "stop"))
    for path, start, stop in zip(*columns, strict=True):
        if wanted.isdisjoint(range(start, stop)):
            continue
        for batch in iter_rows(dataset.storage, path, ["row", "image"], 64):
            rows = zip(batch["row"].to_pylist(), batch["image"].to_pylist(), strict=True)
            found |= {row: image for row, image in rows if row in wanted}
    return found
