"""Error messages and exit codes of the launcher."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import launcher
from launcher import errors
from launcher.errors import AuthFailed, ImageShipFailed, LauncherError, NodesFailed, NodeUnreachable


def test_an_error_reports_where_what_and_the_next_step() -> None:
    error = NodeUnreachable("gpu-a", "no answer on port 22 within 10 s", "is the machine on?")
    assert str(error) == "gpu-a: no answer on port 22 within 10 s\n  -> is the machine on?"
    assert str(NodeUnreachable("gpu-a", "no answer")) == "gpu-a: no answer"
    assert str(NodeUnreachable("", "no answer")) == "no answer"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("UsageError", 2),
        ("JobInvalid", 2),
        ("PlanInvalid", 2),
        ("RunUnknown", 2),
        ("NodeUnreachable", 3),
        ("HostKeyUnknown", 3),
        ("HostKeyChanged", 3),
        ("AuthFailed", 3),
        ("NodeUnfit", 3),
        ("EngineUnavailable", 3),
        ("EngineForbidden", 3),
        ("ImageUnfit", 4),
        ("ImageBuildFailed", 4),
        ("ImageShipFailed", 4),
        ("StoppedByUser", 5),
        ("NotConfirmed", 6),
    ],
)
def test_exit_codes_match_the_documentation(name: str, code: int) -> None:
    assert getattr(errors, name)("where", "what").exit_code == code


def test_several_nodes_are_all_listed_with_their_fixes() -> None:
    error = NodesFailed(
        [NodeUnreachable("a", "no answer", "switch it on"), AuthFailed("c", "key refused", "add it")], 4
    )
    assert str(error).splitlines() == [
        "2 of 4 nodes failed:",
        "a: no answer",
        "  -> switch it on",
        "c: key refused",
        "  -> add it",
    ]
    assert error.exit_code == 3


def test_a_search_on_nodes_reports_how_many_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the folder of runs of plain processes
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    config = tmp_path / "ssh_config"
    config.write_text("Host gone*\n  HostName 127.0.0.1\n  Port 1\n")
    with pytest.raises(NodesFailed) as caught:
        launcher.find("none", nodes=["local", "gone1", "gone2"], runs=tmp_path / "runs", ssh_config=config)
    assert str(caught.value).startswith("2 of 3 nodes failed:\n")


def test_one_node_needs_no_list() -> None:
    assert str(NodesFailed([AuthFailed("c", "key refused", "add it")], 4)) == "c: key refused\n  -> add it"


def test_an_aggregate_of_aggregates_is_flat() -> None:
    inner = NodesFailed([AuthFailed("a", "x"), AuthFailed("b", "y")])
    assert [error.where for error in NodesFailed([inner, AuthFailed("c", "z")]).errors] == ["a", "b", "c"]


def test_the_aggregate_has_the_common_exit_code() -> None:
    assert NodesFailed([ImageShipFailed("a", "x"), ImageShipFailed("b", "y")]).exit_code == 4
    assert NodesFailed([ImageShipFailed("a", "x"), AuthFailed("b", "y")]).exit_code == 3


def test_errors_survive_a_process_boundary() -> None:
    for error in (AuthFailed("a", "x", "y"), NodesFailed([AuthFailed("a", "x"), ImageShipFailed("b", "y")], 3)):
        copy: LauncherError = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.exit_code) == (type(error), str(error), error.exit_code)
