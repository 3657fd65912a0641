"""Labels, an engine's answers and records are input: each is as we write it or refused, and none leads out of a folder.

Thousands of examples each in the slow run, some dozens otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.errors import NodeUnfit
from launcher.model import checked, labels
from launcher.node import output_folder
from launcher.node.docker.errors import SDK_ERRORS
from launcher.node.docker.values import container_state
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.node.trees import Entry
from launcher.records.paths import RUNS, NodePaths, RunPaths
from launcher.records.store import Record, records
from launcher.run.saved import whole

RUN = "cifar-20260101-000000-aaaa"
LABELS = {
    labels.RUN: RUN,
    labels.PURPOSE: "run",
    labels.RUNTIME: "docker",
    labels.NODE: "gpu-a",
    labels.NODE_RANK: "1",
    labels.RANKS: "8+8",
    labels.NODES: "me@gpu-a:22,[fe80::1%eth0]:22",
    labels.GPUS: "GPU-1,MIG-GPU-2/1/0",
    labels.OUTPUT: f"/home/me/.launcher/{RUN}",
    labels.UID: "1001",
    labels.OWNER: "ada@laptop",
    labels.CREATED: "1769860800",
}
INSPECTED = {
    "Id": "c" * 64,
    "Name": "/c",
    "Image": "sha256:1",
    "Config": {"Labels": LABELS},
    "RestartCount": 1,
    "State": {
        "Status": "exited",
        "ExitCode": 1,
        "OOMKilled": False,
        "StartedAt": "2026-01-01T00:00:00.5Z",
        "Error": "",
    },
}
PLANNED = {
    "node": "gpu-a",
    "host": "me@gpu-a:22",
    "rank": 0,
    "first_rank": 0,
    "processes": 8,
    "container": {"name": f"launcher-{RUN}-0", "output_dir": f"/home/me/.launcher/{RUN}"},
}

pieces = st.sampled_from(
    (
        *(
            "..",
            ".",
            "/",
            "\\",
            "~",
            "$HOME",
            "\0",
            "\n",
            "\x1b[2J",
            "",
            "-",
            "+",
            ",",
            "@",
            "9" * 20,
            "٣",
            "é",
            "\ud800",
        ),
        RUN,
        "a",
    )
)
texts = st.lists(pieces | st.text(max_size=5), max_size=6).map("".join)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


@st.composite
def spoiled(draw: st.DrawFn, whole: Any) -> Any:
    """A value with some of its parts missing or replaced, at any depth."""
    if not isinstance(whole, dict) or draw(st.integers(0, 9)) == 0:
        return draw(values | texts)
    found = dict(whole)
    for key in draw(st.lists(st.sampled_from(sorted(whole)), max_size=2)):
        if draw(st.booleans()):
            found.pop(key, None)
        else:
            found[key] = draw(spoiled(whole[key]))
    return found


EXAMPLES = pytest.mark.parametrize("examples", [60, pytest.param(10_000, marks=pytest.mark.slow)])


def fuzz(check: Callable[[Any], None], whole: Any, examples: int) -> None:
    relaxed = settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    relaxed(given(spoiled(whole))(check))()


def inside(path: object, folder: str) -> bool:
    return os.path.normpath(str(path)).startswith(folder + "/")


def is_harmless(told: labels.RunLabels) -> bool:
    here, there = RunPaths(RUNS / told.run), NodePaths(told.output, told.node)
    runs = str(RUNS.absolute())
    assert all(inside(path, runs) for path in (here.root, here.plan, here.result))
    assert all(inside(path, told.output) for path in (there.log, there.error, there.clock, there.attempts))
    assert inside(NodePaths(str(here.root), told.node).log, f"{runs}/{told.run}/logs")
    assert PurePosixPath(told.output).parts[-2:] == (".launcher", told.run)
    assert len(told.ranks) <= 10_000
    assert all(text.isprintable() for text in (told.node, told.owner, told.output, *told.gpus))
    return True


def test_our_own_labels_are_read() -> None:
    told = labels.read(LABELS)
    assert (told.run, told.ranks, told.nodes, told.gpus) == (RUN, range(8, 16), 2, ("GPU-1", "MIG-GPU-2/1/0"))
    assert is_harmless(told)


@EXAMPLES
def test_labels(examples: int) -> None:
    def check(found: Any) -> None:
        with contextlib.suppress(ValueError):
            assert not isinstance(found, dict) or is_harmless(labels.read(found))

    fuzz(check, LABELS, examples)


@EXAMPLES
def test_what_an_engine_tells_of_a_container(examples: int) -> None:
    def check(found: Any) -> None:
        try:
            state = container_state(found)
        except SDK_ERRORS:  # the caller's error then names the node
            return
        assert all(isinstance(word, str) for pair in state.labels.items() for word in pair)
        assert not labels.readable(state.labels) or is_harmless(labels.read(state.labels))

    fuzz(check, INSPECTED, examples)


@EXAMPLES
def test_records(tmp_path: Path, examples: int) -> None:
    record = Record(RunPaths(tmp_path / RUN))
    record.paths.root.mkdir()

    def check(found: Any) -> None:
        record.paths.plan.write_text(json.dumps({"nodes": [found]}))
        for node in record.nodes():
            assert inside(NodePaths("/r", node.name).log, "/r/logs")
            assert PurePosixPath(node.output).parts[-2:] == (".launcher", RUN)

    fuzz(check, PLANNED, examples)


@pytest.mark.parametrize("plan", ["{}", '{"nodes": 1}', '{"nodes": [[]]}', "[]", ""])
def test_a_plan_that_is_none_is_as_good_as_missing(tmp_path: Path, plan: str) -> None:
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "plan.json").write_text(plan)
    assert records(tmp_path) == []


@pytest.mark.parametrize(
    "path",
    [
        *("/h/../.launcher/{}", "/h/.launcher/{}/", "h/.launcher/{}", "/h/.launcher/{}x", "/h/{}", "/h/.launcher/{}\n"),
        *("/h\x1b/.launcher/{}", "/h/.launcher", "/", "", 1, None),
    ],
)
def test_a_folder_that_is_not_the_runs_is_refused(path: object) -> None:
    with pytest.raises(ValueError, match="is not a valid output folder"):
        checked.output_folder(path.format(RUN) if isinstance(path, str) else path, RUN)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setenv("HOME", str(tmp_path))
    return Files(LocalMachine("here", "me"))


def test_an_output_folder_is_removed_and_no_neighbour_of_it(files: Files, tmp_path: Path) -> None:
    folder, other = (tmp_path / ".launcher" / run for run in (RUN, RUN.replace("aaaa", "bbbb")))
    for path in (folder, other):
        output_folder.make(files, str(path), path.name, f"{path}/workdir/a")
        output_folder.make(files, str(path), path.name, f"{path}/workdir/a")  # by another node with the same home
        (path / "a b").mkdir()
    (folder / "a b" / "link").symlink_to(other)
    output_folder.remove(files, str(folder), RUN)
    output_folder.remove(files, str(folder), RUN)
    assert not folder.exists()
    assert (other / "a b").is_dir()


@pytest.mark.parametrize(
    "spoil",
    [
        "rm .launcher-run",
        "echo other-20260101-000000-aaaa >.launcher-run",
        "mv .launcher-run marker; ln -s marker .launcher-run",
        "rm .launcher-run; mkdir .launcher-run",
        "cd ..; mv $RUN elsewhere; ln -s elsewhere $RUN",
    ],
)
def test_a_folder_without_its_proof_is_not_removed(files: Files, tmp_path: Path, spoil: str) -> None:
    folder = tmp_path / ".launcher" / RUN
    output_folder.make(files, str(folder), RUN, f"{folder}/workdir/a")
    (folder / "model.pt").touch()
    subprocess.run(["sh", "-c", spoil], cwd=folder, env={**os.environ, "RUN": RUN}, check=True)
    with pytest.raises(NodeUnfit, match="could not remove"):
        output_folder.remove(files, str(folder), RUN)
    assert (folder / "model.pt").exists()


def test_a_folder_elsewhere_is_not_removed(files: Files, tmp_path: Path) -> None:
    folder = tmp_path / "data" / ".launcher" / RUN
    output_folder.make(files, str(folder), RUN, f"{folder}/workdir/a")
    with pytest.raises(NodeUnfit, match=f"not below {tmp_path}/.launcher"):
        output_folder.remove(files, str(folder), RUN)
    assert folder.exists()


def test_a_removal_that_was_cut_off_is_finished_by_the_next(files: Files, tmp_path: Path) -> None:
    folder = tmp_path / ".launcher" / RUN
    folder.mkdir(parents=True)
    output_folder.remove(files, str(folder), RUN)  # empty: all but the folder itself was gone
    assert not folder.exists()


def test_a_folder_that_another_node_removes_meanwhile_is_removed(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node's `rm` ends just before this one's `find` begins."""
    folder = tmp_path / ".launcher" / RUN
    output_folder.make(files, str(folder), RUN, f"{folder}/workdir/a")
    (folder / "checkpoints").mkdir()
    find = tmp_path / "bin" / "find"
    find.parent.mkdir()
    find.write_text(f'#!/bin/sh\nrm -rf "$1"\nexec {shutil.which("find")} "$@"\n')
    find.chmod(0o755)
    monkeypatch.setenv("PATH", f"{find.parent}:{os.environ['PATH']}")
    output_folder.remove(files, str(folder), RUN)
    assert not folder.exists()


