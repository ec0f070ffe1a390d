"""Write `jobs` in charts/sdp-cluster's values.schema.json, and its products.json: `python -m scripts.chart_schema`.

The keys of each job come from its configuration, so that `helm template` refuses a typo in values before the job does.
The schema checks only names and enumerations. The job itself checks required keys and other values, because the chart
and the job add defaults and a null removes one. products.json maps each accelerator type to the catalogue's GPUs, in
the form of node labels.
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
"""The optional suffix after a job in the name of its configuration."""


def current(text: str) -> str:
    """Return the schema with `jobs` from the present configurations."""
    schema = json.loads(text)
    schema["properties"]["jobs"]["patternProperties"] = {f"^{job}{_MORE}": _of_job(job) for job in JOBS}
    return json.dumps(schema, indent=1) + "\n"


def products() -> str:
    """Return each accelerator type's values of nvidia.com/gpu.product, in which hyphens replace spaces."""
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
    """Return a schema that checks the keys of objects and of objects in lists, and accepts all other values."""
    if "$ref" in schema:
        return _keys(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _either([_keys(choice, definitions) for choice in choices])
    if "properties" in schema:
        properties = {name: _keys(subschema, definitions) for name, subschema in schema["properties"].items()}
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
    """Return a schema for one of several: an enumeration if all are; otherwise each applies only to its own type."""
    if all("enum" in choice for choice in choices):
        return {"enum": list(dict.fromkeys(word for choice in choices for word in choice["enum"]))}
    merged: dict[str, Any] = {}
    for choice in choices:
        if "properties" in choice:
            merged["additionalProperties"] = False
            merged["properties"] = merged.get("properties", {}) | choice["properties"]
        elif "items" in choice:
            merged["items"] = choice["items"]
        elif "additionalProperties" in choice:
            return {}  # any key is valid
    if merged and all("properties" in choice or choice == {"enum": [None]} for choice in choices):
        merged = {"type": ["object", "null"], **merged}
    return merged


def main() -> int:
    SCHEMA.write_text(current(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")
    PRODUCTS.write_text(products(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
