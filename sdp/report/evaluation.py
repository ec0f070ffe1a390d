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
    """Describe an evaluation."""
    result = read_json(storage, RESULT)
    with reading(storage.uri_of(RESULT), "evaluate again"):
        blocks = [listing("Before comparing", result.get("notes", []), "note")]
        details: list[Block] = [
            Table("Inputs", ("input", "source"), _sources(result)),
            Folded("Configuration", json.dumps(result["config"], indent=1)),
        ]
        figures = [(name, value) for name, value, _ in headlines(result)]
        facts = {"kind": "evaluation", **result}
        return PageSection("Evaluation", storage.uri, _verdict(result), True, figures, blocks, details, facts=facts)


def _verdict(result: Mapping[str, Any]) -> str:
    against = f" against {result['reference']['written']:,}" if "reference" in result else ""
    pictures = counted(result["generated"]["written"], "picture")
    return f"{pictures}{against}; measured {result['created'].replace('T', ' ')}."


def _sources(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, result[name]["model"]) for name in ("clip", "features") if name in result]
    rows += [(name, str(result[name]["uri"])) for name in ("generated", "reference") if name in result]
    return rows
