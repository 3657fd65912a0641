"""Rounds of a push with real processes: failing nodes are retried or excluded, and the others get the data."""

from __future__ import annotations

import json
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import DataFailed, NodeUnreachable
from launcher.features.data import certificates, worker
from launcher.features.data import push as push_
from launcher.features.data.locations import DataSource
from launcher.features.data.push import (
    TRIES,
    Delivered,
    End,
    Endpoint,
    RoundEnd,
    Sender,
    Undelivered,
    next_round,
    push,
    verify,
)
from launcher.model.container import Tool
from launcher.model.facts import EngineFacts, NodeFacts
from launcher.model.progress import no_progress
from launcher.node.machine import CommandStream, LocalMachine
from launcher.node.process.engine import ProcessEngine

MIB = 1 << 20
SIZE = 3 * MIB
HERE = LocalMachine("a", "me")


class Reached(LocalMachine):
    """A stand-in for a node behind ssh: its sshd can reach its ports."""

    def tunnel(self, port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port))


class Here(ProcessEngine):
    """A node whose tools are processes of this machine. A script in their folder, if present, runs first."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.host, self.machine = node, Reached(node, "me")

    def tool(self, wanted: Tool) -> CommandStream:
        first = Path(wanted.mounts[0].source) / "first.sh"
        return self.machine.open([*(["sh", str(first)] if first.exists() else []), *worker.local_argv()])


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sender:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "pack").write_bytes(random.Random(0).randbytes(SIZE))
    return Sender(DataSource("", str(folder)), LocalMachine("this machine", "me"), str(folder), "", None)


def target(folder: Path, name: str, first: str = "", address: str = "127.0.0.1") -> Endpoint:
    root = folder / name
    root.mkdir()
    if first:
        (root / "first.sh").write_text(first)
    facts = NodeFacts(name, name, name, "x86_64", "me", os.getuid(), os.getgid(), (), "/", 1)
    return Endpoint(Here(name), facts, str(root), "", address, inside=str(root))


def pushed(origin: Sender, *targets: Endpoint) -> tuple[Delivered, list[str]]:
    messages: list[str] = []
    return push(origin, targets, messages.append, no_progress), messages


def has_it(copy: Endpoint, done: Delivered) -> bool:
    return (Path(copy.root) / "copies" / done.content / "files" / "pack").stat().st_size == SIZE


def test_one_copy_leaves_the_source(tmp_path: Path, origin: Sender) -> None:
    targets = [target(tmp_path, name) for name in "abc"]
    done, _ = pushed(origin, *targets)
    assert not done.failed
    assert SIZE < done.sent < 1.05 * SIZE
    assert all(has_it(each, done) and verify(each, done.content) == [] for each in targets)


def test_a_node_that_keeps_failing_is_excluded_and_the_others_get_the_data(tmp_path: Path, origin: Sender) -> None:
    first, last = target(tmp_path, "a"), target(tmp_path, "c")
    broken = target(tmp_path, "b", "echo no disk >&2; exit 1")
    done, messages = pushed(origin, first, broken, last)
    assert list(done.failed) == ["b"]
    assert "no disk" in str(done.failed["b"])
    assert messages[-1].startswith("excluding b")
    assert has_it(first, done)
    assert has_it(last, done)


def test_a_node_that_fails_once_is_retried(tmp_path: Path, origin: Sender) -> None:
    once = 'mkdir "$(dirname "$0")/tried" 2>/dev/null && exit 1; exec "$@"'
    targets = [target(tmp_path, "a"), target(tmp_path, "b", once)]
    done, messages = pushed(origin, *targets)
    assert not done.failed, messages
    assert any("retrying" in line for line in messages)
    assert all(has_it(each, done) for each in targets)


def test_nodes_reachable_only_by_ssh_get_the_data_from_this_machine(tmp_path: Path, origin: Sender) -> None:
    """The address is reserved and unused (RFC 5737)."""
    targets = [target(tmp_path, name, address="198.51.100.7") for name in "ab"]
    done, messages = pushed(origin, *targets)
    assert not done.failed, messages
    assert any("sending from this machine" in line for line in messages)
    assert all(has_it(each, done) for each in targets)


def test_a_missing_source_is_reported(tmp_path: Path, origin: Sender) -> None:
    (Path(origin.path) / "pack").unlink()
    Path(origin.path).rmdir()
    with pytest.raises(DataFailed, match="No such file"):
        pushed(origin, target(tmp_path, "a"))


def test_several_pushes_of_the_same_data_at_once_send_it_once(tmp_path: Path, origin: Sender) -> None:
    (Path(origin.path) / "folder" / "below").mkdir(parents=True)
    targets = [target(tmp_path, name) for name in "ab"]
    with ThreadPoolExecutor() as pool:
        every = [each.result()[0] for each in [pool.submit(pushed, origin, *targets) for _ in range(3)]]
    assert not [each.failed for each in every if each.failed]
    assert {each.content for each in every} == {every[0].content}
    assert all(has_it(each, every[0]) for each in targets)
    for node in "ab":
        assert SIZE <= sum(each.received[node] for each in every) < 1.05 * SIZE


def test_a_node_that_finds_its_copy_damaged_gets_the_piece_again(tmp_path: Path, origin: Sender) -> None:
    first, second = target(tmp_path, "a"), target(tmp_path, "b")
    done, _ = pushed(origin, first)
    copy = Path(first.root) / "copies" / done.content / "files" / "pack"
    with copy.open("r+b") as file:
        file.write(b"?")
    again, messages = pushed(origin, first, second)
    assert not again.failed
    assert any("pack is damaged on this node" in line for line in messages)
    assert verify(first, again.content) == verify(second, again.content) == []
    assert again.received["a"] < 2 * MIB


CONTENT = "a" * 64
WHOLE = {"end": "whole", "content": CONTENT}


def test_a_node_that_only_this_machine_reaches_comes_last_and_alone() -> None:
    lost = {"end": "lost", "where": "downstream", "why": "timed out"}
    cut = RoundEnd(lost, {"a": {"end": "lost", "where": "upstream"}, "b": WHOLE})
    left, notes = next_round(Undelivered(("a", "b")), cut, "here", from_here=True)
    assert (left.chain, left.alone) == (("b",), ("a",))
    assert notes == ["a is not reachable from the other nodes: sending from this machine"]
    left, notes = next_round(left, RoundEnd(WHOLE, {"b": WHOLE}, received={"b": 1}), "here", from_here=True)
    assert (left.chain, left.alone, notes) == (("a",), (), [])
    left, notes = next_round(left, RoundEnd(WHOLE, {"a": WHOLE}, received={"a": 1}), "here", from_here=True)
    assert left == Undelivered((), content=CONTENT)


def test_a_source_that_waits_for_nobody_is_given_up_after_three_rounds() -> None:
    left = Undelivered(("a",))
    for _ in range(TRIES):
        assert not left.broken
        quiet = RoundEnd(DataFailed("gpu-s", "did not respond for 30 s"), {"a": {"end": "stopped"}})
        left, _ = next_round(left, quiet, "gpu-s", from_here=False)
    assert str(left.broken) == "gpu-s: did not respond for 30 s"


ends = st.sampled_from(
    [
        WHOLE,
        {"end": "whole", "content": "b" * 64},
        {"end": "lost", "where": "downstream"},
        {"end": "lost", "where": "upstream"},
        *({"end": end} for end in ("stopped", "again", "room", "refused", "failed", "changed")),
        DataFailed("node", "did not respond for 30 s"),
        NodeUnreachable("node", "was switched off"),
    ]
)


@given(st.data(), st.booleans())
def test_whatever_happens_each_node_is_served_or_excluded_in_a_few_rounds(data: st.DataObject, from_here: bool) -> None:
    """Each node gets a few rounds without data, and each of these has a reason or counts for the source."""
    nodes = "abc"
    left, served = Undelivered(tuple(nodes)), set[str]()
    for _ in range(len(nodes) * (TRIES + 1) * TRIES):
        end: dict[str, End] = {node: data.draw(ends) for node in left.chain}
        before, (left, notes) = left, next_round(left, RoundEnd(data.draw(ends), end), "source", from_here=from_here)
        served |= {*before.chain} - {*left.chain, *left.alone, *left.failed}
        if left.broken:
            return
        assert sorted([*left.chain, *left.alone, *left.failed, *served]) == sorted(nodes)
        for node in {*left.failed} - {*before.failed}:
            assert "differs from the source" in str(left.failed[node]) or any(f"excluding {node}" in n for n in notes)
        assert not served or left.content
        if not left.chain:
            assert not left.alone
            return
    pytest.fail(f"still copying: {left}")


FORGED: list[Any] = [
    *({"port": port} for port in (0, -1, 65536, "x", None, [1], 1.5, True)),
    *({"received": "many"}, {"sent": -1}, {"done": [], "total": 7}, {"total": {}}, {"total": float("nan")}),
    *({"end": "whole", "content": text} for text in ("../../../rd", "A" * 64, 7, None, ["a"])),
    *({"end": []}, {"end": "lost", "where": 3}, {"damaged": 3}, {"bytes": "1e9"}),
]


@pytest.mark.parametrize("message", FORGED, ids=json.dumps)
def test_a_message_of_a_worker_is_checked(message: Any) -> None:
    forger = worker.Worker("a", HERE.open(["printf", "%s\n", json.dumps(message)]), {})
    with closing(forger), pytest.raises(DataFailed, match=r"^a: the process that copies data sent an invalid message"):
        forger.until("anything", 10)


def test_a_node_that_forges_messages_is_excluded_and_the_others_get_the_data(tmp_path: Path, origin: Sender) -> None:
    forger = target(tmp_path, "b", """echo '{"port": "x", "received": -1}'; exec "$@" """)
    first = target(tmp_path, "a")
    done, _ = pushed(origin, first, forger)
    assert list(done.failed) == ["b"]
    assert "invalid message" in str(done.failed["b"])
    assert has_it(first, done)


@pytest.mark.parametrize(("margin", "says"), [(-1, "is not yet valid by this node's clock"), (40, "has expired")])
def test_clocks_that_differ_are_named(
    tmp_path: Path, origin: Sender, monkeypatch: pytest.MonkeyPatch, margin: int, says: str
) -> None:
    monkeypatch.setattr(certificates, "_MARGIN", timedelta(days=margin))
    monkeypatch.setattr(certificates, "_LONGEST", timedelta(days=2 if margin < 0 else -39))
    monkeypatch.setattr(push_, "GRACE", 0.1)
    node = target(tmp_path, "a")
    done, _ = pushed(origin, node)
    error = str(done.failed["a"])
    assert says in error or "rejected the certificate" in error
    assert "compare the clocks of the nodes" in error
    assert "ephemeral" not in error


def test_a_file_that_cannot_be_read_is_named_by_the_users_path_before_anything_is_sent(
    tmp_path: Path, origin: Sender
) -> None:
    (Path(origin.path) / "z").write_bytes(b"secret")
    (Path(origin.path) / "z").chmod(0)
    root = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    mounted = tmp_path / "launcher-source"  # as a container sees it
    mounted.symlink_to(origin.path)
    order: dict[str, Any] = {
        "role": "source",
        "path": str(mounted),
        "root": str(tmp_path / "root"),
        "label": "gpu-a:/data/x",
    }
    order["tls"] = dict(certificates.certificates(["a"])["a"])
    reader = worker.Worker("a", HERE.open([*root, *worker.local_argv()]), order)
    with closing(reader), pytest.raises(DataFailed, match="Permission denied: gpu-a:/data/x/z"):
        reader.until("bytes")


GONE = "echo 'docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock.' >&2; exit 125"


@pytest.mark.parametrize(
    ("script", "says"),
    [("kill -9 $$", "was killed: the engine was restarted"), (GONE, "its container engine does not answer")],
)
def test_an_engine_that_was_restarted_is_named(script: str, says: str) -> None:
    ended = worker.Worker("a", HERE.open(["sh", "-c", script]), {})
    with closing(ended), pytest.raises(DataFailed, match=f"^a: .*{says}"):
        ended.until("port", 10)


def test_a_container_has_the_users_other_groups_only_or_is_root_in_a_rootless_engine() -> None:
    facts = NodeFacts("a", "a", "a", "x86_64", "me", 1001, 1002, (1002, 27), "/home/me", 1)
    rootless = EngineFacts("e", "27.0", rootless=True, runtimes=(), cdi_devices=(), root_dir="/")
    for node, user, groups in ((facts, "1001:1002", (27,)), (replace(facts, engine=rootless), "0:0", ())):
        tool = worker.tool("image", node, [])
        assert (tool.user, tool.groups) == (user, groups)
