"""The form that a user writes: a job back to a job file that loads as an equal job, and the form's JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from launcher.job.models import Job, NodeEntry, Part
from launcher.job.scalars import WrittenFloat, WrittenInt, names_of, resolve, show_duration, show_size

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def dump_job(job: Job) -> str:
    """YAML with all settings in force. Of secrets it has names and files; the values are never in a job."""
    return yaml.dump(_job(job), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def json_schema() -> dict[str, Any]:
    """JSON Schema of the form that a user writes, which editors use to complete and check a job file."""
    schema = Job.model_json_schema()
    properties = schema["properties"]
    named = properties["nodes"]
    for listed in (named, properties["spares"]["anyOf"][0]):
        listed["items"] = {"anyOf": [{"type": "string"}, listed["items"]]}
    number = {"type": "integer", "minimum": 1}
    properties["nodes"] = {"description": named.pop("description"), "anyOf": [number, named]}
    file = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1, "maxProperties": 1}
    properties["secrets"]["items"] = {"anyOf": [{"type": "string"}, file]}
    schema["$defs"].pop("Secret")
    return {"$schema": DIALECT, **schema, "title": "A job of the launcher"}


def _job(job: Job) -> dict[str, Any]:
    data = _part(job)
    names = names_of([node.host for node in job.nodes])
    data["nodes"] = [_node(node, name) for node, name in zip(job.nodes, names, strict=True)]
    if job.spares is not None:
        names = names_of([node.host for node in job.spares])
        data["spares"] = [_node(node, name) for node, name in zip(job.spares, names, strict=True)]
    data["mounts"] = {m.source: m.target + (":ro" if m.read_only else "") for m in job.mounts}
    data["secrets"] = [{s.name: s.file} if s.file else s.name for s in job.secrets]
    for key in ("timeout", "hang_timeout", "lost_after"):
        if key in data:
            data[key] = show_duration(data[key])
    for key in ("memory", "shm"):
        if key in data["resources"]:
            data["resources"][key] = show_size(data["resources"][key])
    return data


class _Written(str):
    """Text for a program: numbers in it need no quotes, because the loader keeps them as written."""

    __slots__ = ()


_PASSED_ON = ("args", "command", "env", "sweep")


def _part(part: Part) -> dict[str, Any]:
    """Its keys in the order of the schema, without those that are None."""
    data: dict[str, Any] = {}
    for key in type(part).model_fields:
        value = getattr(part, key)
        if isinstance(value, Part):
            data[key] = _part(value)
        elif value is not None:
            data[key] = _plain(value, _Written if key in _PASSED_ON else str)
    return data


def _plain(value: Any, text: type[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, text) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item, text) for item in value]
    return text(value) if isinstance(value, str) else value


def _node(node: NodeEntry, name: str) -> Any:
    data = {key: value for key, value in _part(node).items() if value != {}}
    if node.name == name:
        del data["name"]
    return node.host if set(data) == {"host"} else data


class _Dumper(yaml.SafeDumper):
    """Quotes text that a YAML parser would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        style = "'" if type(resolve(text)) is not str else None
        if not text.isprintable():
            style = '"'  # with escapes: PyYAML's other styles lose line ends such as U+0085
        return self.represent_scalar("tag:yaml.org,2002:str", str(text), style=style)

    def written(self, text: str) -> yaml.ScalarNode:
        if not isinstance(resolve(text), (WrittenInt, WrittenFloat)):
            return self.text(text)
        tag: str = self.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]  # not in the stubs
        return yaml.ScalarNode(tag, str(text))


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(_Written, _Dumper.written)
