"""What every job's configuration is made of: sections, described keys, and the pieces that all jobs share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined

from sdp.config.uri import check_endpoint, check_folder_uri, check_uri, inside
from sdp.errors import Problem

if TYPE_CHECKING:
    from sdp.storage import StorageOptions

REQUIRED: Any = ...
"""The default of a key that has none."""

DRAFT = "draft"
"""The validation context of a configuration that is not complete yet, and so may contradict itself."""


class Section(BaseModel):
    """A group of keys. Nothing is guessed: an unknown key, a quoted number and `true` for a number are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        defer_build=True,  # a command that needs one job does not pay for the other three
    )

    def contradictions(self) -> Iterable[Problem]:
        """Combinations of keys that cannot work; paths are relative to this section."""
        return ()

    @model_validator(mode="after")
    def _refuse_contradictions(self, info: ValidationInfo) -> Section:
        problems = () if info.context == DRAFT else tuple(self.contradictions())
        if problems:
            text = "\n".join(map(str, problems))
            raise PydanticCustomError("contradiction", "{text}", {"text": text, "problems": problems})
        return self


def key(default: Any, what: str, *, shapes_output: bool = False, example: Any = None, **limits: Any) -> Any:
    """Declare a key: its default (REQUIRED, a value, or a Section class) and what it is for, in a sentence.

    `shapes_output` marks a key that decides what is written: it belongs to the identity of the output, and may not
    change while that output is being made. The rest (concurrency, deadlines) may change from run to run.
    `limits` are pydantic's (ge, gt, le, lt, multiple_of, min_length).
    """
    settings: dict[str, Any] = {
        "description": what,
        "json_schema_extra": {"shapes_output": shapes_output},
        **limits,
    }
    if example is not None:
        settings["examples"] = [example]
    if isinstance(default, type) and issubclass(default, Section):
        return Field(default_factory=default, **settings)
    return Field(default, **settings)


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a job, as documentation, errors and identities see it."""

    path: str
    field: FieldInfo

    @property
    def what(self) -> str:
        return self.field.description or ""

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        return None if self.field.default is PydanticUndefined else self.field.default

    @property
    def example(self) -> Any:
        return (self.field.examples or [None])[0]

    @property
    def shapes_output(self) -> bool:
        extra = self.field.json_schema_extra
        return bool(extra.get("shapes_output")) if isinstance(extra, dict) else False


def section_of(field: FieldInfo) -> type[Section] | None:
    """The class of a field that is a section, else None."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def fields(model: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a section as a reader wants them: in the order of declaration, `storage` last."""
    for name, field in model.model_fields.items():
        if name != "storage":
            yield name, field
    if "storage" in model.model_fields:
        yield "storage", model.model_fields["storage"]


def keys(model: type[Section], path: str = "") -> Iterator[Key]:
    """Every key of a model, those of its sections included."""
    for name, field in fields(model):
        if inner := section_of(field):
            yield from keys(inner, f"{path}{name}.")
        else:
            yield Key(path + name, field)


