"""The forecast and the summary of a scoring, with the lines for `sdp process`."""

from sdp.config import ScoreConfig
from sdp.console import counted, size
from sdp.datasets.manifest import Dataset
from sdp.process import messages
from sdp.process.messages import ProcessFigures
from sdp.process.prepare import Prepared
from sdp.score.stages import ScoreSpec

_BYTES = 40
"""A row, at most."""
_BOUNDS = {"aesthetics": "{min: 5.0}", "similarity": "{min: 0.25}"}
"""Bounds to begin with, on LAION's predictors and CLIP ViT-L/14."""


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
    """Return the closing table: counts, this run's figures, and what to put into the configuration of process."""
    uri = config.output.uri.rstrip("/")
    tables, bounds = [f"{{uri: {uri}/parts}}"], dict[str, str]()
    for name, bound in _BOUNDS.items():
        if name in dataset.manifest.schema:
            bounds[name] = bound
    more = []
    if duplicates is not None:
        share = duplicates / max(1, dataset.manifest.counts.written)
        more.append(("near-duplicates", f"{duplicates:,} of a lower row, {share * 100:.1f} %"))
        if duplicates:
            tables.append(f"{{uri: {uri}/duplicates}}")
            bounds["duplicate"] = "{max: 0, keep_unknown: true}"
    lines = messages.summary(config, dataset, figures, more)
    if not bounds:
        return lines
    if list(bounds) == ["duplicate"]:
        tables = tables[1:]
    filters = ", ".join(f"{name}: {bound}" for name, bound in bounds.items())
    return [
        *lines,
        ("next", "in the configuration of process, with bounds of your own:"),
        ("  source.tables", f"[{', '.join(tables)}]"),
        ("  filters", f"{{{filters}}}"),
    ]
