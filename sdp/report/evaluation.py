"""The report of an evaluation: its figures, what they are of, and what to know before comparing them."""

import json
from collections.abc import Mapping
from typing import Any

from sdp.datasets.output import read_json
from sdp.evaluate.layout import RESULT
from sdp.report import charts
from sdp.report.charts import Line
from sdp.report.damage import understood
from sdp.report.page import Block, Drawing, Folded, Section, Table
from sdp.storage import Storage


def evaluation_section(storage: Storage) -> Section:
    """What there is to say of it."""
    found = read_json(storage, RESULT)
    with understood(storage.uri_of(RESULT), "evaluate again"):
        return _section(storage, found)


def _section(storage: Storage, found: Mapping[str, Any]) -> Section:
    blocks: list[Block] = []
    if found.get("fid_infinity"):
        blocks.append(_extrapolation(found["fid_infinity"]))
    if found.get("loss"):
        blocks.append(_losses(found["loss"]))
    if found.get("notes"):
        blocks.append(Table("To know before comparing", ("note",), [(note,) for note in found["notes"]]))
    blocks.append(Table("Measured with", ("what", "by"), _means(found)))
    blocks.append(Folded("Configuration", json.dumps(found["config"], indent=1)))
    figures = _figures(found)
    glance = " · ".join(f"{name} {value}" for name, value in figures)
    return Section("Evaluation", storage.uri, _verdict(found), True, figures, blocks, glance)


def _verdict(found: Mapping[str, Any]) -> str:
    words = []
    if "generated" in found:
        against = f" against {found['reference']['written']:,}" if "reference" in found else ""
        words.append(f"{found['generated']['written']:,} pictures{against}")
    if "loss" in found:
        words.append(f"the loss of a checkpoint on {found['loss']['rows']:,} rows that it was not trained on")
    return f"{' and '.join(words)}; measured {found['created'].replace('T', ' ')}."


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    figures: list[tuple[str, str]] = []
    clip = found.get("clip")
    if clip and clip["score"] is not None:
        figures.append(("CLIP score", f"{clip['score']:.2f} ± {clip['standard_error']:.2f}"))
    if "fid" in found:
        figures.append(("FID", f"{found['fid']['value']:.3f}"))
    if found.get("fid_infinity"):
        figures.append(("FID-infinity", f"{found['fid_infinity']['value']:.3f}"))
    if found.get("kid"):
        figures.append(("KID", f"{found['kid']['mean']:.5f} ± {found['kid']['deviation']:.5f}"))
    if "loss" in found:
        figures.append(("loss", f"{found['loss']['mean']:.4f} ± {found['loss']['standard_error']:.4f}"))
    return figures


def _extrapolation(infinity: Mapping[str, Any]) -> Block:
    inverse = [1 / size for size in infinity["sizes"]]
    curves = [
        Line("measured", inverse, infinity["values"]),
        Line("extrapolated", [0.0, max(inverse)], [infinity["value"], _at(max(inverse), infinity)], faint=True),
    ]
    return Drawing("FID by the inverse of how many pictures there are", charts.lines(curves, x_name="1 / pictures"))


def _at(inverse: float, infinity: Mapping[str, Any]) -> float:
    """On the line through the extrapolated value and the middle of what was measured."""
    inverses = [1 / size for size in infinity["sizes"]]
    middle, mean = sum(inverses) / len(inverses), sum(infinity["values"]) / len(infinity["values"])
    return float(infinity["value"] + (mean - infinity["value"]) * inverse / middle)


def _losses(loss: Mapping[str, Any]) -> Block:
    rows = [(name, float(value)) for name, value in loss["by_timestep"].items()]
    return Table(f"Loss of {loss['checkpoint']} ({loss['weights']}), by timesteps", ("timesteps", "loss"), rows)


def _means(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, found[name]["model"]) for name in ("clip", "features") if name in found]
    rows += [(name, str(found[name]["uri"])) for name in ("generated", "reference") if name in found]
    if "loss" in found:
        rows.append(("rows", f"{found['loss']['dataset']}"))
    return rows