def changed(model: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, as JSON holds them, that differ from a model's defaults, by dotted path."""
    defaults = {key.path: key.field.get_default(call_default_factory=True) for key in keys(model)}
    different: dict[str, Any] = {}

    def walk(section: Mapping[str, Any], prefix: str) -> None:
        for name, value in section.items():
            path = prefix + name
            default = defaults.get(path)
            if path not in defaults and isinstance(value, Mapping):
                walk(value, f"{path}.")
            elif path not in defaults or value != (list(default) if isinstance(default, tuple) else default):
                different[path] = value

    walk(values, "")
    return different


def sections_of(model: type[Section], path: str = "") -> Iterator[tuple[str, FieldInfo, type[Section]]]:
    """Every section below a model, parents first: its dotted path, its field and its class."""
    for name, field in fields(model):
        if inner := section_of(field):
            yield path + name, field, inner
            yield from sections_of(inner, f"{path}{name}.")


@dataclass(frozen=True, slots=True)
class Says:
    """How an error names what a key expects, where its type alone would not say it well."""

    phrase: str


Uri = Annotated[str, AfterValidator(check_uri), Says("a URI")]
"""Something to read: a local path, or file://, s3://, gs://, https:// or hf://."""

FolderUri = Annotated[str, AfterValidator(check_folder_uri), Says("a URI")]
"""A folder to write: a local path, or file://, s3:// or gs://."""

LONGEST_S = 604_800
"""Seconds of a week: a deadline that is longer is none, and clocks overflow at the absurd."""
Name = Annotated[str, Field(min_length=1)]
Endpoint = Annotated[Name, AfterValidator(check_endpoint), Says("an address such as https://host:port")]
"""Of an S3-compatible store."""
HeaderText = Annotated[str, Field(min_length=1, pattern=r"^[ -~]+$"), Says("some text of printable ASCII characters")]
"""What may stand in a header of HTTP."""
Positive = Annotated[int, Field(ge=1)]
Resolution = Annotated[int, Field(ge=8, multiple_of=8)]
"""Pixels of a square picture's side; the VAE divides it by 8."""


class Range(Section):
    """From `min` to `max` of something, as the cluster has room."""

    min: int = key(REQUIRED, "The fewest to go on with.", ge=1)
    max: int = key(REQUIRED, "The most to use.", ge=1)

    def contradictions(self) -> Iterable[Problem]:
        if self.min > self.max:
            yield Problem("min", f"at most max, which is {self.max}", str(self.min), "swap them or raise max")


Workers = Annotated[Positive | Range, Says("a whole number of 1 or more, or {min: N, max: N}")]
"""A fixed number of workers, or a range to be elastic in."""

Labels = Annotated[dict[Name, Name], Says("{label: value, …}")]
"""Ray's labels of nodes, each with the value it has to have; also !value, in(one,two) and !in(one,two)."""


class WorkersConfig(Section):
    """The workers of a job: how many, and where they run."""

    num_workers: Workers = key(1, "How many workers, or a range to grow and shrink in.")
    accelerator: Name | None = key(
        None, "The Ray accelerator type to run on, such as A10G: each worker gets one such GPU. null takes any node."
    )
    use_gpu: bool | None = key(
        None,
        "Whether each worker gets a GPU where accelerator is null. null gives it one if this machine has GPUs; on a "
        "cluster that was joined, say true or false.",
    )

    wait_s: float = key(
        1800.0,
        "Seconds to wait for places on the cluster while it grows; then the job ends, and says what did not come.",
        gt=0,
        le=LONGEST_S,
    )

    @property
    def gpu_each(self) -> bool | None:
        """Whether each worker gets a GPU; None where the configuration leaves it to the machine."""
        return True if self.accelerator is not None else self.use_gpu

    @property
    def least(self) -> int:
        """The fewest workers."""
        return self.num_workers.min if isinstance(self.num_workers, Range) else self.num_workers

    @property
    def most(self) -> int:
        """The most workers."""
        return self.num_workers.max if isinstance(self.num_workers, Range) else self.num_workers

    def contradictions(self) -> Iterable[Problem]:
        if self.accelerator is not None and self.use_gpu is False:
            yield Problem(
                "use_gpu",
                "true or null while accelerator is set",
                "false",
                "set accelerator to null to run on CPUs",
            )


class TrainersConfig(WorkersConfig):
    """Workers that train, which may have two GPUs each."""

    gpus_per_worker: int = key(
        1,
        "GPUs of a trainer: with 2 the U-Net is on the first, and the text encoder (and the VAE, where data.mode is "
        "collocated) on the second.",
        ge=1,
        le=2,
    )

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.gpus_per_worker > 1 and self.use_gpu is False:
            yield Problem("gpus_per_worker", "1 while use_gpu is false", str(self.gpus_per_worker), "or set use_gpu")


class SourceConfig(Section):
    """Where a job reads from."""

    uri: Uri = key(REQUIRED, "Where to read from.", shapes_output=True, example="s3://bucket/input")


class OutputConfig(Section):
    """Where a job writes to."""

    uri: FolderUri = key(
        REQUIRED,
        "The folder to write: a local path, s3:// or gs://. Running the job again continues what is there.",
        example="s3://bucket/output",
    )


class StorageConfig(Section):
    """How object stores are reached. Credentials come from the environment's usual places and never from here."""

    endpoint: Endpoint | None = key(None, "Endpoint of an S3 store other than AWS; null takes the environment's.")
    region: Name | None = key(None, "Region of the S3 store; null takes the environment's.")
    timeout_s: float = key(
        60.0, "Deadline of one storage operation in seconds, its retries included.", gt=0, le=LONGEST_S
    )
    retries: int = key(5, "How often a storage operation that failed for a passing reason is tried again.", ge=0)

    def options(self) -> StorageOptions:
        """The same, as sdp.storage takes it."""
        from sdp.storage import StorageOptions

        return StorageOptions(
            endpoint=self.endpoint, region=self.region, timeout_s=self.timeout_s, retries=self.retries
        )


class JobConfig(Section):
    """What every job is told. Each job has a `source` of its own, and most have an `output` with more keys."""

    source: Section = key(REQUIRED, "Where to read from.")
    output: OutputConfig = key(REQUIRED, "Where to write to.")
    limit: Positive | None = key(
        None, "How many rows of the source to take, from its first; null takes them all. It may be raised later."
    )
    storage: StorageConfig = key(StorageConfig, "How object stores are reached.")

    def contradictions(self) -> Iterable[Problem]:
        source = getattr(self.source, "uri", None)
        if source is not None and inside(self.output.uri, source):
            yield Problem(
                "output.uri",
                f"a folder outside of source.uri, which is {source}",
                repr(self.output.uri),
                "what is written there would be read as source the next time",
            )
