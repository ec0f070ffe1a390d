"""The dashboard Home: five figures of the chosen runs, for a wall."""

from dataclasses import replace

from scripts.dashboards.gram import FULLEST
from scripts.dashboards.panels import IMAGES_PER_SECOND, PLAIN, RATIO, SECONDS, Dashboard, Limits, Query, Row, number
from scripts.dashboards.run import LEDGER
from scripts.dashboards.selecting import RUN, per_run, select
from scripts.dashboards.throughput import COST, CURRENCY, TRAINED

_FIGURES = (
    number("Is it fast?", "Images per second that all chosen runs train on.", Query(TRAINED), unit=IMAGES_PER_SECOND),
    number(
        "Is it full?",
        "Used share of the fullest GPU's memory, and the run that has it.",
        Query(FULLEST, "{{node}}/{{gpu}} {{run}}"),
        unit=RATIO,
        limits=Limits(0.9, 0.97),
    ),
    number(
        "Is it right?",
        "Samples by which the newest checkpoint and its ledger differ. Anything but 0 is an error.",
        Query(LEDGER),
        limits=Limits(1, 1),
    ),
    number(
        "What does it cost?",
        f"So far, {CURRENCY}.",
        Query(COST, "{{run}}"),
        unit=PLAIN,
    ),
    number(
        "When is it done?",
        "Time to the end, at the current pace.",
        Query(f"{per_run(select('sdp_train_finish_time_seconds', RUN))} - time()", "{{run}}"),
        unit=SECONDS,
    ),
)
_WIDTHS = (5, 5, 5, 5, 4)

_FIRST = Row(
    "Is it fast, is it full, is it right, what does it cost, when is it done?",
    [replace(figure, width=width, height=8) for figure, width in zip(_FIGURES, _WIDTHS, strict=True)],
)

DASHBOARD = Dashboard("home", "Home", _FIRST.title, (_FIRST,))
