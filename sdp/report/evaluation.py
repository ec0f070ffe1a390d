"""The section of an evaluation: its figures, inputs, and notes on comparing them."""

import json

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
        inputs: list[tuple[str, str]] = [
            (name, result[name]["model"]) for name in ("clip", "features") if name in result
        ]
        inputs += [(name, str(result[name]["uri"])) for name in ("generated", "reference") if name in result]
        details: list[Block] = [
            Table("Inputs", ("input", "source"), inputs),
            Folded("Configuration", json.dumps(result["config"], indent=1)),
        ]
        figures = [(name, value) for name, value, _ in headlines(result)]
        facts = {"kind": "evaluation", **result}
        pictures = counted(result["generated"]["written"], "picture")
        against = f" against {result['reference']['written']:,}" if "reference" in result else ""
        verdict = f"{pictures}{against}; measured {result['created'].replace('T', ' ')}."
        return PageSection("Evaluation", storage.uri, verdict, True, figures, blocks, details, facts=facts)
