"""`sdp caption`: writes captions of pictures as `sdp process` writes latents."""

from sdp.caption.prepare import prepare
from sdp.config.caption import CaptionConfig
from sdp.console import say, table
from sdp.process.job import ProcessSummary, write_dataset
from sdp.process.messages import ProcessFigures, forecast, summary
from sdp.process.prepare import begin


def run(config: CaptionConfig, *, dry_run: bool = False, only_failed: bool = False) -> ProcessSummary:
    """Caption what is missing; with `only_failed`, retry the failed rows."""
    prepared = prepare(config)
    if dry_run:
        output = begin(prepared, only_failed=only_failed, write=False)
        lines = [("columns", ", ".join(config.captions.prompts)), *prepared.models.items()]
        say(table(forecast(prepared, output, lambda _: lines)))
        return ProcessSummary(None, ProcessFigures(job="caption"))
    dataset, figures = write_dataset(prepared, "caption", only_failed=only_failed)
    say(table(summary(config, dataset, figures)))
    dataset.require_rows()
    return ProcessSummary(dataset, figures)
