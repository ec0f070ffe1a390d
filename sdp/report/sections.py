"""`sdp inspect` and `sdp report`: sections on datasets, runs and evaluations, and on what they were made from."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from sdp.datasets.audit import datasets_of
from sdp.datasets.inspect import Description
from sdp.datasets.manifest import MANIFEST, read_manifest
from sdp.errors import DatasetError, SdpError, UserError
from sdp.evaluate.layout import evaluated
from sdp.model.checkpoints import run_of
from sdp.report.data import dataset_section
from sdp.report.evaluation import evaluation_section
from sdp.report.inspect import Checkpoint, Described, Run, SubjectKind, describe, identify, kind_of, phases_of
from sdp.report.page import PageSection, page_of
from sdp.report.run import checkpoint_section, run_section
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.storage.named import written_for

_LONGEST_LINEAGE = 9
_ORDER = ("Images", "Latents", "Training", "Pictures drawn", "Evaluation")


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
    with written_for("report: --out", file) as sink:
        sink.write(page_of(title, sections))
    return file, len(sections)


def _default_file(uri: str) -> Path:
    folder, _, name = run_of(uri).rpartition("/")
    return Path(folder if uri.startswith("/") else mkdtemp(prefix="sdp-report-")) / f"{name or 'sdp'}-report.html"


def gather(uris: Sequence[str], options: StorageOptions | None = None, *, pictures: int = 48) -> list[PageSection]:
    """Return the sections of each URI and of what it was made from, without repetition, in the pipeline's order.

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
            sections |= {section.uri: section for section in sections_of(describe(storage), storage, pictures)}
        except DatasetError as error:
            errors.append(error)
            sections[storage.uri] = PageSection("Damaged", storage.uri, f"Cannot be read: {error}", False)
    if errors and len(errors) == len(sections):
        raise errors[0]
    return sorted(sections.values(), key=_rank)


def sections_of(described: Described, storage: Storage, pictures: int = 0) -> list[PageSection]:
    """Return the section of something described, or those of a run's phases."""
    match described:
        case Description():
            return [dataset_section(described, storage, pictures)]
        case Checkpoint():
            return [checkpoint_section(described)]
        case Run():
            runs = [(phase, open_storage(phase.uri, storage.options)) for phase in described.phases]
            return [run_section(*run, pictures) for run in runs or [(described, storage)]]
    return [evaluation_section(described.uri, described.result)]


def _rank(section: PageSection) -> int:
    return next((n for n, title in enumerate(_ORDER) if section.title.startswith(title)), len(_ORDER))


def _lineage(kind: SubjectKind | None, storage: Storage) -> Iterator[Storage]:
    """Yield a subject, then what it was made from, as far as that can be read."""
    with suppress(SdpError):  # moved, no access, or damaged, which its own section reports
        for _ in range(_LONGEST_LINEAGE):
            if kind is None:
                return
            yield storage
            if (made_from := _made_from(kind, storage)) is None:
                return
            storage = open_storage(made_from, storage.options)
            kind = kind_of(storage)


def _made_from(kind: SubjectKind, storage: Storage) -> str | None:
    match kind:
        case "run":
            phases = phases_of(storage) or [storage]
            return next((uri for phase in phases for uri in datasets_of(phase)), None)
        case "evaluation":
            return evaluated(storage)
    if not storage.exists(MANIFEST):
        return None
    uri = (read_manifest(storage).input or {}).get("uri")
    return str(uri) if uri else None
