"""Archives for plain processes: no archive writes outside its folders."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.errors import EngineFailed, LauncherError
from launcher.node.process.engine import ProcessEngine
from tests.process.machine import Machine


def hostile(member: Callable[[tarfile.TarInfo], None], name: str, data: bytes = b"x") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        member(info)
        info.size = len(data) if info.isreg() else 0
        tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _file(info: tarfile.TarInfo) -> None:
    info.type = tarfile.REGTYPE


def _kind(kind: bytes, target: str = "") -> Callable[[tarfile.TarInfo], None]:
    def make(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, target

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


BAD = [
    ("{kit}/../../../x", _file),
    ("../x", _file),
    ("{abs}/x", _file),
    ("{node}/spec.json", _file),
    ("{node}/state.json", _file),
    ("tmp/x", _file),
    ("{node}", _file),
    ("{kit}/hard", _kind(tarfile.LNKTYPE, "etc/passwd")),
    ("{kit}/device", _kind(tarfile.CHRTYPE)),
    ("{kit}/block", _kind(tarfile.BLKTYPE)),
    ("{kit}/fifo", _kind(tarfile.FIFOTYPE)),
    ("{kit}", _kind(tarfile.SYMTYPE, "/etc")),
]


@pytest.mark.parametrize(("name", "member"), BAD)
def test_an_archive_with_paths_outside_is_refused(
    machine: Machine, name: str, member: Callable[[tarfile.TarInfo], None]
) -> None:
    spec = machine.spec("true")
    engine, container = machine.create(spec)
    before = contents(machine.home)
    kit = spec.layout.kit.lstrip("/")
    node = str(Path(kit).parent)
    with pytest.raises(EngineFailed, match="refused"):
        engine.put(container, hostile(member, name.format(kit=kit, node=node, abs=spec.layout.kit)))
    assert contents(machine.home) == before


def test_nothing_is_written_through_a_symlink(machine: Machine, tmp_path: Path) -> None:
    spec = machine.spec("true")
    engine, container = machine.create(spec)
    outside = tmp_path / "outside"
    outside.mkdir()
    kit = spec.layout.kit.lstrip("/")
    link = hostile(_kind(tarfile.SYMTYPE, str(outside)), f"{kit}/data")
    engine.put(container, link)  # a link may point anywhere
    with pytest.raises(EngineFailed):
        engine.put(container, hostile(_file, f"{kit}/data/x"))
    assert list(outside.iterdir()) == []
    engine.put(container, hostile(_file, f"{kit}/data"))  # a file replaces the link
    assert Path(spec.layout.kit, "data").read_bytes() == b"x"
    assert list(outside.iterdir()) == []


def test_a_folder_replaces_a_link_and_does_not_change_its_target(machine: Machine, tmp_path: Path) -> None:
    spec = machine.spec("true")
    engine, container = machine.create(spec)
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o750)
    kit = spec.layout.kit.lstrip("/")
    engine.put(container, hostile(_kind(tarfile.SYMTYPE, str(outside)), f"{kit}/data"))
    engine.put(container, hostile(_kind(tarfile.DIRTYPE), f"{kit}/data"))
    assert not Path(spec.layout.kit, "data").is_symlink()
    assert outside.stat().st_mode & 0o777 == 0o750


def test_data_that_is_not_an_archive_is_refused(machine: Machine) -> None:
    engine, container = machine.create(machine.spec("true"))
    with pytest.raises(EngineFailed, match="refused"):
        engine.put(container, b"not a tar archive at all" * 100)


NAMES = st.lists(st.sampled_from(["..", ".", "", "code", "kit", "x", "link", "/", "spec.json", "a"]), max_size=5)
MEMBERS = st.lists(
    st.tuples(
        NAMES, st.sampled_from(["file", "dir", "link", "hard"]), st.sampled_from(["..", "/", "x", "../..", "link"])
    ),
    max_size=6,
)
KINDS = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=MEMBERS, prefix=st.sampled_from(["kit", "", "node"]))
def test_no_archive_writes_outside_the_folder(
    machine: Machine, members: list[tuple[list[str], str, str]], prefix: str
) -> None:
    spec = machine.spec("true")
    engine = ProcessEngine("local-0")
    engine.files.make_dir(spec.output_dir)
    engine.remove(spec.name)
    container = engine.create(spec)
    start = {"kit": spec.layout.kit, "": "", "node": str(Path(spec.layout.kit).parent)}[prefix]
    inside = str(Path(spec.layout.kit).relative_to(machine.home))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for parts, kind, target in members:
            info = tarfile.TarInfo("/".join([start.lstrip("/"), *parts]))
            info.type, info.linkname = KINDS[kind], target
            info.size = 3 if kind == "file" else 0
            tar.addfile(info, io.BytesIO(b"bad"))

    def elsewhere() -> dict[str, bytes]:
        return {name: data for name, data in contents(machine.home).items() if not name.startswith(inside)}

    before = elsewhere()
    with suppress(LauncherError):
        engine.put(container, buffer.getvalue())
    assert elsewhere() == before
