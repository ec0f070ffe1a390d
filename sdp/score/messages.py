"""The forecast and the summary of a scoring."""

from sdp.config.score import ScoreConfig
from sdp.console import counted, size
from sdp.datasets.manifest import Dataset
from sdp.process import messages
from sdp.process.messages import ProcessFigures
from sdp.process.prepare import Prepared
from sdp.score.stages import ScoreSpec

_BYTES = 40
"""A row, at most."""


def scores_lines(prepared: Prepared[ScoreConfig, ScoreSpec], images: int) -> list[tuple[str, str]]:
    """Return the dry run's lines on the scores to write."""
    distance = prepared.config.score.duplicates.distance
    near = "equal hashes" if distance == 0 else f"hashes that differ in at most {counted(distance or 0, 'bit')}"
    return [
        ("to write", f"about {size(images * _BYTES)}: {', '.join(prepared.spec.schema.names)}"),
        ("near-duplicates", "not looked for" if distance is None else near),
        *((role, f"{model[:-48]}…") for role, model in prepared.models.items()),
    ]


def summary(
    config: ScoreConfig, dataset: Dataset, figures: ProcessFigures, duplicates: int | None
) -> list[tuple[str, str]]:
    """Return the closing table: counts, and this run's figures."""
    more = []
    if duplicates is not None:
        share = duplicates / max(1, dataset.manifest.counts.written)
        more.append(("near-duplicates", f"{duplicates:,} of a lower row, {share * 100:.1f} %"))
    return messages.summary(config, dataset, figures, more)
