"""Configurations: one frozen model per job, from one YAML file and `--set` overrides.

    config = load("download", "download.yaml", ["limit=1000"])

Imports neither torch nor ray, so that a laptop can check a job's configuration quickly.
"""

from functools import reduce
from operator import getitem
from typing import Any

from sdp.config.base import Key, changed, keys
from sdp.config.dump import dump_yaml
from sdp.config.jobs import JOBS
from sdp.config.load import draft, draft_of, load, parse, parse_into, read
from sdp.config.shared import JobConfig, WorkersConfig

__all__ = [
    "JOBS",
    "JobConfig",
    "Key",
    "WorkersConfig",
    "changed",
    "draft",
    "draft_of",
    "dump_yaml",
    "identity",
    "json_schema",
    "keys",
    "load",
    "parse",
    "parse_into",
    "read",
]


def identity(config: JobConfig) -> dict[str, Any]:
    """Return the keys that decide the output's content, by dotted path; an output never changes them.

    The URIs of sources and models are left out: these may move, and their readers compare the contents.
    """
    values = config.model_dump(mode="json")
    paths = (key.path for key in keys(type(config)) if key.shapes_output)
    decisive: dict[str, Any] = {path: reduce(getitem, path.split("."), values) for path in paths}
    if also := decisive.get("source.also"):
        decisive["source.also"] = [{name: value for name, value in source.items() if name != "uri"} for source in also]
    if start := decisive.get("model.start_from"):
        decisive["model.start_from"] = start.rstrip("/").rpartition("/")[2]  # the step; its run may have moved
    return {path: value for path, value in decisive.items() if path not in _URIS}


_URIS = ("source.uri", "model.source", "score.clip_model", "captions.model", "checkpoint", "phase_2.source")


def json_schema(job: str) -> dict[str, Any]:
    """Return the JSON schema of a job's configuration."""
    schema = JOBS[job].model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"sdp {job}"}
