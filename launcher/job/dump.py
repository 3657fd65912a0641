"""Jobs as job files, and the JSON Schema of job files. A dumped job loads as an equal job."""

from __future__ import annotations

from typing import Any

import yaml

from launcher.job.models import Job
from launcher.job.scalars import ProgramText, WrittenFloat, WrittenInt, resolve

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def dump_job(job: Job) -> str:
    """Return the job as YAML with all effective settings. Secrets appear as names and files, never as values."""
    unset = {"port"} - job.model_fields_set  # it would be given, and not be chosen any more
    keys = job.model_dump(exclude_none=True, exclude=unset)
    return yaml.dump(keys, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema with which editors complete and check job files."""
    schema = Job.model_json_schema()
    properties = schema["properties"]
    named = properties["nodes"]
    for listed in (named, properties["spares"]["anyOf"][0]):
        listed["items"] = {"anyOf": [{"type": "string"}, listed["items"]]}
    number = {"type": "integer", "minimum": 1}
    pool = {"type": "object", "required": ["pool"], "additionalProperties": False}
    described = {key: named.pop(key) for key in ("description", "examples")}
    pool["properties"] = {"pool": named, "each": number}
    properties["nodes"] = {**described, "anyOf": [number, named, pool]}
    grid = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "array", "minItems": 1}}
    listed = {key: properties["sweep"].pop(key) for key in ("type", "items")}
    codes = {"type": "array", "minItems": 1, "items": properties["codes"]["items"]}
    parts = {"grid": grid, "code": codes, "budget": properties["budget"]["anyOf"][0]}
    combinations: dict[str, Any] = {"type": "object", "properties": parts, "additionalProperties": False}
    combinations["anyOf"] = [{"required": ["grid"]}, {"required": ["code"]}]
    properties["sweep"]["anyOf"] = [listed, combinations]
    file = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1, "maxProperties": 1}
    properties["secrets"]["items"] = {"anyOf": [{"type": "string"}, file]}
    schema["$defs"].pop("Secret")
    return {"$schema": DIALECT, **schema, "title": "A job of the launcher", "patternProperties": {"^x-": {}}}


class _Dumper(yaml.SafeDumper):
    """Quotes text that a YAML parser would parse as another type."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        style = "'" if type(resolve(text)) is not str else None
        if not text.isprintable():
            style = '"'  # with escapes: PyYAML's other styles lose line ends such as U+0085
        return self.represent_scalar("tag:yaml.org,2002:str", str(text), style=style)

    def program_text(self, text: str) -> yaml.ScalarNode:
        if not isinstance(resolve(text), (WrittenInt, WrittenFloat)):
            return self.text(text)
        tag: str = self.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]  # not in the stubs
        return yaml.ScalarNode(tag, str(text))


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(ProgramText, _Dumper.program_text)
