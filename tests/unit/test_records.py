"""Records of runs: code snapshots, finding runs, collecting files."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from launcher.errors import JobInvalid, LauncherError, NodeUnfit, NodeUnreachable, RunUnknown
from launcher.node.files import FileEntry, Files, Span
from launcher.node.machine import LocalMachine
from launcher.records import snapshot as snapshots
from launcher.records.collect import Collected, OutputFolder, collect, same_time
from launcher.records.paths import RunPaths, not_a_folder
from launcher.records.snapshot import repack, snapshot
from launcher.records.store import NodeOfRun, Record, find, records, resolve
from launcher.records.wanted import want


def names(folder: Path) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(snapshot(folder).archive)) as tar:
        return tar.getnames()


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_snapshots_are_equal_only_for_equal_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, a="1", sub__b="2")
    write(two, sub__b="2", a="1")
    os.utime(two / "a", (1, 1))
    assert snapshot(one) == snapshot(two)
    (two / "a").write_text("changed")
    assert snapshot(one).digest != snapshot(two).digest


def test_ignored_files_and_run_records_are_left_out(tmp_path: Path) -> None:
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
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("x")
    (tmp_path / ".gitignore").write_text("data/*\n!data/keep\n")
    (tmp_path / ".dockerignore").write_text("note\n")
    (tmp_path / "sub" / ".gitignore").write_text("secret\n")
    found = names(tmp_path)
    assert {"main", "data/keep", "sub/runs/code"} <= set(found)
    assert not {"data/big", "runs/r/log", "note", "sub/secret", ".git/HEAD"} & set(found)


def test_symlinks_and_executable_bits_are_kept(tmp_path: Path) -> None:
    write(tmp_path, run="#!/bin/sh")
    (tmp_path / "run").chmod(0o744)
    (tmp_path / "link").symlink_to("run")
    with tarfile.open(fileobj=io.BytesIO(snapshot(tmp_path).archive)) as tar:
        assert tar.getmember("link").issym()
        assert tar.getmember("run").mode == 0o755
    members = {m.name: (m.uid, m.gid) for m, _ in repack(snapshot(tmp_path).archive, "workspace/code", 7, 8)}
    assert members["workspace/code/run"] == (7, 8)


def test_a_folder_that_another_run_just_creates_is_one(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(300):
            folder = tmp_path / str(number)
            made = threading.Thread(target=folder.mkdir)
            made.start()
            while made.is_alive():
                assert not_a_folder(folder) == ""
            made.join()
    finally:
        sys.setswitchinterval(before)


def test_too_large_code_names_the_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LIMIT", 100)
    write(tmp_path, small="x", model="x" * 200)
    with pytest.raises(JobInvalid, match=r"model.*\n.*\.dockerignore"):
        snapshot(tmp_path)


def test_too_large_code_is_refused_before_any_of_it_is_read(tmp_path: Path) -> None:
    """Sizes are checked first: a sparse file of a terabyte, and an endless file."""
    os.mkfifo(tmp_path / "a pipe")
    write(tmp_path, a="x")
    with (tmp_path / "b").open("wb") as file:
        file.truncate(1 << 40)
    began = time.monotonic()
    with pytest.raises(JobInvalid, match=r"b \(1048576 MiB\)"):
        snapshot(tmp_path)
    assert time.monotonic() - began < 100


def test_an_endless_file_is_read_up_to_its_size(tmp_path: Path) -> None:
    fields = Path("/proc/self/fdinfo")  # files of size 0, and one that no longer exists when it is inspected
    with tarfile.open(fileobj=io.BytesIO(snapshot(fields).archive)) as tar:
        assert {member.size for member in tar.getmembers()} == {0}


def test_a_file_of_the_code_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").symlink_to(tmp_path / "nowhere")
    with pytest.raises(JobInvalid, match=r"\.gitignore: cannot be read: No such file"):
        snapshot(tmp_path)


RUNS = ["cifar-20260101-000000-aaaa", "cifar-20260102-000000-bbbb", "cifar-big-20260103-000000-cccc"]


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, RUNS[2]), ("cifar", RUNS[1]), ("cifar-big", RUNS[2]), ("cifar-20260101", RUNS[0]), (RUNS[1], RUNS[1])],
)
def test_a_run_is_found_by_id_prefix_or_name(text: str | None, found: str) -> None:
    assert resolve(text, RUNS, "runs/") == found


@pytest.mark.parametrize("text", ["cifar-2026", "nope"])
def test_an_unknown_run_is_refused_with_a_next_step(text: str) -> None:
    with pytest.raises(RunUnknown) as caught:
        resolve(text, RUNS, "runs/")
    assert caught.value.exit_code == 2
    assert "->" in str(caught.value)


@pytest.mark.parametrize(
    ("where", "what"),
    [("runs/", "no runs in runs/ (runs are recorded where `up` is called)"), ("on gpu-a", "no runs on gpu-a")],
)
def test_no_runs_at_all(where: str, what: str) -> None:
    with pytest.raises(RunUnknown) as refused:
        resolve(None, [], where)
    assert str(refused.value).splitlines()[0] == what


PLANS = [b"", b"{}", b'{"nodes": [', b'{"nodes": [{"node": 1}]}', b'{"nodes": 3}', b"[]", b"[" * 100_000, b"\xff", None]


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_whose_plan_cannot_be_read_hides_no_other_and_is_rebuilt_from_labels(
    tmp_path: Path, plan: bytes | None
) -> None:
    nodes = [NodeOfRun("a", "me@a", 0, f"launcher-{run}-0", f"/home/me/.launcher/{run}", range(2)) for run in RUNS[:2]]
    for run, node in zip(RUNS, nodes, strict=False):
        Record.rebuild(run, "docker", [node], tmp_path)
    broken = tmp_path / RUNS[0] / "plan.json"
    broken.unlink() if plan is None else broken.write_bytes(plan)
    (tmp_path / RUNS[1] / "result.json").write_text("")
    assert [(record.run, record.nodes(), record.result()) for record in records(tmp_path)] == [
        (RUNS[1], (nodes[1],), None)
    ]
    with pytest.raises(RunUnknown, match="no such run"):
        find(RUNS[0], tmp_path)
    Record.rebuild(RUNS[0], "docker", nodes[:1], tmp_path)
    assert find(RUNS[0], tmp_path).nodes() == (nodes[0],)


def output(folder: Path, **files: bytes) -> OutputFolder:
    """A run's output folder on a node that is this machine."""
    for name, data in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return OutputFolder(Files(LocalMachine("here", "me")), str(folder), ("here",))


