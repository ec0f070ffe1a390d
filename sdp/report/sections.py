"""`sdp report`: one section for each dataset, run and evaluation, and for what it was made from."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from sdp.datasets.audit import RUN, datasets_of
from sdp.datasets.manifest import MANIFEST, read_manifest
from sdp.datasets.output import HEAD
from sdp.errors import DatasetError, SdpError, UserError
from sdp.evaluate.layout import evaluated
from sdp.model.checkpoints import run_of
from sdp.report.data import dataset_section
from sdp.report.evaluation import evaluation_section
from sdp.report.inspect import SubjectKind, identify, kind_of, phases_of
from sdp.report.page import PageSection, write_page
from sdp.report.run import run_sections
from sdp.storage import Storage, StorageOptions, open_storage

_LONGEST_LINEAGE = 9
Subject = tuple[SubjectKind, Storage]
"""A dataset, run or evaluation, with its kind."""
_ORDER = ("Images", "Latents", "Training", "Plan", "Pictures drawn", "Evaluation")


def write_report(
    uris: Sequence[str], out: Path | None = None, *, title: str = "sdp report", pictures: int = 48
) -> tuple[Path, int]:
    """Write the report on these URIs and on what they were made from; return its file and number of sections.

    Without `out` the file is NAME-report.html beside the first URI, or in a new temporary folder for a bucket.
    """
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"report: --out: expected a file in an existing folder, got {str(out)!r}")
    sections = gather(uris, pictures=pictures)
    file = out or _default_file(open_storage(uris[0]).uri)
    write_page(title, sections, file)
    return file, len(sections)


def _default_file(uri: str) -> Path:
    folder, _, name = run_of(uri).rpartition("/")
    return Path(folder if uri.startswith("/") else mkdtemp(prefix="sdp-report-")) / f"{name or 'sdp'}-report.html"


def gather(uris: Sequence[str], options: StorageOptions | None = None, *, pictures: int = 48) -> list[PageSection]:
    """Return a section for each URI and for what it was made from, without repetition, in the pipeline's order.

    Something damaged gets a section with the error; the error is raised if there is nothing else to show.
    """
    subjects: dict[str, Subject] = {}
    for uri in uris:
        for subject in _subjects_at(open_storage(uri, options)):
            for kind, storage in [*_lineage(*subject)][::-1]:
                subjects.setdefault(storage.uri, (kind, storage))
    sections, errors = list[PageSection](), list[SdpError]()
    for kind, storage in subjects.values():
        try:
            match kind:
                case "run":
                    sections += run_sections(storage, pictures)
                case "evaluation":
                    sections.append(evaluation_section(storage))
                case _:
                    sections.append(dataset_section(storage, pictures))
        except DatasetError as error:
            errors.append(error)
            sections.append(PageSection("Damaged", storage.uri, f"Cannot be read: {error}", False))
    if errors and len(errors) == len(sections):
        raise errors[0]
    return sorted(sections, key=_rank)


def _rank(section: PageSection) -> int:
    return next((n for n, title in enumerate(_ORDER) if section.title.startswith(title)), len(_ORDER))


def _subjects_at(storage: Storage) -> list[Subject]:
    """Return the subjects of a URI: itself, the phases of a two-phase run, or a checkpoint's run."""
    kind = kind_of(storage)
    if kind in (None, "checkpoint") and (run := run_of(storage.uri)) != storage.uri:
        return _subjects_at(open_storage(run, storage.options))
    kind = kind or identify(storage)[0]
    if kind in ("files", "checkpoint"):
        raise DatasetError(f"{storage.uri}: neither a dataset of sdp (no {HEAD}) nor a run (no {RUN}); check the URI")
    return [(kind, phase) for phase in phases_of(storage)] or [(kind, storage)]


def _lineage(kind: SubjectKind | None, storage: Storage) -> Iterator[Subject]:
    """Yield a subject, then what it was made from, as far as that can be read."""
    with suppress(SdpError):  # moved, no access, or damaged, which its own section reports
        for _ in range(_LONGEST_LINEAGE):
            if kind is None:
                return
            yield kind, storage
            if (made_from := _made_from(kind, storage)) is None:
                return
            storage = open_storage(made_from, storage.options)
            kind = kind_of(storage)


def _made_from(kind: SubjectKind, storage: Storage) -> str | None:
    match kind:
        case "run":
            return next(iter(datasets_of(storage)), None)
        case "evaluation":
            return evaluated(storage)
    if not storage.exists(MANIFEST):
        return None
    uri = (read_manifest(storage).input or {}).get("uri")
    return str(uri) if uri else None
