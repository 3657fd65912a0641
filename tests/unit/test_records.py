"""The caller's side of a run: code snapshots, finding runs, bringing files over."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
from pathlib import Path

import pytest

from launcher.errors import JobInvalid, RunUnknown
from launcher.records import snapshot as snapshots
from launcher.records.collect import collect, want
from launcher.records.snapshot import repack, snapshot
from launcher.records.store import resolve
from tests.unit.test_logs import Memory


def names(folder: Path) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(snapshot(folder).archive)) as tar:
        return tar.getnames()


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_snapshot_is_the_same_for_the_same_files_and_another_for_others(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, a="1", sub__b="2")
    write(two, sub__b="2", a="1")
    os.utime(two / "a", (1, 1))
    assert snapshot(one) == snapshot(two)
    (two / "a").write_text("changed")
    assert snapshot(one).digest != snapshot(two).digest


def test_what_ignore_files_name_and_our_own_records_stay_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        main="x",
        data__big="x",
        data__keep="x",
        runs__r__log="x",
        sub__runs__code="x",
        note="x",
        sub__secret="x",
    )
    write(tmp_path, __git__HEAD="x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("x")
    (tmp_path / ".gitignore").write_text("data/*\n!data/keep\n")
    (tmp_path / ".dockerignore").write_text("note\n")
    (tmp_path / "sub" / ".gitignore").write_text("secret\n")
    found = names(tmp_path)
    assert {"main", "data/keep", "sub/runs/code"} <= set(found)
    assert not {"data/big", "runs/r/log", "note", "sub/secret", ".git/HEAD"} & set(found)


def test_links_stay_links_and_the_mode_that_matters_is_kept(tmp_path: Path) -> None:
    write(tmp_path, run="#!/bin/sh")
    (tmp_path / "run").chmod(0o744)
    (tmp_path / "link").symlink_to("run")
    with tarfile.open(fileobj=io.BytesIO(snapshot(tmp_path).archive)) as tar:
        assert tar.getmember("link").issym()
        assert tar.getmember("run").mode == 0o755
    members = {m.name: (m.uid, m.gid) for m, _ in repack(snapshot(tmp_path).archive, "workspace/code", 7, 8)}
    assert members["workspace/code/run"] == (7, 8)


def test_code_that_is_too_large_names_what_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LIMIT", 100)
    write(tmp_path, small="x", model="x" * 200)
    with pytest.raises(JobInvalid, match=r"model.*\n.*\.dockerignore"):
        snapshot(tmp_path)


RUNS = ["cifar-20260101-000000-aaaa", "cifar-20260102-000000-bbbb", "cifar-big-20260103-000000-cccc"]


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, RUNS[2]), ("cifar", RUNS[1]), ("cifar-big", RUNS[2]), ("cifar-20260101", RUNS[0]), (RUNS[1], RUNS[1])],
)
def test_a_run_is_found_by_what_a_person_types(text: str | None, found: str) -> None:
    assert resolve(text, RUNS, "runs/") == found


@pytest.mark.parametrize("text", ["cifar-2026", "nope"])
def test_a_run_that_is_not_one_is_refused_with_a_way_on(text: str) -> None:
    with pytest.raises(RunUnknown) as caught:
        resolve(text, RUNS, "runs/")
    assert caught.value.exit_code == 2
    assert "->" in str(caught.value)


def test_only_new_bytes_travel(tmp_path: Path) -> None:
    files = Memory(
        {"/o/tensorboard/events.out.tfevents.1": b"abc", "/o/logs/n.log": b"1\n", "/o/checkpoints/last.pt": b"x"}
    )
    assert collect(files, "/o", tmp_path) == 5
    files.content["/o/tensorboard/events.out.tfevents.1"] += b"def"
    assert collect(files, "/o", tmp_path) == 3
    assert (tmp_path / "tensorboard/events.out.tfevents.1").read_bytes() == b"abcdef"
    assert collect(files, "/o", tmp_path) == 0
    assert not (tmp_path / "checkpoints").exists()
    assert collect(files, "/o", tmp_path, checkpoints=True) == 1


def test_two_who_bring_the_same_files_at_once_double_nothing(tmp_path: Path) -> None:
    class Slow(Memory):
        def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes:
            time.sleep(0.001)
            return super().read(path, offset, limit)

    files = Slow({"/o/logs/n.log": b"x" * 100})

    def grow_and_collect() -> None:
        for _ in range(50):
            files.content["/o/logs/n.log"] += b"y"
            collect(files, "/o", tmp_path)

    threads = [threading.Thread(target=grow_and_collect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "logs/n.log").read_bytes() == files.content["/o/logs/n.log"]


def test_event_files_of_any_program_are_found() -> None:
    wanted = want("my/logs/events.out.tfevents.17.host")
    assert wanted is not None
    assert wanted.local == "tensorboard/my/logs/events.out.tfevents.17.host"


@pytest.mark.parametrize("path", ["../../etc/passwd", "logs/../../x", "/etc/passwd", "logs/..", "", "logs\\..\\x"])
def test_a_path_that_would_leave_the_folder_is_left(path: str) -> None:
    assert want(path, checkpoints=True) is None
