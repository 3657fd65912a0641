"""Rounds of a push with real processes: failing nodes are retried or excluded, and the others get the data."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

from launcher.data import worker
from launcher.data.locations import Source
from launcher.data.push import Delivered, Endpoint, Origin, push, verify
from launcher.errors import DataFailed
from launcher.model.container import Mount
from launcher.model.facts import NodeFacts
from launcher.model.progress import no_progress
from launcher.node.machine import LocalMachine

MIB = 1 << 20
SIZE = 3 * MIB


class Reached(LocalMachine):
    """A stand-in for a node behind ssh: its sshd can reach its ports."""

    def tunnel(self, port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port))


class Here(Endpoint):
    """A node that is a process of this machine. A script in its folder, if present, runs first."""

    def argv(self, *more: Mount) -> list[str]:
        first = Path(self.root) / "first.sh"
        return ["sh", str(first), *worker.local_argv()] if first.exists() else worker.local_argv()


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Origin:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "pack").write_bytes(random.Random(0).randbytes(SIZE))
    return Origin(Source("", str(folder)), LocalMachine("this machine", "me"), str(folder), "", None)


def target(folder: Path, name: str, first: str = "", address: str = "127.0.0.1") -> Endpoint:
    root = folder / name
    root.mkdir()
    if first:
        (root / "first.sh").write_text(first)
    facts = NodeFacts(name, name, name, "x86_64", "me", os.getuid(), os.getgid(), (), "/", 1)
    return Here(Reached(name, "me"), facts, str(root), "", address, inside=str(root))


def pushed(origin: Origin, *targets: Endpoint) -> tuple[Delivered, list[str]]:
    messages: list[str] = []
    return push(origin, targets, messages.append, no_progress), messages


def has_it(copy: Endpoint, done: Delivered) -> bool:
    return (Path(copy.root) / "copies" / done.content / "files" / "pack").stat().st_size == SIZE


def test_one_copy_leaves_the_source(tmp_path: Path, origin: Origin) -> None:
    targets = [target(tmp_path, name) for name in "abc"]
    done, _ = pushed(origin, *targets)
    assert not done.failed
    assert SIZE < done.sent < 1.05 * SIZE
    assert all(has_it(each, done) and verify(each, done.content) == [] for each in targets)


def test_a_node_that_keeps_failing_is_excluded_and_the_others_get_the_data(tmp_path: Path, origin: Origin) -> None:
    first, last = target(tmp_path, "a"), target(tmp_path, "c")
    broken = target(tmp_path, "b", "echo no disk >&2; exit 1")
    done, messages = pushed(origin, first, broken, last)
    assert list(done.failed) == ["b"]
    assert "no disk" in str(done.failed["b"])
    assert messages[-1].startswith("excluding b")
    assert has_it(first, done)
    assert has_it(last, done)


def test_a_node_that_fails_once_is_retried(tmp_path: Path, origin: Origin) -> None:
    once = 'mkdir "$(dirname "$0")/tried" 2>/dev/null && exit 1; exec "$@"'
    targets = [target(tmp_path, "a"), target(tmp_path, "b", once)]
    done, messages = pushed(origin, *targets)
    assert not done.failed, messages
    assert any("retrying" in line for line in messages)
    assert all(has_it(each, done) for each in targets)


def test_nodes_reachable_only_by_ssh_get_the_data_from_this_machine(tmp_path: Path, origin: Origin) -> None:
    """The address is reserved and unused (RFC 5737)."""
    targets = [target(tmp_path, name, address="198.51.100.7") for name in "ab"]
    done, messages = pushed(origin, *targets)
    assert not done.failed, messages
    assert any("sending from this machine" in line for line in messages)
    assert all(has_it(each, done) for each in targets)


def test_a_missing_source_is_reported(tmp_path: Path, origin: Origin) -> None:
    (Path(origin.path) / "pack").unlink()
    Path(origin.path).rmdir()
    with pytest.raises(DataFailed, match="No such file"):
        pushed(origin, target(tmp_path, "a"))
