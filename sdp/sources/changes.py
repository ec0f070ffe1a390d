"""Changes to a folder of pictures since its rows got their addresses."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import pyarrow.compute as pc
from pyroaring import BitMap64

from sdp.console import counted
from sdp.datasets.index import Index
from sdp.datasets.inspect import accounts
from sdp.datasets.manifest import MANIFEST
from sdp.datasets.output import Output
from sdp.datasets.source import known_files
from sdp.sources.pictures import Pictures
from sdp.sources.reading import stem_of
from sdp.storage import Storage
from sdp.storage.moved import root_of, unchanged

_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Pictures by URI, those that are taken down left out."""

    replaced: Sequence[str]
    recaptioned: Sequence[str]
    """Those whose text beside them was edited."""
    captioned: Sequence[str]
    """Those that failed for want of a caption, and have a text beside them now."""
    gone: Sequence[str]
    texts: Sequence[str]
    """The edited texts."""
    gone_rows: Sequence[int]

    @property
    def renewed(self) -> frozenset[str]:
        """The files that need new addresses."""
        return frozenset([*self.replaced, *self.recaptioned, *self.texts])

    def __str__(self) -> str:
        """Return what has changed in words; nothing if nothing has."""
        kinds = (
            (self.recaptioned, "caption", "changed"),
            (self.captioned, "caption", "added"),
            (self.replaced, "picture", "replaced"),
            (self.gone, "picture", "gone"),
        )
        parts = []
        for uris, what, how in kinds:
            if uris:
                names = ", ".join(uri.rpartition("/")[2] for uri in uris[:_NAMED])
                if len(uris) > _NAMED:
                    names += ", …"
                parts.append(f"{counted(len(uris), what)} {how} ({names})")
        return ", ".join(parts)


def changes_of(output: Output, pictures: Pictures, taken_down: BitMap64) -> Changes:
    """Compare a folder's files with those that an output's index lists."""
    index, options = output.index, output.storage.options
    present = {file.uri: file for file in (*pictures.files, *pictures.texts)}
    if root := root_of(pictures.uri, pictures.files):
        index = index.moved(root)
    known, rows = known_files(index), _rows(index)
    changed = {uri for uri, file in present.items() if uri in known and not unchanged(file, *known[uri], options)}
    live = sorted(uri for uri, row in rows.items() if row not in taken_down)
    gone = [uri for uri in live if uri not in present]
    edited_texts = sorted(changed - rows.keys())
    edited = set(map(stem_of, edited_texts))
    unedited = [uri for uri in live if uri in present and uri not in changed]
    added = {stem_of(file.uri) for file in pictures.texts if file.uri not in known and file.size}
    with_added = [uri for uri in live if stem_of(uri) in added]
    failed = _without_caption(output.storage) if with_added and output.storage.exists(MANIFEST) else BitMap64()
    return Changes(
        replaced=[uri for uri in live if uri in changed],
        recaptioned=[uri for uri in unedited if stem_of(uri) in edited],
        captioned=[uri for uri in with_added if rows[uri] in failed],
        gone=gone,
        texts=edited_texts,
        gone_rows=[rows[uri] for uri in gone],
    )


def superseded(index: Index) -> BitMap64:
    """Return the addresses of files that have got another one since."""
    return BitMap64(index.files["first_row"].to_pylist()) - BitMap64(_rows(index).values())


def _without_caption(storage: Storage) -> BitMap64:
    """Return the addresses that have failed for want of a caption."""
    tables = (table.filter(pc.field("reason") == "no_caption") for table in accounts(storage, []))
    return BitMap64(chain.from_iterable(table["row"].to_pylist() for table in tables))


def _rows(index: Index) -> dict[str, int]:
    """Return the present address of each picture."""
    return dict(zip(index.files["path"].to_pylist(), index.files["first_row"].to_pylist(), strict=True))
