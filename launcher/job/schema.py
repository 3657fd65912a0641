"""The job file's documentation for machines and for people: its JSON Schema and its commented example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.job.models import Job

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """JSON Schema of the form that a user writes: what an editor completes and checks while a job file is written."""
    schema = Job.model_json_schema()
    properties = schema["properties"]
    properties["nodes"]["items"] = {"anyOf": [{"type": "string"}, properties["nodes"]["items"]]}
    properties["secrets"]["items"] = {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1, "maxProperties": 1},
        ]
    }
    schema["$defs"].pop("Secret")
    return {"$schema": DIALECT, **schema, "title": "A job of the launcher"}


def template() -> str:
    """The commented job file that `launcher init` writes. It loads as it stands."""
    return Path(__file__).with_name("template.yaml").read_text(encoding="utf-8")
