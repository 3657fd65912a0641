"""What a full disk or a program left in the files of one container does not affect other ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.model.container import Phase
from launcher.model.labels import RUN
from launcher.node.process import folders, supervisor
from launcher.node.process.engine import ProcessEngine

LAYOUT = {"code": "/c", "output": "/o", "kit": "/k"}
SPEC: dict[str, Any] = {"name": "n", "image": "", "labels": {RUN: "r"}, "env": {}, "layout": LAYOUT}
STATE = {"phase": "running", "supervisor": 1, "pid": 2, "exit_code": None, "restarts": 0, "started": 1.5, "finished": 0}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _changed(whole: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A file with other values for some keys, or cut off, or any other JSON or bytes."""
    values = st.dictionaries(st.sampled_from([*whole]), _JSON, max_size=3).map(lambda new: {**whole, **new})
    return (values | _JSON).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("bad", "good"):
        folder = tmp_path / ".launcher" / name / folders.NODES / "local"
        folder.mkdir(parents=True)
        record = {"machine": folders.machine_id(), "spec": {**SPEC, "name": name}, "created": 1.0}
        (folder / supervisor.SPEC).write_text(json.dumps(record))
        (folder / supervisor.STATE).write_text(json.dumps({**STATE, "phase": "exited", "exit_code": 0}))
    return tmp_path


@given(made=st.none() | _changed({"machine": "", "spec": SPEC}), spec=_changed(SPEC), state=_changed(STATE))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_read_or_left_out(home: Path, made: bytes | None, spec: bytes, state: bytes) -> None:
    """made: spec.json; None: one of this machine with any spec in it."""
    folder = home / ".launcher" / "bad" / folders.NODES / "local"
    own = b'{"machine": "' + folders.machine_id().encode() + b'", "spec": ' + spec + b"}"
    (folder / supervisor.SPEC).write_bytes(own if made is None else made)
    (folder / supervisor.STATE).write_bytes(state)
    listed = ProcessEngine("local").list({})
    assert "good" in [container.name for container in listed]
    for container in folders.every():
        assert 0 <= folders.supervisor_of(container) <= 1 << 22  # -1 would be all processes


@pytest.mark.parametrize(
    "text", ['{"phase": "run', "", "[]", '{"phase": "unheard"}', '{"phase": "running", "pid": -1}']
)
def test_a_container_without_a_whole_state_counts_as_not_started(home: Path, text: str) -> None:
    (home / ".launcher" / "bad" / folders.NODES / "local" / supervisor.STATE).write_text(text)
    states = {state.name: state.phase for state in ProcessEngine("local").list({})}
    assert states == {"bad": Phase.CREATED, "good": Phase.EXITED}


def test_a_record_of_another_machine_is_not_listed(home: Path) -> None:
    file = home / ".launcher" / "bad" / folders.NODES / "local" / supervisor.SPEC
    file.write_text(json.dumps({"machine": "another", "spec": {**SPEC, "name": "bad"}}))
    assert [container.name for container in folders.every()] == ["good"]
