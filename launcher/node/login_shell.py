"""What a node's login shell or sshd does to our commands, tried once an engine's first answer made no sense."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from launcher.errors import EngineFailed, EngineUnavailable, NodeUnfit
from launcher.node.machine import Machine

_WORD = "launcher-shell-works"


@contextlib.contextmanager
def blamed(machine: Machine, host: str) -> Iterator[None]:
    """For the first question to a node. Raises NodeUnfit where its shell causes what looks like another error."""
    try:
        yield
    except (EngineFailed, EngineUnavailable, NodeUnfit) as error:
        raise (_fault(machine, host) or error) from error


def _fault(machine: Machine, host: str) -> NodeUnfit | None:
    done = machine.run(["echo", _WORD])
    before, works, after = done.out.decode(errors="replace").partition(_WORD)
    words = (before + after if works else done.complaint).strip()
    if works and words:
        what = f"its login shell prints {words[:300]!r} around what our commands print"
        cure = "let it print for terminals only: in ~/.bashrc or the like there, after a line `[ -t 1 ] || return`"
        return NodeUnfit(machine.node, what, f"{cure}. `ssh {host} true` must print nothing")
    if not works:
        what = f"it does not run our commands: to `echo` it says {words[:300]!r} (exit code {done.code})"
        cure = (
            f"give {machine.user} a login shell there (usermod -s /bin/sh) and neither ForceCommand nor command= for it"
        )
        return NodeUnfit(machine.node, what, f"{cure}. `ssh {host} echo works` must print works")
    return None
