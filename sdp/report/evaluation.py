"""The section of an evaluation: its figures, inputs, and notes on comparing them."""

import json
from collections.abc import Mapping
from typing import Any

from sdp.console import counted
from sdp.datasets.output import read_json
from sdp.datasets.records import reading
from sdp.evaluate.layout import RESULT, headlines
from sdp.report.page import Block, Folded, PageSection, Table, listing
from sdp.storage import Storage


def evaluation_section(storage: Storage) -> PageSection:
    """Return the section of an evaluation."""
    result = read_json(storage, RESULT)
    with reading(storage.uri_of(RESULT), "evaluate again"):
        figures = [(name, value) for name, value, _ in headlines(result) if value]
        glance = " · ".join(f"{name} {value}" for name, value in figures)
        return PageSection("Evaluation", storage.uri, _verdict(result), True, figures, _blocks(result), glance)


def _blocks(result: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    if loss := result.get("loss"):
        rows = [(name, float(value)) for name, value in loss["by_timestep"].items()]
        title = f"Loss of {loss['checkpoint']} ({loss['weights']}), by timestep"
        blocks.append(Table(title, ("timesteps", "loss"), rows))
    blocks += listing("Before comparing", result.get("notes", []), "note")
    blocks.append(Table("Inputs", ("input", "source"), _sources(result)))
    blocks.append(Folded("Configuration", json.dumps(result["config"], indent=1)))
    return blocks


def _verdict(result: Mapping[str, Any]) -> str:
    subjects = []
    if "generated" in result:
        against = f" against {result['reference']['written']:,}" if "reference" in result else ""
        subjects.append(f"{counted(result['generated']['written'], 'picture')}{against}")
    if "loss" in result:
        subjects.append(f"the loss of a checkpoint on {counted(result['loss']['rows'], 'held-out row')}")
    return f"{' and '.join(subjects)}; measured {result['created'].replace('T', ' ')}."


def _sources(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, result[name]["model"]) for name in ("clip", "features") if name in result]
    rows += [(name, str(result[name]["uri"])) for name in ("generated", "reference") if name in result]
    if "loss" in result:
        rows.append(("rows", f"{result['loss']['dataset']}"))
    return rows
