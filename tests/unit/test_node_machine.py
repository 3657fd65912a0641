"""Commands on this machine: both streams, stdin, and endless output."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from pathlib import Path

import pytest

from launcher.errors import LauncherError, NodeUnfit, NodeUnreachable
from launcher.model.facts import Reach
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.node.connect import connect
from launcher.node.machine import LocalMachine, outcome, shell


def test_a_command_reads_its_input_and_its_streams_and_exit_code_are_returned() -> None:
    machine, text = LocalMachine("a", "me"), b"x" * (3 << 20)
    done = machine.run(shell("cat; echo complaint >&2; exit 3"), text)
    assert (done.code, done.out, done.err) == (3, text, b"complaint\n")
    assert machine.run(["cat"]).out == b""
    assert machine.run(shell("kill -9 $$")).code < 0
    assert machine.run(["true"], text).code == 0  # which does not read it


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("yes", NodeUnfit, "printed over 1 MiB"),
        ("while :; do echo x; sleep 0.1; done", NodeUnreachable, "did not exit within 1 s"),
        ("sleep 60 & sleep 60", NodeUnreachable, "did not exit within 1 s"),
        pytest.param(
            "trap '' TERM PIPE; while :; do sleep 0.1; done",
            NodeUnreachable,
            "did not exit within 1 s",
            marks=pytest.mark.ci,  # waits for SIGKILL
        ),
    ],
)
def test_an_endless_command_is_given_up_and_stopped(
    tmp_path: Path, script: str, error: type[LauncherError], message: str
) -> None:
    began = time.monotonic()
    with pytest.raises(error, match=message):
        LocalMachine("a", "me", AnswerLimits(1 << 20, 1.0)).run(shell(f"echo $$ >{tmp_path}/pid; {script}"))
    assert time.monotonic() - began < 50
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_the_settings_file_has_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with connect([("local", "local")], "process") as fleet:
        assert fleet.engines[0].machine.limits == DEFAULT_LIMITS
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "settings.yaml").write_text("limits: {answer: 1g, wait: 5m}\n")
    with connect([("local", "local")], "process") as fleet:
        assert fleet.engines[0].machine.limits == AnswerLimits(1 << 30, 300)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_connection_is_open_refused_or_silent(address: str) -> None:
    machine, family = LocalMachine("a", "me"), socket.AF_INET6 if ":" in address else socket.AF_INET
    if ":" in address and "lo" not in Path("/proc/net/if_inet6").read_text().split():
        pytest.skip("this machine has no IPv6")
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server((address, 0), family=family, backlog=0))
        port = server.getsockname()[1]
        assert machine.reach(address, port, 2) is Reach.OPEN
        for _ in range(4):  # then its queue is full, and Linux drops further connections
            waiting = opened.enter_context(socket.socket(family))
            waiting.setblocking(False)
            waiting.connect_ex((address, port))
        assert machine.reach(address, port, 1) is Reach.SILENT
    assert machine.reach(address, port, 2) is Reach.REFUSED
    assert machine.reach("no such address", port, 2) is Reach.UNKNOWN


def test_reachability_is_unknown_on_a_node_without_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("sh", "timeout"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert LocalMachine("a", "me").reach("127.0.0.1", 1, 1) is Reach.UNKNOWN


@pytest.mark.parametrize(
    ("printed", "reach"),
    [
        ("Welcome\n@@connect 0 ", Reach.OPEN),
        ("@@connect 1 bash: connect: Connection refused\nbash: line 1: /dev/tcp/a/1: ...", Reach.REFUSED),
        ("@@connect 1 bash: connect: Connection timed out", Reach.SILENT),
        ("@@connect 1 bash: connect: No route to host", Reach.SILENT),
        ("@@connect 1 bash: connect: Network is unreachable", Reach.SILENT),
        ("@@connect 124 ", Reach.SILENT),
        ("@@connect 143 Terminated", Reach.SILENT),
        ("@@connect 1 bash: connect: Permission denied", Reach.UNKNOWN),
        ("@@connect 1 bash: line 1: /dev/tcp/a/1: No such file or directory", Reach.UNKNOWN),
        ("@@connect 127 timeout: failed to run command 'bash': No such file or directory", Reach.UNKNOWN),
        ("Connection refused", Reach.UNKNOWN),
        ("", Reach.UNKNOWN),
    ],
)
def test_messages_of_bash_about_a_connection(printed: str, reach: Reach) -> None:
    assert outcome(printed) is reach
