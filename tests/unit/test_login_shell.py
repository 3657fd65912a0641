"""Startup files of a node's login shell that take long, as on a slow home folder."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launcher.errors import EngineFailed, NodeUnfit
from launcher.node import login_shell
from launcher.node.machine import CommandStream, LocalMachine


class Slow(LocalMachine):
    """Runs something before each command, as ~/.bashrc does."""

    startup = "sleep 0.5"

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> CommandStream:
        return super().start(["sh", "-c", f'{self.startup}; exec "$@"', "sh", *argv], stdin=stdin, timeout=timeout)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_shell, "_LATE", 0.1)


def test_slow_startup_files_are_waited_for() -> None:
    """The shell is checked meanwhile, and is fine."""
    machine = Slow("gpu-a", "me")
    assert login_shell.diagnosed(machine, lambda: machine.run(["echo", "here"]).out) == b"here\n"


def test_startup_files_that_are_slow_and_print_are_named() -> None:
    machine = Slow("gpu-a", "me")
    machine.startup = "sleep 0.5; echo Welcome"

    def ask() -> bytes:
        machine.run(["true"])
        raise EngineFailed("gpu-a", "malformed HTTP response")

    with pytest.raises(NodeUnfit, match="adds 'Welcome' to the output"):
        login_shell.diagnosed(machine, ask)
