"""What jobs are told: one frozen model a job, from one YAML file and `--set` overrides.

    config = load("download", "download.yaml", ["limit=1000"])

Imports neither torch nor ray, so that a laptop and the control plane can read and check a job in no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, overload

from sdp.config.base import JobConfig, Key, Range, Section, StorageConfig, WorkersConfig, changed, keys
from sdp.config.load import Draft, draft_into, load_into, parse_into

if TYPE_CHECKING:
    from sdp.config.download import DownloadConfig
    from sdp.config.dreambooth import DreamboothConfig
    from sdp.config.evaluate import EvaluateConfig
    from sdp.config.generate import GenerateConfig
    from sdp.config.process import ProcessConfig
    from sdp.config.train import TrainConfig

__all__ = [
    "JOBS",
    "DownloadConfig",
    "Draft",
    "DreamboothConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "JobConfig",
    "Key",
    "ProcessConfig",
    "Range",
    "Section",
    "StorageConfig",
    "TrainConfig",
    "WorkersConfig",
    "changed",
    "draft",
    "dump_yaml",
    "identity",
    "json_schema",
    "keys",
    "load",
    "parse",
]

_MODELS = {
    "download": "DownloadConfig",
    "process": "ProcessConfig",
    "train": "TrainConfig",
    "generate": "GenerateConfig",
    "evaluate": "EvaluateConfig",
    "dreambooth": "DreamboothConfig",
}


class _Jobs(Mapping[str, type[JobConfig]]):
    """Imports a job's models when they are asked for: a mistake in one job's YAML is told without the other three."""

    def __getitem__(self, job: str) -> type[JobConfig]:
        model: type[JobConfig] = getattr(import_module(f"sdp.config.{job}"), _MODELS[job])
        return model

    def __contains__(self, job: object) -> bool:
        return job in _MODELS

    def __iter__(self) -> Iterator[str]:
        return iter(_MODELS)

    def __len__(self) -> int:
        return len(_MODELS)


JOBS: Mapping[str, type[JobConfig]] = _Jobs()
"""The model of each job, in the order of the pipeline."""


def __getattr__(name: str) -> Any:
    for job, model in _MODELS.items():
        if name == model:
            return JOBS[job]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@overload
def load(job: Literal["download"], path: str | None, overrides: Sequence[str] = ()) -> DownloadConfig: ...
@overload
def load(job: Literal["process"], path: str | None, overrides: Sequence[str] = ()) -> ProcessConfig: ...
@overload
def load(job: Literal["train"], path: str | None, overrides: Sequence[str] = ()) -> TrainConfig: ...
@overload
def load(job: Literal["generate"], path: str | None, overrides: Sequence[str] = ()) -> GenerateConfig: ...
@overload
def load(job: Literal["evaluate"], path: str | None, overrides: Sequence[str] = ()) -> EvaluateConfig: ...
@overload
def load(job: Literal["dreambooth"], path: str | None, overrides: Sequence[str] = ()) -> DreamboothConfig: ...
@overload
def load(job: str, path: str | None, overrides: Sequence[str] = ()) -> JobConfig: ...
def load(job: str, path: str | None, overrides: Sequence[str] = ()) -> JobConfig:
    """A job's configuration from a file, if any, and overrides `a.b=c`; ConfigError lists all that is wrong."""
    return load_into(JOBS[job], path, overrides)


@overload
def parse(job: Literal["download"], data: Mapping[str, Any]) -> DownloadConfig: ...
@overload
def parse(job: Literal["process"], data: Mapping[str, Any]) -> ProcessConfig: ...
@overload
def parse(job: Literal["train"], data: Mapping[str, Any]) -> TrainConfig: ...
@overload
def parse(job: Literal["generate"], data: Mapping[str, Any]) -> GenerateConfig: ...
@overload
def parse(job: Literal["evaluate"], data: Mapping[str, Any]) -> EvaluateConfig: ...
@overload
def parse(job: Literal["dreambooth"], data: Mapping[str, Any]) -> DreamboothConfig: ...
@overload
def parse(job: str, data: Mapping[str, Any]) -> JobConfig: ...
def parse(job: str, data: Mapping[str, Any]) -> JobConfig:
    """A job's configuration from plain data, as a saved configuration is."""
    return parse_into(JOBS[job], data)


def draft(job: str, path: str | None, overrides: Sequence[str] = (), *, part: bool = False) -> Draft:
    """As `load`, but required keys may still be missing; a `part` may contradict the defaults of the rest, too."""
    return draft_into(JOBS[job], path, overrides, part=part)


def dump_yaml(
    config: Section,
    *,
    comments: bool = True,
    missing: frozenset[str] = frozenset(),
    only: Collection[str] | None = None,
) -> str:
    """The resolved YAML, each key under a comment that says what it is for; it loads back to an equal configuration.

    `only` leaves out other keys, which have their defaults.
    """
    from sdp.config import dump

    return dump.dump_yaml(config, comments=comments, missing=missing, only=only)


def identity(config: JobConfig) -> dict[str, Any]:
    """The keys that decide what is written, by dotted path, as plain data: a change of one is another output.

    Where a source or a model lies is left out: it may move, and what it holds is compared by whoever reads it.
    """
    values = config.model_dump(mode="json")
    decisive = {key.path: _at(values, key.path) for key in keys(type(config)) if key.shapes_output}
    if also := decisive.get("source.also"):
        decisive["source.also"] = [{name: value for name, value in each.items() if name != "uri"} for each in also]
    if start := decisive.get("model.start_from"):
        decisive["model.start_from"] = start.rstrip("/").rpartition("/")[2]  # which step; it has been read by then
    return {path: value for path, value in decisive.items() if path not in _PLACES}


_PLACES = ("source.uri", "model.source", "checkpoint", "phase_2.source")


def json_schema(job: str) -> dict[str, Any]:
    """The JSON schema of a job's configuration."""
    schema = JOBS[job].model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"sdp {job}"}


def _at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values
