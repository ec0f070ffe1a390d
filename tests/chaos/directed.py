"""Cases that are run by name: faults that were found, and seeds that failed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WHOLE = ("download", "process", "score", "train", "online", "generate")
"""The stages, in their order."""


@dataclass(frozen=True)
class Kill:
    """A process to kill, and the time for it."""

    target: str
    at: float | None = None
    """The share of an undisturbed run's seconds."""
    logged: str = ""
    """The text that the job's log must contain first."""

    def is_due(self, share: float, log: Path) -> bool:
        if self.at is not None and share < self.at:
            return False
        return not self.logged or self.logged in log.read_text(errors="replace")


@dataclass(frozen=True)
class Case:
    """A stage, where it runs, and whom to kill in which order."""

    stage: str
    clustered: bool
    kills: tuple[Kill, ...]

    @property
    def on_ray(self) -> bool:
        """True if the job runs on a Ray of its own even where it needs none, because a process of Ray's is killed."""
        return not self.clustered and any(kill.target not in ("driver", "supervisor", "s3") for kill in self.kills)


_AT_WORK = {
    "download": "download: ",
    "process": "process: 0 of",
    "score": "score: 0 of",
    "train": "train: step",
    "online": "train: step",
    "generate": "parts to write",
}
"""The line that each stage prints when its workers are at work or about to be."""


def _in_each_stage(*targets: str, clustered: bool = False) -> dict[str, Case]:
    where = "-on-a-cluster" if clustered else ""
    return {
        f"{stage}-{target.replace(' ', '-')}{where}": Case(stage, clustered, (Kill(target, logged=_AT_WORK[stage]),))
        for target in targets
        for stage in WHOLE
    }


DIRECTED: Mapping[str, Case] = {
    **_in_each_stage("gcs", "raylet", "environment agent", "dashboard agent", "worker", "driver", "supervisor"),
    **_in_each_stage("node", "gcs", "supervisor", clustered=True),
    # Ray is only just starting.
    **{f"{stage}-raylet-at-once": Case(stage, False, (Kill("raylet"),)) for stage in WHOLE},
    # Single actors of a job, and a trainer.
    "download-hub": Case("download", False, (Kill("ray::Hub", logged=_AT_WORK["download"]),)),
    "download-desk": Case("download", False, (Kill("ray::Desk", logged=_AT_WORK["download"]),)),
    "process-desk": Case("process", False, (Kill("ray::Desk", logged=_AT_WORK["process"]),)),
    "process-reader": Case("process", False, (Kill("ray::MapBatches(_read_pieces)", logged=_AT_WORK["process"]),)),
    "train-board": Case("train", False, (Kill("ray::Board", logged=_AT_WORK["train"]),)),
    "train-trainer": Case("train", False, (Kill("ray::RayTrainWorker", logged=_AT_WORK["train"]),)),
    "online-pool": Case("online", True, (Kill("ray::EncoderPool", logged=_AT_WORK["online"]),)),
    # Seeds that failed once.
    "seed-33": Case("generate", False, (Kill("dashboard agent", 0.303), Kill("raylet", 0.623), Kill("worker", 1.181))),
    "seed-43": Case("generate", True, (Kill("supervisor", 0.481), Kill("gcs", 0.589), Kill("gcs", 0.991))),
    "seed-47": Case("online", True, (Kill("s3", 0.335), Kill("environment agent", 0.72))),
    "seed-74": Case(
        "train", False, (Kill("dashboard agent", 0.157), Kill("worker", 0.236), Kill("environment agent", 1.127))
    ),
    "seed-76": Case("train", True, (Kill("worker", 0.069), Kill("dashboard agent", 0.26))),
    "seed-79": Case("process", True, (Kill("gcs", 0.32), Kill("worker", 0.775))),
    "seed-84": Case("train", False, (Kill("raylet", 0.636),)),
}
