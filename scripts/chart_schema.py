"""Writes `jobs` of charts/sdp-cluster's values.schema.json, and its products.json: `python -m scripts.chart_schema`.

Each job's keys are taken from its configuration, so that a typo in values is refused by `helm template` and not by the
job. Which keys are needed, and what values they take, the job judges: the chart and it add defaults, and a null takes
one out; only words out of a list are looked at here, too. products.json has the catalogue's GPUs, as nodes are labelled
with them, by the accelerator type that may mean them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from sdp.config import JOBS, json_schema
from sdp.hardware import GPUS, gpus_by_accelerator

CHART = Path(__file__).resolve().parent.parent / "charts/sdp-cluster"
SCHEMA = CHART / "values.schema.json"
PRODUCTS = CHART / "products.json"
_MORE = "(-[a-z0-9]([a-z0-9-]*[a-z0-9])?)?$"
"""What may follow a job in the name of its configuration."""


def current(text: str) -> str:
    """The schema with `jobs` as the configurations are now."""
    schema = json.loads(text)
    schema["properties"]["jobs"]["patternProperties"] = {f"^{job}{_MORE}": _of_job(job) for job in JOBS}
    return json.dumps(schema, indent=1) + "\n"


def products() -> str:
    """What nvidia.com/gpu.product may be for each accelerator type: GPU feature discovery puts hyphens for spaces."""
    types = sorted({name for gpu in GPUS.values() for name in gpu.accelerators})
    labels = {
        name: [product.replace(" ", "-") for gpu in gpus_by_accelerator(name) for product in gpu.products]
        for name in types
    }
    return json.dumps(labels, indent=1) + "\n"


def _of_job(job: str) -> dict[str, Any]:
    schema = json_schema(job)
    return _keys(schema, schema.get("$defs", {}))


def _keys(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """What may be said of keys below: `properties` and `items` judge objects and lists, and let all else through."""
    if "$ref" in schema:
        return _keys(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _either([_keys(each, definitions) for each in choices])
    if "properties" in schema:
        properties = {name: _keys(each, definitions) for name, each in schema["properties"].items()}
        return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}
    if isinstance(items := schema.get("items"), dict):
        return _unless_empty("items", _keys(items, definitions))
    if isinstance(values := schema.get("additionalProperties"), dict):
        return _unless_empty("additionalProperties", _keys(values, definitions))
    if "enum" in schema or "const" in schema:
        return {"enum": [*schema.get("enum", [schema.get("const")]), None]}
    return {"enum": [None]} if schema.get("type") == "null" else {}


def _unless_empty(key: str, below: dict[str, Any]) -> dict[str, Any]:
    return {key: below} if below else {}


def _either(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """One of several: words, if all are; else what each says of its own kind, and nothing of the others'."""
    if all("enum" in choice for choice in choices):
        return {"enum": list(dict.fromkeys(word for choice in choices for word in choice["enum"]))}
    found: dict[str, Any] = {}
    for choice in choices:
        if "properties" in choice:
            found["additionalProperties"] = False
            found["properties"] = found.get("properties", {}) | choice["properties"]
        elif "items" in choice:
            found["items"] = choice["items"]
        elif "additionalProperties" in choice:
            return {}  # keys that are anybody's
    if found and all("properties" in choice or choice == {"enum": [None]} for choice in choices):
        found = {"type": ["object", "null"], **found}
    return found


def main() -> int:
    SCHEMA.write_text(current(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")
    PRODUCTS.write_text(products(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
