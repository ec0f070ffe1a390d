"""The sections that all jobs share: source, output, storage and workers."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from sdp.config.base import REQUIRED, Section, key
from sdp.config.phrases import Says
from sdp.config.types import LONGEST_S, Accelerator, Endpoint, FolderUri, Name, Positive, Uri
from sdp.config.uri import inside
from sdp.errors import Problem

if TYPE_CHECKING:
    from sdp.storage import StorageOptions


class Range(Section):
    """A number of workers from `min` to `max`, as the cluster has room."""

    min: int = key(REQUIRED, ge=1)
    """The fewest workers to run with."""
    max: int = key(REQUIRED, ge=1)
    """The most workers to use."""

    def contradictions(self) -> Iterable[Problem]:
        if self.min > self.max:
            yield self.problem("min", f"at most max, which is {self.max}", "swap them or raise max")


Workers = Annotated[Positive | Range, Says("a whole number of 1 or more, or {min: N, max: N}")]
"""A fixed number of workers, or an elastic range."""


class WorkersConfig(Section):
    """The number and placement of a job's workers."""

    num_workers: Workers = key(1)
    """Number of workers, or a range in which it may grow and shrink."""
    accelerator: Accelerator | None = key(None)
    """Ray accelerator type to run on, such as A10G; each worker gets one such GPU. `gpu` is a GPU of any type, `cpu` is
    none. null gives each worker a GPU if this machine has some; a cluster needs another value."""
    wait_s: float = key(1800.0, gt=0, le=LONGEST_S)
    """Seconds to wait for places on the cluster, at the start and after all its nodes were lost; then the job fails and
    names what did not come. At the start, time in which other jobs hold the GPUs does not count."""

    @property
    def gpu_each(self) -> bool | None:
        """True if each worker gets a GPU, False if none does; None if the machine decides."""
        return None if self.accelerator is None else self.accelerator != "cpu"

    @property
    def gpu_type(self) -> str | None:
        """The Ray accelerator type of the workers' GPUs; None if any will do, or none."""
        return None if self.accelerator in ("cpu", "gpu") else self.accelerator

    @property
    def least(self) -> int:
        """The fewest workers."""
        return self.num_workers.min if isinstance(self.num_workers, Range) else self.num_workers

    @property
    def most(self) -> int:
        """The most workers."""
        return self.num_workers.max if isinstance(self.num_workers, Range) else self.num_workers


class SourceConfig(Section):
    """A job's input."""

    uri: Uri = key(REQUIRED, shapes_output=True, example="s3://bucket/input")
    """URI of the input."""


class OutputConfig(Section):
    """A job's output."""

    uri: FolderUri = key(REQUIRED, example="s3://bucket/output")
    """Folder to write to: a local path, s3:// or gs://. Running the job again continues it."""


class Bounds(Section):
    """The bounds of a score."""

    min: float | None = key(None, shapes_output=True)
    """The least score to keep."""
    max: float | None = key(None, shapes_output=True)
    """The highest score to keep."""
    keep_unknown: bool = key(False, shapes_output=True)
    """Whether to keep rows without a score."""

    def contradictions(self) -> Iterable[Problem]:
        if self.min is None and self.max is None:
            yield self.problem("min", "a number while max is null", "set one of them")
        elif self.min is not None and self.max is not None and self.min > self.max:
            yield self.problem("min", f"at most max, which is {self.max:g}", "swap them", f"{self.min:g}")


Filters = Annotated[dict[Name, Bounds], Says("{column: {min: 5.0}, …}, with min, max or both")]


class StorageConfig(Section):
    """Access to object stores. Credentials and region come from the environment."""

    endpoint: Endpoint | None = key(None)
    """Endpoint of an S3 store other than AWS; null uses the environment's."""

    def options(self) -> "StorageOptions":
        """Return the options for sdp.storage."""
        from sdp.storage import StorageOptions

        return StorageOptions(endpoint=self.endpoint)


class JobConfig(Section):
    """The configuration of any job; each has its own `source`, and most have more keys in `output`."""

    source: Section = key(REQUIRED)
    """The input."""
    output: OutputConfig = key(REQUIRED)
    """The output."""
    limit: Positive | None = key(None)
    """Rows to take from the start of the source; null takes all. It may be raised later."""
    storage: StorageConfig = key(StorageConfig)
    """Access to object stores."""

    def contradictions(self) -> Iterable[Problem]:
        source = getattr(self.source, "uri", None)
        if source is not None and inside(self.output.uri, source):
            expected = f"a folder outside of source.uri, which is {source}"
            hint = "the next run would read the output as its source"
            yield self.problem("output.uri", expected, hint, repr(self.output.uri))
