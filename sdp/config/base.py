"""The parts of every job's configuration: sections, described keys, and the sections that all jobs share."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, PydanticUndefined

from sdp.config.uri import check_endpoint, check_folder_uri, check_uri, inside
from sdp.errors import Problem

if TYPE_CHECKING:
    from sdp.storage import StorageOptions

REQUIRED: Any = ...
"""Marks a key without a default."""

DRAFT = "draft"
"""The validation context of an incomplete configuration, which may contradict itself."""


class Section(BaseModel):
    """A group of keys, strictly typed: an unknown key, a quoted number and `true` for a number are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        defer_build=True,  # a command needs the models of one job only
    )

    def replaced(self, **values: Any) -> Self:
        """Return a copy with those of the values that are not None."""
        return self.model_copy(update={name: value for name, value in values.items() if value is not None})

    def contradictions(self) -> Iterable[Problem]:
        """Yield combinations of keys that cannot work, with paths relative to this section."""
        return ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        for name, value in handler.resolve_ref_schema(schema)["properties"].items():
            if handler.resolve_ref_schema(value).get("description") != purpose(cls, name):  # said once is enough
                value["description"] = purpose(cls, name)
        return schema

    @model_validator(mode="after")
    def _refuse_contradictions(self, info: ValidationInfo) -> Section:
        problems = () if info.context == DRAFT else tuple(self.contradictions())
        if problems:
            text = "\n".join(map(str, problems))
            raise PydanticCustomError("contradiction", "{text}", {"text": text, "problems": problems})
        return self


def key(default: Any, *, shapes_output: bool = False, example: Any = None, **limits: Any) -> Any:
    """Declare a key with its default: REQUIRED, a value, or a Section class. The docstring below is its `purpose`.

    `shapes_output` marks a key that decides the output's content: it may not change once the output has been begun.
    Other keys (concurrency, deadlines) may change from run to run. `limits` are pydantic's (ge, gt, le, lt,
    multiple_of, min_length).
    """
    is_section = isinstance(default, type) and issubclass(default, Section)
    limits |= {"default_factory" if is_section else "default": default}
    examples = None if example is None else [example]
    return Field(**limits, examples=examples, json_schema_extra={"shapes_output": shapes_output})


