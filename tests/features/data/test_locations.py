"""Locations of data: sources, folders on nodes, and the checks of doctor."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from launcher.errors import DataFailed, NodeUnfit, UsageError
from launcher.features.data.command import _failures, _push_of, _pushed, _table
from launcher.features.data.distribution import Distributed
from launcher.features.data.job import check_data_set
from launcher.features.data.locations import (
    Copy,
    DataSource,
    copies,
    is_network,
    parse_source,
    remove,
    resolve_source,
    root_of,
    select,
    shared,
    source_named,
)
from launcher.features.data.push import Delivered
from launcher.job.scalars import LONGEST_URL
from launcher.job.settings import Settings
from launcher.model.container import DataSet
from launcher.model.limits import DEFAULT_LIMITS
from launcher.node.engine import Engine
from launcher.node.process.engine import ProcessEngine
from launcher.planning.checks import Level


def test_a_source_is_local_or_on_another_machine(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    assert parse_source("gpu-a:/data/x", tmp_path) == DataSource("gpu-a", "/data/x")
    assert parse_source("./pets", tmp_path) == DataSource("", str(tmp_path / "pets"))
    for wrong in ("gpu-a:data", "./cats", ""):
        with pytest.raises(UsageError):
            parse_source(wrong, tmp_path)


# Names that `stat -f -c %T` prints (coreutils' stat.c), without spaces as the script prints them
NETWORK = "nfs nfs4 nfsd cifs smb smb2 afs ceph lustre gpfs panfs fhgfs v9fs gfs/gfs2 ocfs2 fuseblk"
ON_DISK = "ext2/ext3 xfs btrfs zfs f2fs overlayfs tmpfs ramfs exfat msdos ntfs aufs reiserfs jfs bcachefs"


@pytest.mark.parametrize(
    ("kind", "network"), [*((k, True) for k in NETWORK.split()), *((k, False) for k in ON_DISK.split())]
)
def test_network_file_systems_are_recognized(kind: str, network: bool) -> None:
    assert is_network(kind) is network


def engine(name: str) -> Engine:
    return ProcessEngine(name, DEFAULT_LIMITS)


def test_nodes_that_share_a_folder_are_found(tmp_path: Path) -> None:
    engines = [engine(name) for name in "abc"]
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert shared(engines, [str(one), str(other), str(one)]) == [0, 1, 0]
    assert list(one.iterdir()) == []


def test_the_folder_belongs_to_the_user_and_is_created_only_for_copies(tmp_path: Path) -> None:
    settings = Settings(data_root={"local": str(tmp_path / "disk")})
    root = Path(root_of(engine("a"), settings, make=False))
    assert not root.exists()
    assert Path(root_of(engine("a"), settings)) == root
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_link_of_another_user_in_data_root_is_not_followed(tmp_path: Path) -> None:
    """As in a /scratch that everybody may write to: it leads to a folder of this user."""
    mine, scratch = tmp_path / "mine", tmp_path / "scratch"
    mine.mkdir()
    scratch.mkdir()
    link = scratch / f"launcher-{os.getuid()}"
    link.symlink_to(mine)
    settings = Settings(data_root={"local": str(scratch)})
    assert root_of(engine("a"), settings) == str(mine), "the user's own link"
    if os.geteuid() == 0:  # only root can make a link of somebody else
        os.lchown(link, 12345, 12345)
        with pytest.raises(NodeUnfit, match="belongs to another user"):
            root_of(engine("a"), settings)


def test_a_home_on_a_network_file_system_requires_a_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_text('#!/bin/sh\n[ "$1" = -f ] || exec /usr/bin/stat "$@"\necho nfs\n')
    (tmp_path / "stat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NodeUnfit, match="network file system"):
        root_of(engine("a"), Settings())
    assert root_of(engine("a"), Settings(data_root=str(tmp_path / "disk"))).startswith(str(tmp_path / "disk"))


def write_copy(root: Path, folder: str, **about: Any) -> None:
    copy = root / folder
    (copy / "files").mkdir(parents=True)
    (copy / "files" / "x").write_bytes(b"x" * 5000)
    (copy / "about.json").write_text(json.dumps({"source": "gpu-a:/x", "bytes": 5000, "files": 1, **about}))


def test_copies_are_listed_and_removed_unless_in_use_or_the_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_copy(tmp_path, "copies/" + "a" * 64)
    write_copy(tmp_path, "partial/" + "b" * 64)
    write_copy(tmp_path, "copies/not-ours")
    write_copy(tmp_path, "copies/" + "c" * 64, bytes="many")
    found = copies(engine("node"), str(tmp_path))
    assert [(copy.name[0], copy.whole, copy.size) for copy in found] == [("a", True, 5000), ("b", False, 5000)]
    assert select({"node": found}, "aaaa") == found[:1]
    assert select({"node": found}, "gpu-a:/x") == found
    with pytest.raises(UsageError):
        select({"node": found}, "dddd")
    tools = tmp_path / "tools"
    tools.mkdir()
    docker = tools / "docker"
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    for script, error in (("exit 1", NodeUnfit), ("echo run-1", DataFailed)):
        docker.write_text(f"#!/bin/sh\n{script}\n")
        docker.chmod(0o755)
        with pytest.raises(error):
            remove(engine("node"), str(tmp_path), found[0])
        assert (tmp_path / found[0].folder).exists()
    docker.write_text("#!/bin/sh\n")
    remove(engine("node"), str(tmp_path), found[0])
    assert not (tmp_path / found[0].folder).exists()
    assert not list(tmp_path.glob(".removed*"))


def test_an_error_lists_some_of_many_sources() -> None:
    every = [Copy("a", f"copies/{n:064}", f"https://host/{n:02}/x", 1, 1, 1, 1, "") for n in range(24)]
    for name, says in (("y", "no such data on these nodes; they have: "), ("x", "selects data of several sources: ")):
        with pytest.raises(UsageError) as error:
            select({"a": every}, name)
        assert error.value.what == says + ", ".join(f"https://host/{n:02}/x" for n in range(5)) + " and 19 more"


def test_data_is_selected_by_any_of_its_names() -> None:
    def copy(node: str, letter: str, source: str, called: str = "") -> Copy:
        return Copy(node, f"copies/{letter * 64}", source, 1, 1, 1, 1, "", called)

    pack, pets, others = (
        copy("gpu-b", "a", "gpu-a:/data/imagenet.pack", "train"),
        copy("gpu-b", "b", "gpu-a:/data/pets"),
        copy("gpu-b", "c", "laptop:/home/ada/pets"),
    )
    found = {"gpu-a": [], "gpu-b": [pack, pets, others]}
    for name in ("train", "imagenet.pack", "imagenet", "gpu-a:/data/imagenet.pack", "aaaa"):
        assert select(found, name) == [pack], name
    assert select(found, "gpu-a:/data/pets") == [pets]
    with pytest.raises(UsageError, match="selects data of several sources: gpu-a:/data/pets, laptop:/home/ada/pets"):
        select(found, "pets")
    for unknown in ("aaa", "", "birds", "imagene"):
        with pytest.raises(UsageError, match="they have: gpu-a:/data/imagenet"):
            select(found, unknown)
    shown = io.StringIO()
    Console(file=shown, width=120).print(_table(found))
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert [row[:3] for row in rows if row[-2:] == ["the", "source"]] == [
        ["gpu-a", "aaaaaaaaaaaa", "gpu-a:/data/imagenet.pack"],
        ["gpu-a", "bbbbbbbbbbbb", "gpu-a:/data/pets"],
    ]


@pytest.mark.parametrize(
    ("pushed", "named"),
    [
        ("./pets", "./pets"),
        ("pets/", "./pets/"),
        ("link", "./link"),
        ("{}/pets", "sub/../pets"),
        ("gpu-a:/data/pets/", "gpu-a:/data/pets"),
        ("https://host/a b.tar", "https://host/a%20b.tar"),
        ("https://host/a%20b.tar", "https://host/a b.tar"),
    ],
)
def test_data_is_selected_as_its_source_was_written(tmp_path: Path, pushed: str, named: str) -> None:
    (tmp_path / "pets").mkdir()
    (tmp_path / "link").symlink_to("pets")
    source = parse_source(pushed.format(tmp_path), tmp_path).label
    copy, other = (
        Copy("a", f"copies/{letter * 64}", of, 1, 1, 1, 1, "") for letter, of in (("a", source), ("b", "x:/y"))
    )
    if pushed != "link":
        (tmp_path / "pets").rmdir()
    assert select({"a": [other, copy]}, source_named(named, tmp_path)) == [copy]
    assert source_named("pets", tmp_path) == "pets", "may be a name in a job"


def test_a_push_says_what_it_had_to_do() -> None:
    delivered = Delivered("a" * 64, received={"gpu-b": 0, "gpu-c": 2000})
    done = Distributed({"gpu-a": "/data/x", "gpu-b": "/b", "gpu-c": "/c"}, delivered)
    assert list(_pushed(done)) == [
        "gpu-a: /data/x  used in place",
        "gpu-b: /b  complete, nothing had to be sent",
        "gpu-c: /c  2.0 kB received",
    ]


def test_the_command_that_repairs_what_verify_found_is_given_once_as_it_can_be_typed() -> None:
    def copy(node: str, of: str) -> Copy:
        return Copy(node, f"copies/{'a' * 64}", of, 1, 1, 1, 1, "sha256:1")

    local, url = f"{os.uname().nodename}:/data/my pets", "https://host/x?a=1&b=2"
    lost = DataFailed("gpu-c", "the image that made the copy was removed", "choose another: --image IMAGE")
    checked = [(copy("gpu-a", local), ["x"]), (copy("gpu-b", local), ["x", "y"]), (copy("gpu-d", local), [])]
    repair = _push_of([each for each, damaged in checked if damaged], None, None)
    assert repair == "launcher data push '/data/my pets' --nodes gpu-a,gpu-b --image sha256:1"
    failed = _failures([*checked, (copy("gpu-c", local), lost)], repair)
    assert [(error.where, error.next_step) for error in failed] == [
        ("gpu-a", ""),
        ("gpu-b", f"to transfer what is missing, run: {repair}"),
        ("gpu-c", lost.next_step),
    ]
    assert _push_of([copy("gpu-a", url)], "me/train", Path("ssh config")) == (
        "launcher data push 'https://host/x?a=1&b=2' --nodes gpu-a --image me/train --ssh-config 'ssh config'"
    )
    assert _push_of([], None, None) == ""


def test_doctor_compares_the_copies_of_the_nodes() -> None:
    engines = [cast(Engine, SimpleNamespace(node=name, host=name)) for name in ("gpu-a", "gpu-b", "gpu-c")]

    def copy(node: str, name: str, files: int = 7) -> Copy:
        return Copy(node, f"copies/{name * 64}", "gpu-a:/x", 1, files, 1, 1, "")

    def levels(*seen: list[Copy]) -> list[tuple[Level, str]]:
        checks = check_data_set(DataSet("x", "gpu-a:/x", "/x"), engines, [[], *seen])
        return [(check.level, check.what) for check in checks]

    assert levels([copy("gpu-b", "a")], [copy("gpu-c", "a")]) == [(Level.OK, "x: the same 7 files on every node")]
    assert levels([copy("gpu-b", "a", 1)], [copy("gpu-c", "a", 1)]) == [(Level.OK, "x: the same 1 file on every node")]
    assert levels([copy("gpu-b", "a")], []) == [(Level.WARN, "x is not on gpu-c yet")]
    assert levels([copy("gpu-b", "a")], [copy("gpu-c", "b")]) == [(Level.WARN, "x differs between nodes")]
    many = levels([copy("gpu-b", "a", 10**6)], [copy("gpu-c", "a", 10**6)])
    assert [level for level, _ in many] == [Level.OK, Level.WARN]


def test_what_never_came_makes_no_name_ambiguous() -> None:
    """The first download of a URL may have failed before its first byte; the data then came from another one."""
    came = Copy("a", f"copies/{'1' * 64}", "s3://new/pets.tar", 1, 1, 1, 1, "")
    never = Copy("a", f"partial/{'2' * 64}", "s3://old/pets.tar", 1, 1, 4096, 1, "", empty=True)
    assert select({"a": [never, came]}, "pets") == [came]
    assert select({"a": [never, came]}, "s3://old/pets.tar") == [never]
    assert select({"a": [never]}, "pets") == [never]


def made(root: Path, source: str, name: str = "x") -> Copy:
    """A copy on this machine, as `copies` finds it."""
    folder = root / "copies" / ("1" * 64)
    (folder / "files").mkdir(parents=True)
    (folder / "files" / name).write_text("x")
    (folder / "about.json").write_text(json.dumps({"source": source, "bytes": 1, "files": 1}))
    (copy,) = copies(engine("a"), str(root))
    return copy


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\n"])
def test_a_copy_of_a_long_url_is_listed(tmp_path: Path, letter: str) -> None:
    url = f"https://host/{letter * 7987}"
    assert len(url) == LONGEST_URL
    copy = made(tmp_path, url)
    assert (copy.source, copy.empty) == (url, False)


@pytest.mark.parametrize("name", ["a\nb", "\n", "a\n\n", ".\n", "a b"])
def test_names_with_newlines(tmp_path: Path, name: str) -> None:
    copy = made(tmp_path / "root", "https://host/x", name)
    file = tmp_path / "root" / copy.folder / "files" / name
    assert resolve_source(engine("a"), str(file)) == (str(file), False)
    remove(engine("a"), str(tmp_path / "root"), copy)
    assert not file.exists()
