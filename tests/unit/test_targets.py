"""Each target of `launcher export` says what it makes of each key of the job file, and that is tried, key by key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher.cli.plan import TARGETS, target
from launcher.errors import JobInvalid
from launcher.export.target import Keys
from launcher.job.loader import parse_job
from launcher.job.models import Job

CLUSTERS = {
    "slurm": {"kind": "slurm", "login": "local", "workdir": "/shared", "container": "pyxis"},
    "kubernetes": {"kind": "kubernetes"},
}
DIGEST = "sha256:" + "ab" * 32
BASE: dict[str, Any] = {
    "name": "digits",
    "image": {"ref": f"example.org/a@{DIGEST}"},
    "nodes": 2,
    "gpus": 1,
    "run": {"script": "main.py"},
}
PLAIN = {"runtime": "process", "image": None, "nodes": ["local", "local"], "gpus": "none"}
BUILT = {"base": f"example.org/b@{DIGEST}", "torchvision": "keep"}
ELASTIC = {"nodes": 3, "min_nodes": 3}
# key -> a change of it; if the key is possible only with others, these come first. Of other keys, the schema's example
CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "name": ({"name": "other"},),
    "runtime": (PLAIN,),
    "image.base": ({"image": BUILT},),
    "image.ref": ({"image": {"ref": f"example.org/b@{DIGEST}"}},),
    "image.torchvision": ({"image": BUILT}, {"image": {**BUILT, "torchvision": "auto"}}),
    "image.packages": ({"image": BUILT}, {"image": {**BUILT, "packages": ["timm"]}}),
    "code": ({"code": "project", "run": {"script": "project/main.py"}},),
    "nodes": ({"nodes": 3},),
    "nodes.name": ({"nodes": [{"host": "a", "name": "x"}, "b"]},),
    "nodes.host": ({"nodes": ["a", "b"]},),
    "nodes.gpus": ({"nodes": ["a", {"host": "b", "gpus": 2}]},),
    "nodes.address": ({"nodes": ["a", {"host": "b", "address": "10.0.0.1"}]},),
    "nodes.env": ({"nodes": ["a", {"host": "b", "env": {"A": "1"}}]},),
    "nodes.args": ({"nodes": ["a", {"host": "b", "args": {"x": 1}}]},),
    "gpus": ({"gpus": 2},),
    "processes": ({"processes": 4},),
    "run.module": ({"run": {"module": "train"}},),
    "run.script": ({"run": {"script": "other.py"}},),
    "run.command": ({"run": {"command": ["true"]}},),
    "run.args": ({"run": {"script": "main.py", "args": ["x"]}},),
    "mounts": ({"mounts": {"/a": "/b"}},),
    "data": ({"nodes": ["a", "b"]}, {"nodes": ["a", "b"], "data": {"d": {"from": "a:/d", "at": "/d"}}}),
    "env": ({"env": {"A": "1"}},),
    "secrets": ({"secrets": ["A"]},),
    "secrets.name": ({"secrets": ["A"]}, {"secrets": ["B"]}),
    "secrets.file": ({"secrets": ["A"]}, {"secrets": [{"A": "file"}]}),
    "output": ({"output": "/out"},),
    "restarts": ({"restarts": 2},),
    "min_nodes": ({"nodes": 3}, ELASTIC),
    "spares": ({"nodes": ["a", "b", "c"]}, {**ELASTIC, "nodes": ["a", "b", "c"], "spares": ["d"]}),
    "lost_after": ({"nodes": 3}, {**ELASTIC, "lost_after": "30s"}),
    "port": ({"port": 30000},),
    "timeout": ({"timeout": "1h"},),
    "hang_timeout": ({"hang_timeout": "15m"},),
    "resources.shm": ({}, {"docker": {"ipc": "private"}, "resources": {"shm": "1g"}}),
    "docker.ipc": ({"docker": {"ipc": "host"}}, {"docker": {"ipc": "private"}}),
    "sweep": ({"sweep": [{"a": 1}]},),
    "codes": ({"sweep": [{}], "codes": ["HEAD"]},),
    "each": ({"nodes": ["a", "b"]}, {"nodes": ["a", "b"], "sweep": [{"a": 1}], "each": 1}),
}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys of a model with dots: those of a part, those of a list of parts and the list itself."""
    for name, field in model.model_fields.items():
        part = next(parts(field.annotation), None)
        listed = part is not None and "tuple" in str(field.annotation)
        if part is None or listed:
            yield prefix + name, field
        if part is not None and name != "spares":  # machines, as nodes are
            yield from fields(part, f"{prefix}{name}.")


def parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from parts(inner)


KEYS = dict(fields(Job))


def changes(key: str) -> tuple[dict[str, Any], ...]:
    if key in CHANGES:
        return CHANGES[key]
    assert KEYS[key].examples, f"{key} has neither an example in the schema nor a change here"
    change: Any = KEYS[key].examples[0]
    for name in reversed(key.split(".")):
        change = {name: change}
    return (change,)


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "settings.yaml").write_text(yaml.safe_dump({"clusters": CLUSTERS}))
    monkeypatch.chdir(tmp_path)


def text(name: str, change: dict[str, Any]) -> str:
    """Return the text, without the time and the random part of a run's name."""
    data = {key: value for key, value in {**BASE, **change}.items() if value is not None}
    job = parse_job(yaml.safe_dump(data), "job.yaml")
    on = "slurm" if name == "slurm" else "kubernetes"
    return re.sub(r"-\d{8}-\d{6}-[0-9a-f]{4}", "", target(name).text(job, on, "example.org/with-code:1"))


def test_every_key_is_known_to_every_target() -> None:
    assert CHANGES.keys() <= KEYS.keys()
    for name in TARGETS:
        assert sorted(target(name).keys.all()) == sorted(KEYS), name


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_makes_of_a_key_what_it_says(name: str, key: str) -> None:
    *before, change = changes(key)
    known, without = target(name).keys, text(name, before[0] if before else {})
    check = next((each for each, keys in known.refused_by.items() if key in keys.split()), None)
    if key in known.refused or check is not None:
        with pytest.raises(JobInvalid) as told:
            text(name, change)
        if check is None:
            assert known.refused[key] in str(told.value)
        else:  # the named check, not another one
            assert inspect.unwrap(check).__code__ in [entry.frame.code.raw for entry in told.traceback]  # type: ignore[attr-defined]
    else:
        assert (text(name, change) == without) == (key in known.unused)


def test_a_key_is_not_refused_without_a_reason() -> None:
    with pytest.raises(ValueError, match=r"no reason is given for docker\.hostname"):
        Keys(handled="", refused={"docker.ipc": "because", "docker.hostname": ""}, refused_by={}, unused={})


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("docker.devices", {"docker": {"devices": ["/dev/fuse"]}}),
        ("nodes.address", {"nodes": ["a", {"host": "b", "address": "10.0.0.1"}]}),
        ("env", {"env": {"A": "1"}}),
    ],
)
def test_a_refused_key_is_refused_wherever_it_is(key: str, change: dict[str, Any]) -> None:
    keys = Keys(handled="", refused={key: "no", "image.torchvision": "kept"}, refused_by={}, unused={})
    assert list(keys.refusals(parse_job(yaml.safe_dump({**BASE, **change}), "job.yaml"))) == [
        ((*key.split("."),), "no: remove it")
    ]
    assert list(keys.refusals(parse_job(yaml.safe_dump({**BASE, **PLAIN, "image": None}), "job.yaml"))) == []
