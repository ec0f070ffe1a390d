"""The pipeline's stages that caption pictures: decoding and resizing on CPUs, the model or requests in workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from sdp.caption.answers import Captioner, Question
from sdp.caption.text import caption_of, tidy
from sdp.config.caption import CaptionsConfig
from sdp.datasets.draws import draw
from sdp.datasets.outcomes import FAILED, Outcome
from sdp.datasets.parts import Layout
from sdp.encode.chunk import Chunk
from sdp.encode.transform import Crops, Transform
from sdp.encode.work import PieceRows, RowsSpec, WorkItem, reason_to_skip
from sdp.imaging import Pixels, RowError, fit
from sdp.model import networks
from sdp.model.layout import ModelSource
from sdp.runners.stages import PrepareStats

OWN = "{caption}"
"""Stands in a prompt for the picture's own caption."""
_LONGEST_OWN = 1000
"""Characters of it that a prompt gets."""


@dataclass(frozen=True, kw_only=True)
class CaptionSpec(RowsSpec):
    """The stages that caption pictures."""

    kind: ClassVar[str] = "captions"
    layout: ClassVar[Layout] = Layout(row_group_rows=65_536, compression="zstd")
    asked: CaptionsConfig
    model: ModelSource | None
    """Pinned by its digest; None if a server has it."""

    @property
    def schema(self) -> pa.Schema:
        own = [pa.field("row", pa.int64(), nullable=False), pa.field("key", pa.string())]
        return pa.schema([*own, *(pa.field(name, pa.string(), nullable=False) for name in self.asked.prompts)])

    def prepare(self, item: WorkItem) -> tuple[Chunk, PrepareStats]:
        """Read a piece, and make its pictures as small as the model takes them."""
        step = Transform(self.recipe, None, reason_to_skip(self), self._look, captioned=False)
        return self.run_transform(step, item)

    def load(self) -> Captioner:
        """Load the model, or connect to the server."""
        asked = self.asked
        options = self.settings.batch_sizes[asked.side], asked.max_tokens, asked.temperature
        if self.model is None:
            from sdp.caption.server import ServerCaptioner

            return ServerCaptioner(str(asked.url), asked.model, *options)
        from sdp.caption.captioner import LocalCaptioner  # imports torch, which transforms do not need

        network = networks.find(self.model, "captions.model", storage=self.storage, captions=True)
        return LocalCaptioner(network.path, self.settings.dtype, asked.side, *options)

    def work(self, worker: Captioner, value: Chunk) -> PieceRows:
        """Caption a chunk. A row needs an answer to each of its prompts."""
        pictures = dict[int, Pixels]()
        for group in value.crops[self.asked.side]:
            pictures |= zip(group.positions.tolist(), group.values, strict=True)
        rows, failed = value.rows.tolist(), dict[int, Outcome]()
        columns: dict[str, list[str]] = {}
        for name, prompts in self.asked.prompts.items():
            filled = [self.prompt(prompts, row, own) for row, own in zip(rows, value.captions, strict=True)]
            questions = [Question(row, pictures[at], filled[at]) for at, row in enumerate(rows)]
            texts = columns[name] = []
            for row, answer in zip(rows, worker(questions), strict=True):
                try:
                    if isinstance(answer, RowError):
                        raise answer
                    texts.append(caption_of(answer, self.asked.trim))
                except RowError as error:
                    texts.append("")
                    failed[row] = Outcome(row, FAILED, error.reason, tidy(f"{name}: {error.detail}"))
        table = pa.table({"row": value.rows, "key": value.keys, **columns}, schema=self.schema)
        good = ~np.isin(value.rows, [*failed])
        return table.filter(pa.array(good)), [*value.outcomes, *failed.values()]

    def prompt(self, prompts: str | Mapping[str, float], row: int, own: str) -> str:
        """Return the prompt for a row, which is drawn where there are several."""
        if not isinstance(prompts, str):
            prompts = [*prompts][draw(self.recipe.seed, row, [*prompts.values()])]
        return prompts.replace(OWN, tidy(own[:_LONGEST_OWN]))

    def _look(self, data: bytes | memoryview, _: int) -> Crops:
        """Return a picture, reduced so that no side is longer than the model's."""
        side = self.asked.side
        return 0, {side: fit(self.pixels(data, side), side)}
