"""A job back to a job file: all settings in force, in the form a user writes; loading it gives an equal job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from launcher.job.hosts import names_of
from launcher.job.models import Job, NodeEntry, Part
from launcher.job.scalars import WrittenFloat, WrittenInt, resolve, show_duration, show_size
from launcher.model.container import Mount


def dump_job(job: Job) -> str:
    """YAML. Of secrets it holds the names and files, never the values, which are not in a job."""
    return yaml.dump(_job(job), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _job(job: Job) -> dict[str, Any]:
    data = _part(job)
    names = names_of([node.host for node in job.nodes])
    data["nodes"] = [_node(node, name) for node, name in zip(job.nodes, names, strict=True)]
    data["mounts"] = {mount.source: _mount(mount) for mount in job.mounts}
    data["secrets"] = [{s.name: s.file} if s.file else s.name for s in job.secrets]
    for key in ("timeout", "hang_timeout"):
        if key in data:
            data[key] = show_duration(data[key])
    for key in ("memory", "shm"):
        if key in data["resources"]:
            data["resources"][key] = show_size(data["resources"][key])
    return data


class _Written(str):
    """Text that is passed on to a program: a number in it needs no quotes, because it is kept as written anyway."""

    __slots__ = ()


_PASSED_ON = ("args", "command", "env", "sweep")


def _part(part: Part) -> dict[str, Any]:
    """Its keys in the order of the schema, those that say nothing (None) left out."""
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


def _mount(mount: Mount) -> str:
    return mount.target + (":ro" if mount.read_only else "")


class _Dumper(yaml.SafeDumper):
    """Text that any YAML would take for something else has quotes."""

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
