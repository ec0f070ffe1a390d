"""The configuration of each job."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from sdp.config.shared import JobConfig

_NAMES = ("download", "score", "caption", "process", "train", "generate", "evaluate", "dreambooth")


class _Jobs(Mapping[str, type[JobConfig]]):
    """Imports a job's model when it is asked for, since most commands need only one."""

    def __getitem__(self, job: str) -> type[JobConfig]:
        if job not in _NAMES:
            raise KeyError(job)
        model: type[JobConfig] = getattr(import_module(f"sdp.config.{job}"), f"{job.title()}Config")
        return model

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


JOBS: Mapping[str, type[JobConfig]] = _Jobs()
"""The model of each job, in the order of the pipeline."""
