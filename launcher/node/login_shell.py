"""What a node's login shell or sshd does to our commands, tried when an engine's first answer is late or no sense."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from launcher.errors import EngineFailed, EngineUnavailable, LauncherError, NodeUnfit
from launcher.node.machine import Machine
from launcher.node.parallel import in_background

T = TypeVar("T")
_WORD = "launcher-shell-works"
_TAKEN = "launcher-input-taken"
_INPUT = f"echo {_TAKEN}"  # a line that a shell would run
_LATE = 5.0  # seconds: a node that works answers sooner, but for a slow connection or much load
_POLL = 0.2  # seconds between looks at which of two answers came first
_FOR_TERMINALS = "let it do that for terminals only: in ~/.bashrc or the like there, after a line `[ -t 1 ] || return`"


def blamed(machine: Machine, host: str, ask: Callable[[], T]) -> T:
    """The answer to the first question to a node. Raises NodeUnfit where its login shell is the cause of a failure.

    A shell that takes the input of our commands gives no answer at all: then it is tried beside the question.
    """
    asked = in_background(ask)
    if not asked.wait(_LATE):
        tried = in_background(lambda: _fault_if_it_answers(machine, host))
        while not (asked.wait(_POLL) or tried.wait(0)):
            pass
        if not asked.wait(0) and (fault := tried()):
            raise fault
    try:
        return asked()
    except (EngineFailed, EngineUnavailable, NodeUnfit) as error:
        raise (_fault(machine, host) or error) from error


def _fault_if_it_answers(machine: Machine, host: str) -> NodeUnfit | None:
    with contextlib.suppress(LauncherError):  # the question has the same error, or it is late for another reason
        return _fault(machine, host)
    return None


def _fault(machine: Machine, host: str) -> NodeUnfit | None:
    """A command that prints a word and then its input, of one line."""
    done = machine.run(["sh", "-c", f"echo {_WORD}; cat"], stdin=f"{_INPUT}\n".encode())
    before, works, after = done.out.decode(errors="replace").partition(_WORD)
    if not works and _TAKEN in before:
        return _takes_input(machine.node, host, "starts another shell, which reads the input of our commands")
    if works and _INPUT not in after:
        return _takes_input(machine.node, host, "reads the input of our commands")
    words = (before + after.replace(_INPUT, "", 1) if works else done.complaint).strip()
    if works and words:
        what = f"its login shell prints {words[:300]!r} around what our commands print"
        return NodeUnfit(machine.node, what, f"{_FOR_TERMINALS}. `ssh {host} true` must print nothing")
    if not works:
        what = f"it does not run our commands: to `echo` it says {words[:300]!r} (exit code {done.code})"
        fix = (
            f"give {machine.user} a login shell there (usermod -s /bin/sh) and neither ForceCommand nor command= for it"
        )
        return NodeUnfit(machine.node, what, f"{fix}. `ssh {host} echo works` must print works")
    return None


def _takes_input(node: str, host: str, what: str) -> NodeUnfit:
    return NodeUnfit(
        node, f"its login shell {what}", f"{_FOR_TERMINALS}. `echo works | ssh {host} cat` must print works"
    )
