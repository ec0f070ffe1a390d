"""An evaluator's work on a unit: compute the features of its pictures."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import FAILED, FILTERED
from sdp.device import BatchLimit, choose_device
from sdp.encode.chunk import SourceRow
from sdp.encode.reading import Piece, read_piece
from sdp.encode.work import reason_to_skip
from sdp.evaluate.networks import Clip, LoadedNetwork, NetworkInput, load_network
from sdp.evaluate.prepare import EvaluateSpec, ReadTask
from sdp.imaging import Pixels, RowError, decode
from sdp.model import networks
from sdp.sandbox import child
from sdp.sandbox.decoders import Sandbox

_BATCH = 64
"""Pictures at once; halved where memory is short."""
_THREADS = 4
"""Threads that decode and resize pictures, so that a GPU does not wait for them."""


@dataclass(slots=True)
class UnitFeatures:
    """The features of a unit's pictures."""

    set: str
    unit: int
    features: list[NDArray[np.float32]] = field(default_factory=list)
    """Batches, with a row of features for each picture."""
    scores: list[float] = field(default_factory=list)
    """CLIP scores of the pictures that have a caption."""
    written: int = 0
    others: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The other pictures by outcome and reason."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A picture in the forms that the networks expect."""

    views: tuple[NetworkInput, ...]
    """One for each network."""
    caption: str


class EvaluateWorker:
    """An evaluator for units of several sets; it loads a network with the first unit that needs it."""

    def __init__(self, spec: Mapping[str, EvaluateSpec]) -> None:
        self._spec = spec
        self._loaded: dict[str, LoadedNetwork] = {}
        self._sandbox: Sandbox | None = None

    def make(self, task: ReadTask, on_rows: Callable[[int], None] = lambda _: None) -> UnitFeatures:
        """Compute a unit's features; call `on_rows` with the number of pictures after each batch."""
        name, unit, pieces = task
        spec = self._spec[name]
        if spec.foreign and self._sandbox is None:
            self._sandbox = Sandbox(child.pixels, _THREADS)
        result = UnitFeatures(name, unit)
        _UnitRun(spec, self._networks(spec), self._sandbox, result).run(pieces, on_rows)
        return result

    def _networks(self, spec: EvaluateSpec) -> dict[str, LoadedNetwork]:
        """Return the networks of a set, by digest."""
        device = choose_device()
        selected: dict[str, LoadedNetwork] = {}
        for key, network in (("features.model", spec.features), ("clip.model", spec.clip)):
            if network is None:
                continue
            if network.digest not in self._loaded:
                local = networks.find(network.source, key, storage=spec.storage)  # on this machine
                self._loaded[network.digest] = load_network(local, device)
            selected[network.digest] = self._loaded[network.digest]
        return selected


class _UnitRun:
    """The work on one unit."""

    def __init__(
        self,
        spec: EvaluateSpec,
        networks: Mapping[str, LoadedNetwork],
        sandbox: Sandbox | None,
        result: UnitFeatures,
    ) -> None:
        self._spec, self._networks, self._sandbox, self._result = spec, networks, sandbox, result
        self._limit = BatchLimit(_BATCH)
        self._reason_to_skip = reason_to_skip(spec)

    def run(self, pieces: Sequence[Piece], on_rows: Callable[[int], None]) -> None:
        """Compute the features of all pictures of the pieces."""
        pictures = self._prepared(pieces)
        while batch := list(islice(pictures, self._limit.size)):
            self._embed(batch)
            on_rows(len(batch))

    def _prepared(self, pieces: Sequence[Piece]) -> Iterator[_Prepared]:
        """Yield the pictures to embed; count the others."""
        spec = self._spec
        pictures = (row for piece in pieces for row in read_piece(piece, spec.columns, options=spec.storage))
        for prepared in ordered_map(self._prepare, pictures, _THREADS):
            if isinstance(prepared, _Prepared):
                yield prepared
            else:
                self._result.others[prepared] += 1

    def _prepare(self, picture: SourceRow) -> _Prepared | tuple[str, str]:
        """Return a picture for the networks, or the outcome and reason of one that cannot be used."""
        if (reason := self._reason_to_skip(picture.row)) is not None:
            return FILTERED, reason
        try:
            if picture.image is None:
                raise RowError("empty", picture.error or "the row has no image")
            pixels = self._decode(picture.image)
            views = tuple(network.prepare(pixels) for network in self._networks.values())
        except RowError as error:
            return FAILED, error.reason
        return _Prepared(views, (picture.caption or "").strip())

    def _decode(self, data: bytes | memoryview) -> Pixels:
        if not self._spec.foreign:
            return decode(data).pixels
        assert self._sandbox is not None
        return child.unpacked(*self._sandbox(data))

    def _embed(self, batch: Sequence[_Prepared]) -> None:
        """Compute features, in smaller batches if memory is short."""
        single = "evaluate: no memory for a single picture; choose a larger GPU (scaling.accelerator)"
        for _ in self._limit.run(lambda at: self._add(batch[at]), len(batch), single):
            pass

    def _add(self, batch: Sequence[_Prepared]) -> None:
        """Add the features of a batch; count those that are NaN or infinite as failed instead."""
        spec, result = self._spec, self._result
        embedded: dict[str, Any] = {
            digest: network.embed([picture.views[n] for picture in batch])
            for n, (digest, network) in enumerate(self._networks.items())
        }
        finite = np.ones(len(batch), np.bool_)
        if spec.features is not None:
            finite = np.isfinite(embedded[spec.features.digest]).all(axis=1)
            result.features.append(embedded[spec.features.digest][finite].astype(np.float32))
        if spec.clip is not None:
            clip = self._networks[spec.clip.digest]
            assert isinstance(clip, Clip)
            captioned = finite & np.array([bool(picture.caption) for picture in batch])
            captions = [batch[n].caption for n in np.flatnonzero(captioned).tolist()]
            result.scores += clip.scores(embedded[spec.clip.digest][captioned], captions).tolist()
        result.written += int(finite.sum())
        if not finite.all():
            result.others[FAILED, "not_finite"] += int((~finite).sum())
