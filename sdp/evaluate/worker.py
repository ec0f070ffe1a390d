"""The stages that compute the features of pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import Counts
from sdp.encode.work import reason_to_skip
from sdp.evaluate.prepare import EvaluateSpec, Task
from sdp.evaluate.result import Features
from sdp.imaging import Pixels, RowError, decode
from sdp.model import networks
from sdp.runners.stages import Stages
from sdp.sandbox import child
from sdp.sandbox.decoders import Sandbox
from sdp.sources.pieces import Piece
from sdp.sources.reading import SourceRow, read_piece

if TYPE_CHECKING:
    from sdp.evaluate.networks import LoadedNetwork, NetworkInput

_BATCH = 64
"""Pictures at once; halved where memory is short."""
_THREADS = 4
"""Threads that decode and resize pictures, so that a GPU does not wait for them."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A picture in the forms that the networks expect."""

    views: "Mapping[str, NetworkInput]"
    """By the networks' digests."""
    caption: str


@dataclass(frozen=True)
class EvaluateStages(Stages):
    """The stages that compute features."""

    specs: Mapping[str, EvaluateSpec]
    """By the names of the sets."""

    def load(self) -> "Evaluator":
        return Evaluator(self.specs)

    def work(self, worker: "Evaluator", value: Task) -> Features:
        return worker(*value)


class Evaluator:
    """A worker, with the networks of all sets."""

    def __init__(self, specs: Mapping[str, EvaluateSpec]) -> None:
        from sdp.device import BatchLimit, choose_device  # import torch, which drivers do not need
        from sdp.evaluate.networks import load_network

        self._specs, self._limit = specs, BatchLimit(_BATCH)
        self._loaded: dict[str, LoadedNetwork] = {}
        for spec in specs.values():
            for key, network in (("features.model", spec.features), ("clip.model", spec.clip)):
                if network is not None and network.digest not in self._loaded:
                    local = networks.find(network.source, key, storage=spec.storage)  # on this machine
                    self._loaded[network.digest] = load_network(local, choose_device())
        self._sandbox = Sandbox(child.pixels, _THREADS) if any(spec.foreign for spec in specs.values()) else None
        self._done = 0

    def figures(self) -> int:
        """Return the number of pictures that it has done."""
        return self._done

    def __call__(self, name: str, piece: Piece) -> Features:
        """Return the features of pictures of a set."""
        spec, unusable, parts = self._specs[name], list[Counts](), list[Features]()
        pictures = self._prepared(spec, piece, unusable)
        too_large = "evaluate: no memory for a single picture; choose a larger GPU (scaling.accelerator)"
        while batch := list(islice(pictures, self._limit.size)):
            parts += self._limit.run(lambda at: self._embed(spec, batch[at]), len(batch), too_large)
            self._done += len(batch)
        done = Features.join(parts)
        return Features(done.features, done.scores, sum(unusable, done.counts))

    def _prepared(self, spec: EvaluateSpec, piece: Piece, unusable: list[Counts]) -> Iterator[_Prepared]:
        """Yield the pictures to embed; add the outcomes of the others to `unusable`."""
        used = {each.digest: self._loaded[each.digest] for each in (spec.features, spec.clip) if each is not None}
        skipped = reason_to_skip(spec)

        def prepare(picture: SourceRow) -> _Prepared | Counts:
            if (reason := skipped(picture.row)) is not None:
                return Counts(filtered=1, reasons={reason: 1})
            try:
                if picture.image is None:
                    raise RowError("empty", "the row has no image")
                pixels = self._decode(spec, picture.image)
                views = {digest: network.prepare(pixels) for digest, network in used.items()}
            except RowError as error:
                return Counts(failed=1, reasons={error.reason: 1})
            return _Prepared(views, (picture.caption or "").strip())

        rows = read_piece(piece, spec.columns, options=spec.storage)
        for prepared in ordered_map(prepare, rows, _THREADS):
            if isinstance(prepared, _Prepared):
                yield prepared
            else:
                unusable.append(prepared)
                self._done += 1

    def _decode(self, spec: EvaluateSpec, data: bytes | memoryview) -> Pixels:
        if not spec.foreign:
            return decode(data).pixels
        assert self._sandbox is not None
        return child.unpacked(*self._sandbox(data))

    def _embed(self, spec: EvaluateSpec, batch: Sequence[_Prepared]) -> Features:
        """Return the features of a batch; pictures whose features are NaN or infinite have failed."""
        rows = {digest: self._loaded[digest].embed([each.views[digest] for each in batch]) for digest in batch[0].views}
        features, scores = np.zeros((len(batch), 0), np.float32), np.zeros(0, np.float32)
        if spec.features is not None:
            features = rows[spec.features.digest]
        finite = np.asarray(np.isfinite(features).all(axis=1))
        if spec.clip is not None:
            from sdp.evaluate.networks import Transformers

            clip = self._loaded[spec.clip.digest]
            captioned = np.flatnonzero(finite & np.array([bool(picture.caption) for picture in batch]))
            assert isinstance(clip, Transformers)
            scores = clip.scores(rows[spec.clip.digest][captioned], [batch[n].caption for n in captioned.tolist()])
        failed = int((~finite).sum())
        counts = Counts(int(finite.sum()), failed=failed, reasons={"not_finite": failed} if failed else {})
        return Features(features[finite], scores, counts)
