"""`sdp inspect` and `sdp report`: sections on datasets, runs and evaluations, and on what they were made from."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from sdp.config.train import PHASES
from sdp.datasets import tombstones
from sdp.datasets.audit import RUN, datasets_of
from sdp.datasets.output import HEAD
from sdp.errors import DatasetError, SdpError, UserError
from sdp.evaluate.layout import RESULT, evaluated
from sdp.model.checkpoints import COMPLETE, NAMED, NEWEST, find_checkpoint, run_of
from sdp.report.data import dataset_section
from sdp.report.evaluation import evaluation_section
from sdp.report.page import PageSection, page_of
from sdp.report.run import checkpoint_section, run_section
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.storage.named import written_for

SubjectKind = Literal["checkpoint", "run", "evaluation", "dataset"]

_MARKERS: dict[str, SubjectKind] = {COMPLETE: "checkpoint", RUN: "run", RESULT: "evaluation", HEAD: "dataset"}
_ORDER = ("Pictures drawn", "Training", "Evaluation", "Images", "Latents")
"""Results first."""


def write_report(uris: Sequence[str], out: Path | None = None, *, pictures: int = 48) -> tuple[Path, int]:
    """Write the report on these URIs and on what they were made from; return its file and number of sections.

    Without `out` the file is NAME-report.html beside the first URI, or in a new temporary folder for a bucket.
    """
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"report: --out: expected a file in an existing folder, got {str(out)!r}")
    sections = gather(uris, pictures=pictures)
    file = out or _default_file(open_storage(uris[0]).uri)
    with written_for("report: --out", file) as sink:
        sink.write(page_of("sdp report", sections))
    return file, len(sections)


def _default_file(uri: str) -> Path:
    folder, _, name = run_of(uri).rpartition("/")
    return Path(folder if uri.startswith("/") else mkdtemp(prefix="sdp-report-")) / f"{name or 'sdp'}-report.html"


def gather(uris: Sequence[str], options: StorageOptions | None = None, *, pictures: int = 48) -> list[PageSection]:
    """Return the sections of each URI and of what it was made from, without repetition, results first.

    A checkpoint's URI stands for its run. Something damaged gets a section with the error; the error is raised if there
    is nothing else to show.
    """
    subjects: dict[str, Storage] = {}
    for uri in uris:
        lineage = _lineage(*identify(open_storage(run_of(uri), options)))
        subjects |= {storage.uri: storage for storage in [*lineage][::-1]}
    sections, errors = dict[str, PageSection](), list[SdpError]()
    for storage in subjects.values():
        try:
            sections |= {section.uri: section for section in describe(storage, pictures=pictures)}
        except DatasetError as error:
            errors.append(error)
            sections[storage.uri] = PageSection("Damaged", storage.uri, f"Cannot be read: {error}", False)
    if errors and len(errors) == len(sections):
        raise errors[0]
    return sorted(sections.values(), key=_rank)


def describe(
    storage: Storage,
    *,
    verify: bool = False,
    pictures: int = 0,
    problems: Iterable[str] = (),
    prices: Mapping[str, float] | None = None,
) -> list[PageSection]:
    """Describe what is at a URI; a run has a section for each phase.

    For a dataset, `verify` reads every byte, and `problems` are added to its own. A run's cost uses `prices`, or else
    those that the run was given.
    """
    kind, storage = identify(storage)
    match kind:
        case "checkpoint":
            return [checkpoint_section(storage, prices)]
        case "run":
            return [run_section(phase, pictures, prices=prices) for phase in phases_of(storage) or [storage]]
        case "evaluation":
            return [evaluation_section(storage)]
    return [dataset_section(storage, verify=verify, pictures=pictures, problems=problems)]


def kind_of(storage: Storage) -> SubjectKind | None:
    """Return the kind of a folder by its marker file, or None."""
    marked = (kind for name, kind in _MARKERS.items() if storage.exists(name))
    return next(marked, None) or ("run" if phases_of(storage) else None)


def phases_of(storage: Storage) -> list[Storage]:
    """Return the phases of a two-phase run."""
    return [phase for phase in map(storage.child, PHASES) if phase.exists(RUN)]


def identify(storage: Storage) -> tuple[SubjectKind, Storage]:
    """Return the kind and folder of a URI: `RUN/checkpoints/latest` becomes a checkpoint's folder."""
    if kind := kind_of(storage):
        return kind, storage
    if NEWEST.search(storage.uri):
        return "checkpoint", find_checkpoint(storage.uri, storage.options)
    if NAMED.search(storage.uri) and storage.names():
        raise DatasetError(f"{storage.uri}: no {COMPLETE}: incomplete, or still being written; use another checkpoint")
    raise DatasetError(f"{storage.uri}: neither a dataset of sdp (no {HEAD}) nor a run (no {RUN}); check the URI")


def _rank(section: PageSection) -> int:
    return next((n for n, title in enumerate(_ORDER) if section.title.startswith(title)), len(_ORDER))


def _lineage(kind: SubjectKind, storage: Storage) -> Iterator[Storage]:
    """Yield a subject and what it was made from, as far as that can be read, the nearest first; some twice."""
    yield storage
    with suppress(SdpError):  # moved, no access, or damaged, which its own section reports
        if kind == "evaluation" and (evaluated_uri := evaluated(storage)):
            storage = open_storage(evaluated_uri, storage.options)
        if kind_of(storage) == "run":
            yield storage
            uris = (uri for phase in phases_of(storage) or [storage] for uri in datasets_of(phase))
            storage = open_storage(next(uris, storage.uri), storage.options)
        yield from filter(kind_of, tombstones.lineage(storage))