def purpose(section: type[Section], name: str) -> str:
    """Return the docstring below a section's key, or below the key that it inherits."""
    sections = [base for base in section.__mro__ if issubclass(base, Section)]
    return next((text for base in sections if (text := _docstrings(base.__module__).get((base.__name__, name)))), "")


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings below the keys of a module's sections, from its source: most commands need none of them."""
    return {
        (section.name, field.target.id): " ".join(str(text.value.value).split())
        for section in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(section, ast.ClassDef)
        for field, text in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a job, for documentation, errors and identities."""

    path: str
    field: FieldInfo
    section: type[Section]

    @property
    def what(self) -> str:
        return purpose(self.section, self.path.rpartition(".")[2])

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
    """Return the class of a field that is a section, else None."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def fields(model: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield a section's fields in the order of declaration, but `storage` last."""
    yield from sorted(model.model_fields.items(), key=lambda item: item[0] == "storage")


def keys(model: type[Section], path: str = "") -> Iterator[Key]:
    """Yield every key of a model and of its sections."""
    for name, field in fields(model):
        if inner := section_of(field):
            yield from keys(inner, f"{path}{name}.")
        else:
            yield Key(path + name, field, model)


def changed(model: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON values that differ from a model's defaults, by dotted path."""
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


@dataclass(frozen=True, slots=True)
class Says:
    """The phrase for a key's expected value in errors, where its type alone would be unclear."""

    phrase: str


Uri = Annotated[str, AfterValidator(check_uri), Says("a URI")]
"""An input: a local path, or file://, s3://, gs://, https:// or hf://."""

FolderUri = Annotated[str, AfterValidator(check_folder_uri), Says("a URI")]
"""An output folder: a local path, or file://, s3:// or gs://."""

LONGEST_S = 604_800
"""Seconds in a week, the longest deadline."""
Name = Annotated[str, Field(min_length=1)]
Endpoint = Annotated[Name, AfterValidator(check_endpoint), Says("an address such as https://host:port")]
"""The address of an S3-compatible store."""
HeaderText = Annotated[str, Field(min_length=1, pattern=r"^[ -~]+$"), Says("some text of printable ASCII characters")]
"""Text that may appear in an HTTP header."""
Positive = Annotated[int, Field(ge=1)]
Resolution = Annotated[int, Field(ge=8, multiple_of=8)]
"""Side of a square picture in pixels; the VAE divides it by 8."""


class Range(Section):
    """A number of workers from `min` to `max`, as the cluster has room."""

    min: int = key(REQUIRED, ge=1)
    """The fewest workers to run with."""
    max: int = key(REQUIRED, ge=1)
    """The most workers to use."""

    def contradictions(self) -> Iterable[Problem]:
        if self.min > self.max:
            yield Problem("min", f"at most max, which is {self.max}", str(self.min), "swap them or raise max")


Workers = Annotated[Positive | Range, Says("a whole number of 1 or more, or {min: N, max: N}")]
"""A fixed number of workers, or an elastic range."""

Labels = Annotated[dict[Name, Name], Says("{label: value, …}")]
"""A selector of Ray node labels: {label: value}; a value may also be !value, in(a,b) or !in(a,b)."""


class WorkersConfig(Section):
    """The number and placement of a job's workers."""

    num_workers: Workers = key(1)
    """Number of workers, or a range in which it may grow and shrink."""
    accelerator: Name | None = key(None)
    """Ray accelerator type to run on, such as A10G; each worker gets one such GPU. null allows any node."""
    use_gpu: bool | None = key(None)
    """Whether each worker gets a GPU where accelerator is null. null gives it one if this machine has GPUs; on a joined
    cluster, set true or false."""

    wait_s: float = key(1800.0, gt=0, le=LONGEST_S)
    """Seconds to wait for places on the cluster, at the start and after all its nodes were lost; then the job fails and
    names what did not come."""

    @property
    def gpu_each(self) -> bool | None:
        """True if each worker gets a GPU, as always with an accelerator; else `use_gpu`. None: the machine decides."""
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
            hint = "set accelerator to null to run on CPUs"
            yield Problem("use_gpu", "true or null while accelerator is set", "false", hint)


class TrainersConfig(WorkersConfig):
    """Workers that train, which may have two GPUs each."""

    gpus_per_worker: int = key(1, ge=1, le=2)
    """GPUs of one trainer. With 2, the U-Net is on the first, and the text encoder (and the VAE, if data.mode is
    collocated) on the second."""

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.gpus_per_worker > 1 and self.use_gpu is False:
            yield Problem("gpus_per_worker", "1 while use_gpu is false", str(self.gpus_per_worker), "or set use_gpu")


class SourceConfig(Section):
    """A job's input."""

    uri: Uri = key(REQUIRED, shapes_output=True, example="s3://bucket/input")
    """URI of the input."""


class OutputConfig(Section):
    """A job's output."""

    uri: FolderUri = key(REQUIRED, example="s3://bucket/output")
    """Folder to write to: a local path, s3:// or gs://. Running the job again continues it."""


class StorageConfig(Section):
    """Access to object stores. Credentials come from the environment, never from a configuration."""

    endpoint: Endpoint | None = key(None)
    """Endpoint of an S3 store other than AWS; null uses the environment's."""
    region: Name | None = key(None)
    """Region of the S3 store; null uses the environment's."""
    timeout_s: float = key(120.0, gt=0, le=LONGEST_S)
    """Deadline of a storage operation in seconds, including its retries."""
    retries: int | None = key(None, ge=0)
    """Retries of a storage operation after a temporary failure; null: as many as timeout_s allows, and 5 while the
    store has not answered yet."""

    def options(self) -> StorageOptions:
        """Return the options for sdp.storage."""
        from sdp.storage import StorageOptions

        return StorageOptions(
            endpoint=self.endpoint, region=self.region, timeout_s=self.timeout_s, retries=self.retries
        )


class JobConfig(Section):
    """The configuration of any job; each has its own `source`, and most have more keys in `output`."""

    source: Section = key(REQUIRED)
    """The input."""
    output: OutputConfig = key(REQUIRED)
    """The output."""
    limit: Positive | None = key(None)
    """Number of rows to take from the start of the source; null takes all. It may be raised later."""
    storage: StorageConfig = key(StorageConfig)
    """Access to object stores."""

    def contradictions(self) -> Iterable[Problem]:
        source = getattr(self.source, "uri", None)
        if source is not None and inside(self.output.uri, source):
            expected = f"a folder outside of source.uri, which is {source}"
            hint = "the next run would read the output as its source"
            yield Problem("output.uri", expected, repr(self.output.uri), hint)
