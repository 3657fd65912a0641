"""Nothing is read or written through what a program puts in place of its files: links, FIFOs, devices, hard links."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.errors import LauncherError, NodeUnfit
from launcher.node import trees
from launcher.node.files import FileEntry, Files, Span
from launcher.node.machine import LocalMachine
from launcher.node.trees import Entry, Place
from launcher.records.collect import Collected, OutputFolder, collect

SECRET = b"private text\n"
NAME = "logs/a.log"
AT_ONCE = 100.0  # seconds; a FIFO or a device would block until the time limit of tests
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices and files of others")
PROGRAMS = ("cat", "chmod", "cp", "find", "head", "id", "ls", "mkdir", "mv", "readlink", "rm", "sleep", "stat", "tail")


@pytest.fixture(params=["sh"])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """On a node without Python whose shell is sh or bash; "python": with Python."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sh").symlink_to(shutil.which("bash" if request.param == "bash" else "sh") or "sh")
    for name in (*PROGRAMS, "timeout", "uname", "wc"):
        (programs / name).symlink_to(shutil.which(name) or name)
    if request.param == "python":
        (programs / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(programs))
    return Files(LocalMachine("gpu-a", "me"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output folder, in a home that is reached through a link; `private` is beside it."""
    (tmp_path / "private" / "logs").mkdir(parents=True)
    (tmp_path / "private" / "a.log").write_bytes(SECRET)
    (tmp_path / "disk" / "run" / "logs").mkdir(parents=True)
    (tmp_path / "home").symlink_to("disk")
    folder = tmp_path / "home" / "run"
    (folder / NAME).write_bytes(b"the log\n")
    return folder


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is limited
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(path.name)
    os.chdir(here)


def anothers(path: Path) -> None:
    """Make a hard link to another user's file, which the ssh user can read."""
    theirs = path.parents[2] / "theirs"
    theirs.write_bytes(SECRET)
    os.chown(theirs, 65534, 65534)
    path.hardlink_to(theirs)


ATTACKS = [
    pytest.param(lambda out: replaced(out / NAME, lambda p: p.symlink_to(out.parent / "../private/a.log")), id="link"),
    pytest.param(lambda out: replaced(out / NAME, lambda p: p.symlink_to("none")), id="dangling link"),
    pytest.param(lambda out: replaced(out / NAME, lambda p: p.symlink_to("/dev/zero")), id="link to a device"),
    pytest.param(lambda out: replaced(out / NAME, os.mkfifo), id="FIFO"),
    pytest.param(lambda out: replaced(out / NAME, a_socket), id="socket"),
    pytest.param(lambda out: replaced(out / "logs", lambda p: p.symlink_to("../../private")), id="linked folder"),
    pytest.param(lambda out: replaced(out / NAME, anothers), id="another user's file", marks=AS_ROOT),
    pytest.param(
        lambda out: replaced(out / NAME, lambda p: os.mknod(p, stat.S_IFCHR | 0o666, os.makedev(1, 5))),
        id="device",
        marks=AS_ROOT,
    ),
]


ON_ALL = pytest.mark.parametrize("files", ["sh", "bash", "python"], indirect=True)
WITH_PYTHON = pytest.mark.parametrize("files", ["sh", "python"], indirect=True)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < AT_ONCE


def spans_of(files: Files, output: Path, count: int) -> set[bytes]:
    wanted = [Span(str(output / NAME), 0, 1 << 20)] * count
    return {piece for _, piece in files.read_spans(wanted, below=str(output))}


@ON_ALL
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_is_not_what_was_meant_is_not_opened_and_named(
    attack: Callable[[Path], None], files: Files, output: Path, tmp_path: Path
) -> None:
    path, below = str(output / NAME), str(output)
    attack(output)
    (tmp_path / "here").mkdir()
    with at_once():
        assert spans_of(files, output, 1) == spans_of(files, output, 50) == set()
        for read in (files.read, lambda path, below: files.before_last_lines(path, 1, 1000, below=below)):
            with pytest.raises((NodeUnfit, FileNotFoundError)):
                read(path, below=below)
        with contextlib.closing(files.tail(path, 0, {path: 0}, below=below)) as follower:
            assert follower.next(0.2) is None
        with pytest.raises(NodeUnfit):
            files.append(path, "a line", below=below)
        (result,) = collect([OutputFolder(files, below, ("gpu-a",))], tmp_path / "here")
    assert sorted(path.name for path in (tmp_path / "private").iterdir()) == ["a.log", "logs"]
    assert (tmp_path / "private" / "a.log").read_bytes() == SECRET
    assert not (output / "logs" / "none").exists()
    assert isinstance(result, Collected)
    assert len(result.problems) == 1
    assert str(result.problems[0]).startswith("gpu-a: logs")
    assert str(result.problems[0]).endswith(": ignored")
    assert not [path for path in (tmp_path / "here").rglob("*") if path.is_file()]


def test_thousands_of_links_are_told_in_a_few_lines(files: Files, output: Path, tmp_path: Path) -> None:
    for number in range(1000):
        (output / "logs" / f"rank-{number}.log").symlink_to("/etc/passwd")
    (tmp_path / "here").mkdir()
    (result,) = collect([OutputFolder(files, str(output), ("gpu-a",))], tmp_path / "here")
    assert isinstance(result, Collected)
    assert len(result.problems) == 6
    assert str(result.problems[-1]) == f"gpu-a: 995 more links and special files in {output} ignored"


def test_a_file_with_two_names_of_its_own_is_read(files: Files, output: Path) -> None:
    """Programs keep the best checkpoint that way. A container can link no file of another mount."""
    (output / "logs" / "best").hardlink_to(output / NAME)
    assert files.read(str(output / "logs" / "best"), below=str(output)) == b"the log\n"
    assert len(files.scan(str(output))) == 2


@WITH_PYTHON
def test_any_name_is_found(files: Files, output: Path) -> None:
    names = ["a b ", " c", "d\ne", "-f", "g*", "h\\", "i\r", "j\udcff"]
    for name in names:
        (output / "logs" / name).write_bytes(b"12")
        assert files.read(str(output / "logs" / name), below=str(output)) == b"12"
    listed = [entry.path for entry in files.scan(str(output))]
    assert sorted(listed) == sorted([NAME, *(f"logs/{name}" for name in names)])
    spans = [Span(f"{output}/logs/{name}", -1, 9) for name in names if "\n" not in name]  # requests are lines
    for wanted in (spans, spans * 10):
        assert [piece for _, piece in files.read_spans(wanted, below=str(output))] == [b"2"] * len(wanted)


@pytest.mark.parametrize("path", ["/r/../private", "/r/./a", "/r//a", "/r/", "/r", "/elsewhere/a", "a", "/r/a\0b"])
def test_a_path_that_leads_elsewhere_is_refused_before_anything_is_asked(path: str, files: Files) -> None:
    with pytest.raises(ValueError, match="is not a path below"):
        files.read(path, below="/r")


@WITH_PYTHON
def test_a_folder_that_is_exchanged_for_a_link_all_the_time_yields_no_private_byte(
    files: Files, output: Path, tmp_path: Path
) -> None:
    flip = (
        "import ctypes, os, sys\n"
        "libc, (one, two) = ctypes.CDLL(None, use_errno=True), map(os.fsencode, sys.argv[1:])\n"
        "while os.getppid() != 1:\n"
        "    if libc.syscall(316 if os.uname().machine == 'x86_64' else 276, -100, one, -100, two, 2):\n"
        "        sys.exit(os.strerror(ctypes.get_errno()))\n"
    )
    (output / "other").symlink_to(tmp_path / "private")
    flipping = subprocess.Popen([sys.executable, "-c", flip, output / "logs", output / "other"])
    try:
        found: set[bytes] = set()
        for _ in range(4):
            found |= spans_of(files, output, 20) | spans_of(files, output, 60)
            with contextlib.suppress(LauncherError, FileNotFoundError):
                found.add(files.read(str(output / NAME), below=str(output)))
            with contextlib.suppress(NodeUnfit):  # refused
                files.append(str(output / NAME), "", below=str(output))
            with contextlib.suppress(LauncherError):
                files.write(str(output / "logs" / "new"), [b"1"], 1, below=str(output))
        assert flipping.poll() is None
    finally:
        flipping.kill()
        flipping.wait()
    assert b"".join(found).replace(b"the log\n", b"").strip() == b""
    assert found
    assert (tmp_path / "private" / "a.log").read_bytes() == SECRET
    assert not (tmp_path / "private" / "new").exists()


@pytest.mark.parametrize("name", ["logs", "logs/new"])
def test_a_file_is_written_through_no_link(name: str, files: Files, output: Path, tmp_path: Path) -> None:
    replaced(output / "logs", lambda path: path.symlink_to(tmp_path / "private"))
    if name == "logs":  # itself is a link, which is replaced
        files.write(str(output / name), [b"new"], 3, below=str(output))
        assert (output / name).read_bytes() == b"new"
    else:
        with pytest.raises(NodeUnfit, match="is a link"):
            files.write(str(output / name), [b"new"], 3, below=str(output))
    assert sorted(path.name for path in (tmp_path / "private").iterdir()) == ["a.log", "logs"]


@pytest.mark.parametrize("folder", [True, False])
def test_a_new_run_resumes_from_nothing_that_is_reached_through_a_link(
    folder: bool, files: Files, output: Path, tmp_path: Path
) -> None:
    area = output / "checkpoints"
    if folder:
        area.symlink_to(tmp_path / "private")
    else:
        area.mkdir()
        (area / "a.log").symlink_to(tmp_path / "private" / "a.log")
    assert [e for e in trees.entries(files, str(output))[0] if not e.link and e.path.startswith("checkpoints")] == []
    source, target = str(area), str(tmp_path / "new" / "checkpoints")
    with contextlib.suppress(NodeUnfit):  # as if it had been a file when it was listed
        trees.copy(files, source, target, ["a.log"], below=str(output))
    place = Place(LocalMachine("gpu-b", "me"), str(tmp_path / "sent" / "checkpoints"))
    with pytest.raises(LauncherError, match="could not be read"):
        trees.fan_out("gpu-a", files, source, {Entry("a.log", len(SECRET), 1.0): [place]}, below=str(output))
    copies = [path for name in ("new", "sent") for path in (tmp_path / name).rglob("*") if not path.is_symlink()]
    assert [path for path in copies if path.is_file()] == []


def test_a_log_whose_name_is_removed_is_followed_to_its_end(files: Files, output: Path) -> None:
    with contextlib.closing(files.tail(str(output / NAME), 4, {}, below=str(output))) as follower:
        assert follower.next(60) == (str(output / NAME), b"log\n")
        with (output / NAME).open("ab") as log:
            (output / NAME).unlink()
            log.write(b"more\n")
        assert follower.next(60) == (str(output / NAME), b"more\n")


def test_an_entry_says_why_it_is_ignored(files: Files, output: Path) -> None:
    os.mkfifo(output / "pipe")
    (output / "link").symlink_to("/")
    ignored: list[FileEntry] = []
    assert [entry.path for entry in files.scan(str(output), ignored=ignored.append)] == [NAME]
    assert sorted((e.path, e.ignored) for e in ignored) == [("link", "is a link"), ("pipe", "is a named pipe")]