def moved(results: Sequence[Collected | LauncherError]) -> list[int]:
    assert all(isinstance(result, Collected) and not result.problems for result in results), results
    return [result.moved for result in results if isinstance(result, Collected)]


def test_a_copy_may_have_whole_seconds_only() -> None:
    assert same_time(100.0, 100.7)
    assert not same_time(100.5, 100.7)
    assert not same_time(101.0, 100.7)


def test_only_new_bytes_are_sent(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    events = "tensorboard/events.out.tfevents.1"
    folder = output(there, **{events: b"abc", "logs/n.log": b"1\n", "checkpoints/last": b"x"})
    assert moved(collect([folder], here)) == [5]
    output(there, **{events: b"abcdef"})
    assert moved(collect([folder], here)) == [3]
    assert (here / events).read_bytes() == b"abcdef"
    assert moved(collect([folder], here)) == [0]
    assert not (here / "checkpoints").exists()
    assert moved(collect([folder], here, checkpoints=True)) == [1]
    output(there, **{events: b"new", "checkpoints/last": b""})
    assert moved(collect([folder], here)) == [0]
    assert (here / events).read_bytes() == b"abcdef", "what is shorter on the node stays as it is here"


def test_a_file_in_two_folders_is_kept_from_the_first(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    one = output(tmp_path / "1", **{"logs/a.log": b"first"})
    two = output(tmp_path / "2", **{"logs/a.log": b"other!", "logs/b.log": b"2"})
    assert moved(collect([one, two], here)) == [5, 1]
    assert (here / "logs/a.log").read_bytes() == b"first"


def test_curves_that_cannot_be_joined_are_one_problem_of_collected_files(tmp_path: Path) -> None:
    """The files have come: a run whose curves are not joined has ended as it has."""
    here = tmp_path / "here"
    (here / "metrics.jsonl").mkdir(parents=True)
    first = output(tmp_path / "1", **{"generations__0001-0__metrics.jsonl": b'{"step": 1}\n'})
    results = collect([first, output(tmp_path / "2", **{"logs/a.log": b"2"})], here)
    assert [result.moved for result in results if isinstance(result, Collected)] == [12, 1]
    problems = [str(problem) for result in results if isinstance(result, Collected) for problem in result.problems]
    assert len(problems) == 1
    assert "the curves in" in problems[0]


def test_an_unreadable_folder_does_not_block_the_others(tmp_path: Path) -> None:
    class Away(Files):
        def scan(self, folder: str, *_: object, **__: object) -> Sequence[FileEntry]:
            raise NodeUnreachable("b", "is away")

    here = tmp_path / "here"
    here.mkdir()
    away = OutputFolder(Away(LocalMachine("b", "me")), "/nowhere", ("b",))
    results = collect([away, output(tmp_path / "1", **{"logs/a.log": b"1"})], here)
    assert isinstance(results[0], NodeUnreachable)
    assert results[1] == Collected(1)


@pytest.mark.parametrize("python", [True, False])
def test_the_files_of_many_nodes_come_by_one_request_with_and_without_a_python_there(
    python: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once and from its offset, with any name and content; missing or shorter files give no bytes."""
    programs, folder = tmp_path / "bin", tmp_path / "out"
    programs.mkdir()
    folder.mkdir()
    for name in ("sh", "cat", "stat", "readlink", "tail", "head", "timeout"):
        (programs / name).symlink_to(shutil.which(name) or name)
    there = programs / "python3"
    runs = f': >{tmp_path}/used; exec {sys.executable} "$@"' if python else "exit 1"
    there.write_text(f"#!/bin/sh\n{runs}\n")
    there.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    texts = {f"{folder}/it's {n}\x7f\udcff": bytes([n, 0, 255]) * n for n in range(100)}
    for path, text in texts.items():
        Path(path).write_bytes(text)
    spans = [Span(path, 2, 50) for path in texts]
    spans += [Span(f"{folder}/none", 0, 5), Span(str(folder / "x"), 7, 5)]
    (folder / "x").write_bytes(b"short")
    came: dict[str, bytes] = {}
    for span, piece in Files(LocalMachine("a", "me")).read_spans(spans, below=str(folder)):
        came[span.path] = came.get(span.path, b"") + piece
    assert came == {path: text[2:52] for path, text in texts.items() if len(text) > 2}
    assert (tmp_path / "used").exists() is python


def test_an_interrupted_file_keeps_what_it_had_and_one_that_grows_what_came(tmp_path: Path) -> None:
    class Cut(Files):
        def read_spans(self, spans: Sequence[Span], *, below: str) -> Generator[tuple[Span, bytes], None, None]:
            for span, piece in super().read_spans(spans, below=below):
                yield span, piece[:2]
                raise NodeUnreachable("a", "is away")

    for name, old, new, kept, missing in (
        ("logs/a.log", b"1234", b"12345678", b"123456", 2),
        ("errors/a.json", b"old", b"new text.", b"old", 9),
    ):
        here, there = tmp_path / "here" / name[:4], tmp_path / "there" / name[:4]
        output(here, **{name: old})
        whole = output(there, **{name: new})
        (failed,) = collect([OutputFolder(Cut(LocalMachine("a", "me")), whole.path, ())], here)
        assert isinstance(failed, NodeUnreachable), name
        assert (here / name).read_bytes() == kept
        assert moved(collect([whole], here)) == [missing]
        assert (here / name).read_bytes() == new
        assert sorted(path.name for path in here.rglob("*.part")) == []


def test_a_truncated_file_does_not_affect_other_files(tmp_path: Path) -> None:
    """It is removed or truncated between the stat and the read, so the rest of the stream is misaligned."""

    class Rotates(Files):
        def read_spans(self, spans: Sequence[Span], *, below: str) -> Generator[tuple[Span, bytes], None, None]:
            for span, piece in super().read_spans(spans, below=below):
                yield span, piece
                if span.path.endswith("b"):
                    raise NodeUnfit("a", f"{span.path} was truncated while it was read")

    here = tmp_path / "here"
    here.mkdir()
    whole = output(
        tmp_path / "1", checkpoints__a=b"1", checkpoints__b=b"22", checkpoints__c=b"333", checkpoints__d=b"4"
    )
    folder = OutputFolder(Rotates(LocalMachine("a", "me")), whole.path, ("a",))
    (result,) = collect([folder], here, checkpoints=True)
    assert isinstance(result, Collected)
    assert [problem.what for problem in result.problems] == [
        f"{whole.path}/checkpoints/b was truncated while it was read"
    ]
    assert sorted(path.name for path in (here / "checkpoints").iterdir()) == ["a", "c", "d"]


def test_limits_of_the_settings_file_bound_what_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Drips(Files):
        def read_spans(self, spans: Sequence[Span], *, below: str) -> Generator[tuple[Span, bytes], None, None]:
            while True:
                time.sleep(0.1)
                yield spans[0], b"x"

    here, file = tmp_path / "here", tmp_path / "launcher" / "settings.yaml"
    here.mkdir()
    file.parent.mkdir()
    file.write_text("limits: {file: 6m}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = output(tmp_path / "1", tensorboard__small=b"1")
    os.truncate(output(tmp_path / "1", tensorboard__large=b"").path + "/tensorboard/large", 6 << 20)
    assert moved(collect([folder], here)) == [1 + (6 << 20)]
    os.truncate(tmp_path / "1" / "tensorboard" / "large", (6 << 20) + 1)
    (result,) = collect([folder], here)
    assert isinstance(result, Collected)
    assert result.moved == 0
    assert "was not copied: it has 6,291,457 bytes" in str(result.problems[0])
    output(tmp_path / "1", **{"logs/a.log": b"later"})
    file.write_text("limits: {collect: 1s}\n")
    slow = OutputFolder(Drips(LocalMachine("a", "me")), folder.path, ("a",))
    (late,) = collect([slow], here)
    assert isinstance(late, NodeUnreachable)
    assert "limits.collect" in late.next_step


def test_concurrent_collectors_duplicate_nothing_and_tear_nothing(tmp_path: Path) -> None:
    """A log grows, and an error file is replaced by a text of different length."""
    here, log = tmp_path / "here", tmp_path / "there" / "logs" / "n.log"
    here.mkdir()
    folder = output(tmp_path / "there", **{"logs/x.log": b"", "errors/n.json": b"0" * 9})
    torn: list[bytes] = []

    def grow_and_collect(number: int) -> None:
        for turn in range(10):
            with log.open("ab") as file:
                file.write(b"y")
            part = tmp_path / f"part-{number}"
            part.write_bytes(b"%d" % number * (9 + 4 * turn + number))
            part.replace(tmp_path / "there" / "errors" / "n.json")
            collect([folder], here)
            text = (here / "errors/n.json").read_bytes()
            torn.extend([text] * (len(set(text)) != 1))

    threads = [threading.Thread(target=grow_and_collect, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    collect([folder], here)
    assert (here / "logs/n.log").read_bytes() == log.read_bytes()
    assert (here / "errors/n.json").read_bytes() == (tmp_path / "there/errors/n.json").read_bytes()
    assert torn == []
    assert list(here.rglob("*.part")) == []


def test_event_files_of_any_program_are_found() -> None:
    wanted = want("my/logs/events.out.tfevents.17.host")
    assert wanted is not None
    assert wanted.local == "tensorboard/my/logs/events.out.tfevents.17.host"


@pytest.mark.parametrize(
    "path",
    ["../../etc/passwd", "logs/../../x", "/etc/passwd", "logs/..", "", "logs\\..\\x", "logs/a\nb", "logs/\x1b[2J"],
)
def test_a_path_outside_the_folder_is_ignored(path: str) -> None:
    assert want(path, checkpoints=True) is None


def test_a_plan_without_a_rendezvous_has_no_interfaces(tmp_path: Path) -> None:
    for meeting in ("NaN", "7", '["x"]', '{"interfaces": 3}'):
        (tmp_path / "plan.json").write_text(f'{{"rendezvous": {meeting}, "nodes": []}}')
        assert Record(RunPaths(tmp_path)).interfaces() == {}