def test_every_attack_in_the_docs_has_an_existing_test() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "internals" / "security.md").read_text()
    rows = [line.split("|")[4] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        assert row.strip() == "the same" or "`" in row
    for file, name in re.findall(r"`(\w+/test_\w+\.py)(?:::(\w+))?`", text):
        assert f"def {name or 'test_'}" in (root / "tests" / file).read_text(), (file, name)


@pytest.mark.parametrize("path", ["../../.ssh/authorized_keys", "a/../../b", "\x1b]0;x\x07"])
def test_a_checkpoint_that_a_node_names_is_not_carried_out_of_its_folder(path: str) -> None:
    kept = [Entry("checkpoints/last.pt", 1, 1.0), Entry("checkpoints/last.sharded/run.pt", 1, 1.0)]
    assert [*whole([*kept, Entry(f"checkpoints/{path}", 1, 2.0)])] == [entry.path for entry in kept]


@pytest.mark.parametrize("target", ["/etc/passwd", "../../..", "../../../last.pt", "a/../../b", "../a/..", "\n"])
def test_a_link_that_a_node_names_does_not_lead_out_of_its_folder(target: str) -> None:
    links = [Entry("checkpoints/step/last", 1, 1.0, target), Entry("checkpoints/step/own", 1, 1.0, "../step/5.pt")]
    assert [*whole(links)] == ["checkpoints/step/own"]
