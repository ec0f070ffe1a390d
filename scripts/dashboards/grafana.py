"""Turn a dashboard into Grafana's JSON, with Grafana's own typed builders. All layout decisions are here."""

import json
from collections.abc import Sequence

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as words
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from scripts.dashboards.panels import COUNT, NAMES, Dashboard, Panel

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
NOTHING = "–"
Builder = timeseries.Panel | stat.Panel | bargauge.Panel | tables.Panel

_RUNS, _NODES = "sdp_job_rows|sdp_train_step|sdp_process_info", "ray_node_cpu_count|sdp_exporter_up"
VARIABLES: Sequence[tuple[str, str, str]] = (
    ("namespace", "Namespace", "label_values(ray_node_cpu_count, namespace)"),
    ("cluster", "Cluster", 'label_values(ray_node_cpu_count{namespace=~"$namespace"}, ray_cluster)'),
    ("run", "Run", f'label_values({{__name__=~"{_RUNS}", {NAMES["CLUSTER"]}}}, run)'),
    ("group", "Group", f"label_values(ray_node_cpu_count{{{NAMES['CLUSTER']}}}, ray_group)"),
    ("node", "Node", f'label_values({{__name__=~"{_NODES}"}}, node)'),
)
"""Each variable's name, label and query. All also matches series that lack the label."""


def render(source: Dashboard) -> str:
    """Return the text of a dashboard's JSON file."""
    built = (
        dashboard.Dashboard(source.title)
        .uid(f"sdp-{source.name}")
        .description(source.rows[0].title)
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
    for row in source.rows:
        number += 1
        heading = dashboard.Row(row.title).id(number)
        panels = [_panel(panel).id(number + place) for place, panel in enumerate(row.panels, 1)]
        number += len(panels)
        if row is source.rows[0]:
            built.with_row(heading)
            for panel in panels:
                built.with_panel(panel)
        else:  # with panels of its own, a row is collapsed
            for panel in panels:
                heading.with_panel(panel)
            built.with_row(heading)
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


def _panel(source: Panel) -> Builder:
    panel = _KINDS[source.kind](source)
    panel.title(source.title).datasource(SOURCE).unit(_unit(source.unit)).height(source.height).span(source.width)
    if source.unit == COUNT:
        panel.decimals(0)
    if source.about:
        panel.description(source.about)
    for letter, query in zip("ABCDEFGH", source.queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).datasource(SOURCE).expr(query.expr).legend_format(query.legend)
        if source.kind in ("lines", "stacked"):
            target.range()
        else:
            target.instant()
        if source.kind == "table":
            target.format(PromQueryFormat.TABLE)
        panel.with_target(target)
    if source.limits is not None:
        steps = [models.Threshold(value, color) for value, color in source.limits.steps()]
        panel.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    return panel


def _unit(unit: str) -> str:
    """Return the unit for Grafana; one that it does not know becomes a suffix."""
    return f"suffix: {unit}" if unit.endswith("/s") or unit == "×" else "short" if unit == COUNT else unit


def _number(source: Panel) -> Builder:
    latest = common.ReduceDataOptions().calcs(["lastNotNull"])
    named = len(source.queries) > 1 or any(query.legend for query in source.queries)
    return (
        stat.Panel()
        .reduce_options(latest)
        .graph_mode(words.BigValueGraphMode.NONE)
        .color_mode(words.BigValueColorMode.VALUE)
        .text_mode(words.BigValueTextMode.VALUE_AND_NAME if named else words.BigValueTextMode.VALUE)
        .color_scheme(_color(models.FieldColorModeId.THRESHOLDS))
        .thresholds(dashboard.ThresholdsConfig().steps([models.Threshold(None, "text")]))
        .no_value(NOTHING)
        .mappings([_unknown()])  # otherwise a dash is red where low is bad
    )


def _unknown() -> models.SpecialValueMap:
    """Return the mapping that shows a dash for no value and for 0 / 0."""
    dash = models.ValueMappingResult(text=NOTHING, color="text")
    match = models.SpecialValueMatch.NULL_AND_NAN
    return models.SpecialValueMap(models.DashboardSpecialValueMapOptions(match=match, result=dash))


def _lines(source: Panel) -> Builder:
    panel = (
        timeseries.Panel()
        .fill_opacity(0)
        .line_width(1)
        .show_points(words.VisibilityMode.AUTO)  # a single point draws no line
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
    return panel if source.most is None else panel.max(source.most)


def _stacked(source: Panel) -> Builder:
    panel = _lines(source)
    assert isinstance(panel, timeseries.Panel)
    return panel.fill_opacity(60).stacking(common.StackingConfig().mode(words.StackingMode.NORMAL))


def _bars(source: Panel) -> Builder:
    panel = (
        bargauge.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .orientation(words.VizOrientation.HORIZONTAL)
        .display_mode(words.BarGaugeDisplayMode.BASIC)
        .min(0)
    )
    return panel if source.most is None else panel.max(source.most)


def _table(source: Panel) -> Builder:  # noqa: ARG001
    return tables.Panel().with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={"excludeByName": {"Time": True, "uuid": True, "job": True, "instance": True, "endpoint": True}},
        )
    )


def _color(mode: models.FieldColorModeId) -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(mode)


_KINDS = {"number": _number, "lines": _lines, "stacked": _stacked, "bars": _bars, "table": _table}
