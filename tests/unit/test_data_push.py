"""Rounds of a push with real processes: nodes that fail are left out or tried again, and the others get the data."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

from launcher.data import worker
from launcher.data.places import Source
from launcher.data.push import Delivered, Origin, Place, push, verify
from launcher.errors import DataFailed
from launcher.model.container import Mount
from launcher.model.facts import NodeFacts
from launcher.model.progress import no_progress
from launcher.node.machine import LocalMachine

MIB = 1 << 20
SIZE = 3 * MIB


class Reached(LocalMachine):
    """Stands for a node behind ssh: its sshd reaches its ports."""

    def tunnel(self, port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port))


class Here(Place):
    """A node that is a process of this machine. Its folder may hold a program that starts first."""

    def argv(self, *more: Mount) -> list[str]:
        first = Path(self.root) / "first.sh"
        return ["sh", str(first), *worker.here()] if first.exists() else worker.here()


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Origin:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "pack").write_bytes(random.Random(0).randbytes(SIZE))
    return Origin(Source("", str(folder)), LocalMachine("this machine", "me"), str(folder), "", None)


def place(folder: Path, name: str, first: str = "", address: str = "127.0.0.1") -> Place:
    root = folder / name
    root.mkdir()
    if first:
        (root / "first.sh").write_text(first)
    facts = NodeFacts(name, name, name, "x86_64", "me", os.getuid(), os.getgid(), (), "/", 1)
    return Here(Reached(name, "me"), facts, str(root), "", address, inside=str(root))


def pushed(origin: Origin, *places: Place) -> tuple[Delivered, list[str]]:
    said: list[str] = []
    return push(origin, places, said.append, no_progress), said


def has_it(place: Place, done: Delivered) -> bool:
    return (Path(place.root) / "copies" / done.content / "files" / "pack").stat().st_size == SIZE


def test_one_copy_leaves_the_source(tmp_path: Path, origin: Origin) -> None:
    places = [place(tmp_path, name) for name in "abc"]
    done, _ = pushed(origin, *places)
    assert not done.failed
    assert SIZE < done.sent < 1.05 * SIZE
    assert all(has_it(each, done) and verify(each, done.content) == [] for each in places)


def test_a_node_that_keeps_failing_is_left_out_and_named_and_the_others_go_on(tmp_path: Path, origin: Origin) -> None:
    first, broken, last = place(tmp_path, "a"), place(tmp_path, "b", "echo no disk >&2; exit 1"), place(tmp_path, "c")
    done, said = pushed(origin, first, broken, last)
    assert list(done.failed) == ["b"]
    assert "no disk" in str(done.failed["b"])
    assert said[-1].startswith("b is left out")
    assert has_it(first, done)
    assert has_it(last, done)


def test_a_node_that_fails_once_is_tried_again(tmp_path: Path, origin: Origin) -> None:
    once = 'mkdir "$(dirname "$0")/tried" 2>/dev/null && exit 1; exec "$@"'
    places = [place(tmp_path, "a"), place(tmp_path, "b", once)]
    done, said = pushed(origin, *places)
    assert not done.failed, said
    assert any("trying again" in line for line in said)
    assert all(has_it(each, done) for each in places)


def test_nodes_that_only_ssh_reaches_get_it_from_here(tmp_path: Path, origin: Origin) -> None:
    """Nobody has that address (RFC 5737)."""
    places = [place(tmp_path, name, address="198.51.100.7") for name in "ab"]
    done, said = pushed(origin, *places)
    assert not done.failed, said
    assert any("this machine sends to it" in line for line in said)
    assert all(has_it(each, done) for each in places)


def test_a_source_that_is_gone_is_named(tmp_path: Path, origin: Origin) -> None:
    (Path(origin.path) / "pack").unlink()
    Path(origin.path).rmdir()
    with pytest.raises(DataFailed, match="No such file"):
        pushed(origin, place(tmp_path, "a"))
