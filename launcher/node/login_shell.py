"""Check if a node's login shell or sshd breaks our commands, when an engine's first response is late or invalid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from launcher.errors import EngineFailed, EngineUnavailable, LauncherError, NodeUnfit
from launcher.node.machine import Machine
from launcher.node.parallel import in_background

T = TypeVar("T")
_WORKS = "launcher-shell-works"
_TAKEN = "launcher-input-taken"
_INPUT = f"echo {_TAKEN}"  # a line that a shell would run
_LATE = 5.0  # seconds: a working node responds sooner, unless the connection is slow or the load high
_POLL = 0.2  # seconds between checks for the first of two results
_FOR_TERMINALS = "do that for terminals only: in its startup file, such as ~/.bashrc, after a line `[ -t 1 ] || return`"


def diagnosed(machine: Machine, ask: Callable[[], T]) -> T:
    """Return the result of the first request to a node. Raises NodeUnfit if its login shell makes the request fail.

    If the shell reads the input of our commands, the request gets no response: then the shell is checked in parallel.
    """
    asked = in_background(ask)
    if not asked.wait(_LATE):
        checked = in_background(lambda: _fault_if_reachable(machine))
        while not (asked.wait(_POLL) or checked.wait(0)):
            pass
        if not asked.wait(0) and (fault := checked()):
            raise fault
    try:
        return asked()
    except (EngineFailed, EngineUnavailable, NodeUnfit) as error:
        raise (_fault(machine) or error) from error


def _fault_if_reachable(machine: Machine) -> NodeUnfit | None:
    with contextlib.suppress(LauncherError):  # the request fails with the same error, or is late for another reason
        return _fault(machine)
    return None


def _fault(machine: Machine) -> NodeUnfit | None:
    """Run a command that prints a word and then its input, a single line. Return the error if that fails."""
    done = machine.script(f"echo {_WORKS}; cat", stdin=f"{_INPUT}\n".encode())
    before, works, after = done.out.decode(errors="replace").partition(_WORKS)
    if not works and _TAKEN in before:
        return _takes_input(machine, "starts another shell that reads the input of our commands")
    if works and _INPUT not in after:
        return _takes_input(machine, "reads the input of our commands")
    output = (before + after.replace(_INPUT, "", 1) if works else done.message).strip()
    if works and output:
        what = f"its login shell adds {output[:300]!r} to the output of our commands"
        return NodeUnfit(machine.node, what, f"{_FOR_TERMINALS}. `{machine.typed('true')}` must print nothing")
    if not works:
        what = f"it does not run our commands: `echo` printed {output[:300]!r} (exit code {done.code})"
        fix = f"give {machine.user} a login shell there (usermod -s /bin/sh), without ForceCommand and command="
        return NodeUnfit(machine.node, what, f"{fix}. `{machine.typed('echo works')}` must print works")
    return None


def _takes_input(machine: Machine, what: str) -> NodeUnfit:
    fix = f"{_FOR_TERMINALS}. `echo works | {machine.typed('cat')}` must print works"
    return NodeUnfit(machine.node, f"its login shell {what}", fix)
