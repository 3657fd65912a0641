"""How often a node's processes were started, and how each attempt ended, from the file that the entry script writes.
Who stops a run adds a line: launchers that are attached to it follow this file.

The engine's own counter forgets when the node reboots; this file does not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.run.state import HANG_CODE, SIGKILL_CODE, SIGTERM_CODE, TIMEOUT_CODE

_STOPPED = re.compile(rb"^stopped ([!-~]{1,400}) \d+$", re.MULTILINE)  # as owner.caller() writes it
ANNOUNCE = '[ ! -f "$1" ] || echo "$2" >>"$1"'  # adds a stop_line() to the file of a run that has begun
LIMIT = 1 << 20  # bytes of the file that are read
_MAX_DIGITS = 15
_MEANINGS = {SIGKILL_CODE: "SIGKILL", SIGTERM_CODE: "SIGTERM", TIMEOUT_CODE: "time limit", HANG_CODE: "hung"}


@dataclass(frozen=True)
class Attempt:
    """One start of a node's processes. Seconds since the epoch by the node's clock.

    ended and code are None while it runs, and where its container was killed or its node went down.
    """

    started: float
    ended: float | None = None
    code: int | None = None
    halted: frozenset[int] = frozenset()  # ranks that were suspended when the others were ended
    left: bool = False  # when it was stopped, all of its ranks had ended, and its torchrun waited for the other nodes

    def why(self) -> str:
        """Why it had to be followed by another one."""
        if self.ended is None:
            return "being killed with its container, its engine or its node"
        meaning = f" ({_MEANINGS[self.code]})" if self.code in _MEANINGS else ""
        return f"exit code {self.code}{meaning} after {self.ended - self.started:.0f} s"


def parse(text: bytes) -> tuple[Attempt, ...]:
    """From the lines that the entry script writes; others and torn ones are ignored."""
    found: list[Attempt] = []
    for line in text.decode("utf-8", "replace").splitlines():
        words = line.split()
        try:
            numbers = [int(word) for word in words[1:] if len(word) <= _MAX_DIGITS]
        except ValueError:
            continue
        if words[:1] == ["start"] and len(numbers) == 1:
            found.append(Attempt(numbers[0]))
        elif words[:1] == ["exit"] and len(numbers) == 2 and found and found[-1].ended is None:
            found[-1] = replace(found[-1], ended=numbers[1], code=numbers[0])
        elif words[:1] == ["halted"] and len(numbers) == 2 and found:
            found[-1] = replace(found[-1], halted=found[-1].halted | {numbers[0]})
        elif words[:1] == ["left"] and len(numbers) == 1 and found:
            found[-1] = replace(found[-1], left=True)
    return tuple(found)


def stop_line(by: str) -> str:
    """What is added to the file before a running container is stopped. by: user@host."""
    return f"stopped {by} {int(time.time())}"


def stopped_by(text: bytes) -> str | None:
    """Who stopped the last attempt; None where it was not stopped."""
    last = max(text.rfind(b"start "), 0)
    found = _STOPPED.search(text, last)
    return found.group(1).decode() if found else None


def reasons(attempts: Sequence[Attempt]) -> list[str]:
    """Why each restart was needed, in order."""
    return [attempt.why() for attempt in attempts[:-1]]
