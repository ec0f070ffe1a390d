"""Write parts of charts/sdp-cluster's values.schema.json, and its products.json: `python -m scripts.chart_schema`.

Each job's keys, types and limits come from `sdp config schema`, so that `helm template` refuses a typo or a wrong value
before the job does. The job itself checks required keys, because the chart and the job add defaults and a null removes
one. The fields of podSpec and container are those of Kubernetes' client. products.json maps each accelerator type to
the catalogue's GPUs, in the form of node labels.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import kubernetes.client

from sdp.config import JOBS, json_schema
from sdp.hardware import GPUS, gpus_by_accelerator

CHART = Path(__file__).resolve().parent.parent / "charts/sdp-cluster"
SCHEMA = CHART / "values.schema.json"
PRODUCTS = CHART / "products.json"
_LONGEST = 37
"""Characters of a job's name: KubeRay allows 47 of a RayJob, and sdp- and a suffix are added."""

_NOTES = {"$schema", "$defs", "title", "description", "default", "examples", "shapes_output", "required"}
_LINE = 110


def current(text: str) -> str:
    """Return the schema with `jobs` from the present configurations, and a pod's fields from Kubernetes' client."""
    schema = json.loads(text)
    pod = _fields(kubernetes.client.V1PodSpec, without={"terminationGracePeriodSeconds"})
    container = _fields(kubernetes.client.V1Container, without={"name", "image", "imagePullPolicy", "env"})
    groups = (schema["properties"]["groupDefaults"], schema["properties"]["groups"]["additionalProperties"])
    for group in groups:
        group["properties"]["accelerator"] = {"enum": ["", *_accelerators()]}
    schema["$defs"] = {"podSpec": pod, "container": container}
    schema["properties"]["jobs"]["patternProperties"] = {_pattern(job): _of_job(job) for job in JOBS}
    return _text(schema)


def products() -> str:
    """Return each accelerator type's values of nvidia.com/gpu.product, in which hyphens replace spaces."""
    labels = {
        name: [product.replace(" ", "-") for gpu in gpus_by_accelerator(name) for product in gpu.products]
        for name in _accelerators()
    }
    return json.dumps(labels, indent=1) + "\n"


def _accelerators() -> list[str]:
    return sorted({name for gpu in GPUS.values() for name in gpu.accelerators})


def _pattern(job: str) -> str:
    """Return the names of a job's configurations: the job, or the job with a suffix."""
    return f"^{job}(-[a-z0-9]([a-z0-9-]{{0,{_LONGEST - len(job) - 3}}}[a-z0-9])?)?$"


def _fields(model: Any, *, without: set[str]) -> dict[str, Any]:
    """Return the types of a Kubernetes object's fields, without those that the chart has values for."""
    fields: dict[str, Any] = {}
    for name, field in model.model_json_schema(by_alias=True)["properties"].items():
        if name not in without:
            first = field.get("anyOf", [field])[0]
            texts = {"additionalProperties": first["additionalProperties"]} if "additionalProperties" in first else {}
            fields[name] = {"type": [first.get("type", "object"), "null"], **texts}
    return {"type": ["object", "null"], "additionalProperties": False, "properties": fields}


def _of_job(job: str) -> dict[str, Any]:
    schema = json_schema(job)
    return _or_null(_checks(schema, schema["$defs"]))


def _checks(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return what a schema checks, without references and notes; no key is required, and any may be null."""
    if "$ref" in schema:
        return _checks(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return _any_type([_checks(choice, definitions) for choice in schema["anyOf"] if choice != {"type": "null"}])
    checks = {name: value for name, value in schema.items() if name not in _NOTES}
    for below in ("items", "additionalProperties"):
        if isinstance(checks.get(below), dict):
            checks[below] = _checks(checks[below], definitions)
    if "properties" in checks:
        checks["properties"] = {
            name: _or_null(_checks(value, definitions)) for name, value in schema["properties"].items()
        }
    return checks


def _any_type(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one schema for choices of different types: each of their other checks applies to one type only."""
    if len(choices) == 1:
        return choices[0]
    return {name: value for choice in choices for name, value in choice.items()} | {
        "type": [c["type"] for c in choices]
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return schema | {"type": [*types, "null"]}


def _text(schema: dict[str, Any]) -> str:
    """Return indented JSON with short lists and objects on a line of their own, so that it stays readable."""
    text = json.dumps(schema, indent=1)
    for pattern in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(
            pattern, lambda match: line if len(line := " ".join(match[0].split())) < _LINE else match[0], text
        )
    return text + "\n"


def main() -> int:
    SCHEMA.write_text(current(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")
    PRODUCTS.write_text(products(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
