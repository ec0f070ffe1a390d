"""Turns a dashboard into Grafana's JSON, with Grafana's own typed builders. Every layout decision is here."""

import json
from collections.abc import Sequence

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as words
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from scripts.dashboards.panels import Dashboard, Panel
from scripts.dashboards.selecting import CLUSTER

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
NOTHING = "–"
Builder = timeseries.Panel | stat.Panel | bargauge.Panel | tables.Panel

VARIABLES: Sequence[tuple[str, str, str]] = (
    ("namespace", "Namespace", "label_values(ray_node_cpu_count, namespace)"),
    ("cluster", "Cluster", 'label_values(ray_node_cpu_count{namespace=~"$namespace"}, ray_cluster)'),
    (
        "run",
        "Run",
        f'label_values({{__name__=~"sdp_job_rows|sdp_train_step|sdp_process_info", {CLUSTER}}}, run)',
    ),
    ("group", "Group", f"label_values(ray_node_cpu_count{{{CLUSTER}}}, ray_group)"),
    (
        "node",
        "Node",
        'label_values({__name__=~"ray_node_cpu_count|sdp_exporter_up"}, node)',
    ),
)
"""Name, what a person reads, and where the values come from. All is everything, also what has no such label."""


def render(told: Dashboard) -> str:
    """The file's text."""
    built = (
        dashboard.Dashboard(told.title)
        .uid(f"sdp-{told.name}")
        .description(told.question)
        .tags(["sdp"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("15s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Stable Diffusion pre-training")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["sdp"])
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(
            dashboard.AnnotationQuery()
            .name("Alerts")
            .datasource(SOURCE)
            .enable(True)
            .icon_color("red")
            .expr('ALERTS{alertname=~"Sdp.+", alertstate="firing"}')
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for name, label, query in VARIABLES:
        built.with_variable(_variable(name, label, query))
    number = 0
    for row in told.rows:
        number += 1
        built.with_row(dashboard.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            built.with_panel(_panel(panel).id(number))
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query({"query": query, "refId": name, "qryType": 5})
        .datasource(SOURCE)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _panel(told: Panel) -> Builder:
    panel = _KINDS[told.kind](told)
    panel.title(told.title).datasource(SOURCE).unit(_unit(told.unit)).height(told.height).span(told.width)
    if told.about:
        panel.description(told.about)
    for letter, query in zip("ABCDEFGH", told.queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).datasource(SOURCE).expr(query.expr).legend_format(query.legend)
        if told.kind in ("lines", "stacked"):
            target.range()
        else:
            target.instant()
        if told.kind == "table":
            target.format(PromQueryFormat.TABLE)
        panel.with_target(target)
    if told.limits is not None:
        steps = [models.Threshold(value, color) for value, color in told.limits.steps()]
        panel.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    return panel


def _unit(unit: str) -> str:
    """What Grafana does not know becomes a suffix."""
    return f"suffix: {unit}" if unit in ("img/s", "×") else unit


def _number(told: Panel) -> Builder:
    latest = common.ReduceDataOptions().calcs(["lastNotNull"])
    named = len(told.queries) > 1 or any(query.legend for query in told.queries)
    return (
        stat.Panel()
        .reduce_options(latest)
        .graph_mode(words.BigValueGraphMode.NONE)
        .color_mode(words.BigValueColorMode.VALUE)
        .text_mode(words.BigValueTextMode.VALUE_AND_NAME if named else words.BigValueTextMode.VALUE)
        .color_scheme(_color(models.FieldColorModeId.THRESHOLDS))
        .thresholds(dashboard.ThresholdsConfig().steps([models.Threshold(None, "text")]))
        .no_value(NOTHING)
        .mappings([_unknown()])  # else a dash has the colour of what is bad, where low is bad
    )


def _unknown() -> models.SpecialValueMap:
    """No value, or 0 / 0."""
    dash = models.ValueMappingResult(text=NOTHING, color="text")
    match = models.SpecialValueMatch.NULL_AND_NAN
    return models.SpecialValueMap(models.DashboardSpecialValueMapOptions(match=match, result=dash))


def _lines(told: Panel) -> Builder:
    panel = (
        timeseries.Panel()
        .fill_opacity(0)
        .line_width(1)
        .show_points(words.VisibilityMode.AUTO)  # one figure alone is no line
        .color_scheme(_color(models.FieldColorModeId.PALETTE_CLASSIC))
        .legend(
            common.VizLegendOptions()
            .display_mode(words.LegendDisplayMode.LIST)
            .placement(words.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(words.TooltipDisplayMode.MULTI).sort(words.SortOrder.DESCENDING))
        .min(0)
    )
    return panel if told.most is None else panel.max(told.most)


def _stacked(told: Panel) -> Builder:
    panel = _lines(told)
    assert isinstance(panel, timeseries.Panel)
    return panel.fill_opacity(60).stacking(common.StackingConfig().mode(words.StackingMode.NORMAL))


def _bars(told: Panel) -> Builder:
    panel = (
        bargauge.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .orientation(words.VizOrientation.HORIZONTAL)
        .display_mode(words.BarGaugeDisplayMode.BASIC)
        .min(0)
    )
    return panel if told.most is None else panel.max(told.most)


def _table(told: Panel) -> Builder:  # noqa: ARG001
    return tables.Panel().with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={"excludeByName": {"Time": True, "uuid": True, "job": True, "instance": True, "endpoint": True}},
        )
    )


def _color(mode: models.FieldColorModeId) -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(mode)


_KINDS = {"number": _number, "lines": _lines, "stacked": _stacked, "bars": _bars, "table": _table}
