"""The sections of a report: one for each thing that is named, and for what it was made from."""

import re
from collections.abc import Iterator, Sequence

from sdp.datasets.audit import RUN, datasets_of
from sdp.datasets.manifest import MANIFEST, read_manifest
from sdp.datasets.output import HEAD
from sdp.errors import DatasetError, SdpError
from sdp.evaluate.layout import evaluated
from sdp.report.data import dataset_section
from sdp.report.evaluation import evaluation_section
from sdp.report.page import Section
from sdp.report.run import run_sections
from sdp.report.subject import identify, kind_of, phases_of
from sdp.storage import Storage, StorageOptions, open_storage

_DEEPEST = 8
"""How many steps up the lineage are followed."""
IN_RUN = re.compile(r"/checkpoints(/.*)?$")
"""What follows a run's address in those of its checkpoints."""
_ORDER = ("Images", "Latents", "Training", "Plan", "Pictures drawn", "Evaluation")


def gather(uris: Sequence[str], options: StorageOptions | None = None, *, pictures: int = 48) -> list[Section]:
    """Return a section for each URI and for what it was made from, each thing once, in the pipeline's order.

    A damaged thing has a section that says so; an error is raised where there is nothing else to show.
    """
    seen: dict[str, Storage] = {}
    for uri in uris:
        for named in _things_at(open_storage(uri, options), options):
            for thing in [*_upstream(named, options)][::-1]:
                seen.setdefault(thing.uri, thing)
    sections, errors = list[Section](), list[SdpError]()
    for storage in seen.values():
        try:
            sections += _sections(storage, pictures)
        except DatasetError as error:
            errors.append(error)
            sections.append(Section("Damaged", storage.uri, f"Cannot be shown: {error}", False))
    if errors and len(errors) == len(sections):
        raise errors[0]
    return sorted(sections, key=_place)


def _place(section: Section) -> int:
    return next((n for n, title in enumerate(_ORDER) if section.title.startswith(title)), len(_ORDER))


def _things_at(storage: Storage, options: StorageOptions | None) -> list[Storage]:
    """Return what an address means: the thing itself, the phases of a run of two phases, a checkpoint's run."""
    kind = kind_of(storage)
    if kind in (None, "checkpoint") and IN_RUN.search(storage.uri):
        return _things_at(open_storage(IN_RUN.sub("", storage.uri), options), options)
    if (kind or identify(storage, options)[0]) in ("files", "checkpoint"):
        raise DatasetError(
            f"{storage.uri}: neither a dataset of sdp (no {HEAD}) nor a run (no {RUN}); check the address"
        )
    return phases_of(storage) or [storage]


def _sections(storage: Storage, pictures: int) -> list[Section]:
    match kind_of(storage):
        case "run":
            return run_sections(storage, pictures)
        case "evaluation":
            return [evaluation_section(storage)]
        case _:
            return [dataset_section(storage, pictures)]


def _upstream(storage: Storage, options: StorageOptions | None) -> Iterator[Storage]:
    """Yield the thing itself, then what it was made from, as far as that can be read."""
    yield storage
    for _ in range(_DEEPEST):
        try:
            made_from = _made_from(storage)
            if made_from is None:
                return
            storage = open_storage(made_from, options)
            if kind_of(storage) is None:
                return
        except SdpError:  # moved, not ours to read, or damaged, which its own section says: the report does without
            return
        yield storage


def _made_from(storage: Storage) -> str | None:
    match kind_of(storage):
        case "run":
            return next(iter(datasets_of(storage)), None)
        case "evaluation":
            return evaluated(storage)
    if not storage.exists(MANIFEST):
        return None
    uri = (read_manifest(storage).input or {}).get("uri")
    return str(uri) if uri else None
