"""What a report says of each thing that it is given, and of what that was made from."""

import re
from collections.abc import Iterator, Sequence

from sdp.datasets.audit import RUN, datasets_of
from sdp.datasets.fields import BadField, Fields
from sdp.datasets.manifest import MANIFEST, read_manifest
from sdp.datasets.output import HEAD, read_json
from sdp.errors import DatasetError, SdpError
from sdp.evaluate.layout import RESULT
from sdp.report.data import dataset_section
from sdp.report.evaluation import evaluation_section
from sdp.report.page import Section
from sdp.report.run import PHASES, run_section
from sdp.storage import Storage, StorageOptions, open_storage

_DEEPEST = 8
"""How far up the lineage is followed."""


_IN_RUN = re.compile(r"/checkpoints(/.*)?$")
_ORDER = ("Images", "Latents", "Training", "Pictures drawn", "Evaluation")


def gather(uris: Sequence[str], options: StorageOptions | None = None, *, pictures: int = 48) -> list[Section]:
    """A section for each URI and for what it was made from, each thing once, in the pipeline's order.

    What is damaged has a section that says so; an error is raised where there is nothing else to tell.
    """
    seen: dict[str, Storage] = {}
    for uri in uris:
        for named in _meant(open_storage(uri, options)):
            for one in [*_upstream(named, options)][::-1]:
                seen.setdefault(one.uri, one)
    sections, errors = list[Section](), list[SdpError]()
    for storage in seen.values():
        try:
            sections.append(_section(storage, pictures))
        except DatasetError as error:
            errors.append(error)
            sections.append(Section("Damaged", storage.uri, f"Cannot be shown: {error}", False))
    if errors and len(errors) == len(sections):
        raise errors[0]
    return sorted(sections, key=_place)


def _place(section: Section) -> int:
    return next((n for n, title in enumerate(_ORDER) if section.title.startswith(title)), len(_ORDER))


def _meant(storage: Storage) -> list[Storage]:
    """What an address means: the thing itself; the phases of a run that has two; of a checkpoint its run."""
    if storage.exists(RUN) or storage.exists(RESULT) or storage.exists(HEAD):
        return [storage]
    if _IN_RUN.search(storage.uri):
        return _meant(open_storage(_IN_RUN.sub("", storage.uri), storage.options))
    phases = [phase for phase in map(storage.child, PHASES) if phase.exists(RUN)]
    if not phases:
        raise DatasetError(
            f"{storage.uri}: neither a dataset of sdp (no {HEAD}) nor a run (no {RUN}); check the address"
        )
    return phases


def _section(storage: Storage, pictures: int) -> Section:
    if storage.exists(RUN):
        return run_section(storage, pictures)
    if storage.exists(RESULT):
        return evaluation_section(storage)
    return dataset_section(storage, pictures)


def _upstream(storage: Storage, options: StorageOptions | None) -> Iterator[Storage]:
    """The thing itself, then what it was made from, as far as that can be read."""
    yield storage
    for _ in range(_DEEPEST):
        try:
            made_from = _made_from(storage)
            if made_from is None:
                return
            storage = open_storage(made_from, options)
            if not any(storage.exists(name) for name in (HEAD, RUN, RESULT)):
                return
        except SdpError:  # moved, not ours to read, or damaged, which its own section tells: the report does without
            return
        yield storage


def _made_from(storage: Storage) -> str | None:
    if storage.exists(RUN):
        datasets = datasets_of(storage)
        return datasets[0] if datasets else None
    if storage.exists(RESULT):
        return _judged(storage)
    if storage.exists(MANIFEST):
        try:
            found = (read_manifest(storage).input or {}).get("uri")
        except DatasetError:  # its own section says what is wrong
            return None
        return str(found) if found else None
    return None


def _judged(evaluation: Storage) -> str | None:
    """The pictures or the run that an evaluation is about."""
    try:
        result = Fields(read_json(evaluation, RESULT))
        for name, key in (("generated", "uri"), ("loss", "run")):
            if result.has(name) and result.inner(name).has(key):
                return result.inner(name).text(key)
    except BadField as error:
        raise DatasetError(f"{evaluation.uri_of(RESULT)}: {error}; evaluate again") from error
    return None
