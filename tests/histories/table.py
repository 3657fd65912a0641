"""How often each command was hit by each fault at each moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.histories.checker import View
from tests.histories.history import HEALED, HITS, MOMENTS, Asked, Fault, History, job_of

COMMANDS = (
    "up", "up -d", "up, a sweep", "up --resume", "up, restarts", "up, min_nodes", "logs", "logs --no-follow", "status",
    "runs", "fetch", "exec", "down", "down --all", "clean",
)  # fmt: skip
OF_RUN = ("kill", "kill supervisor", "kill container", "suspend", "remove")  # of a node of a run
FAULTS = (*OF_RUN, "full", "engine", "pause", "connections", "cut")
BEFORE, DURING = "before", "during"  # the command was asked; it had not ended
OF_NODE = "node: "  # a fault that is not a signal to the command
Cell = tuple[str, str, str]  # command, fault, moment


def moments(fault: str) -> tuple[str, ...]:
    return MOMENTS if fault in HITS else (BEFORE, DURING)


def cells(faults: Sequence[str]) -> list[Cell]:
    return [(command, fault, moment) for command in COMMANDS for fault in faults for moment in moments(fault)]


def can_be(command: str, fault: str, moment: str) -> bool:
    """Nothing befalls a node of a run before its own `up`."""
    return not (command in ("up", "up -d") and fault.removeprefix(OF_NODE) in OF_RUN and moment == BEFORE)


def kind(call: Asked) -> str:
    if call.command == "up" and call.sweep:
        return "up, a sweep"
    if call.command == "up" and call.again:
        return f"up, {call.again}"
    options = {"up": ("--resume", "-d"), "logs": ("--no-follow",), "down": ("--all",)}.get(call.command, ())
    return next((f"{call.command} {option}" for option in options if call.has(option)), call.command)


def count(history: History) -> Counter[Cell]:
    view, found = View(history), Counter[Cell]()
    for call in view.asked:
        found.update((kind(call), hit.how, hit.moment) for hit in view.hits(call))
        for fault in view.faults:
            if fault.how != HEALED and _concerns(view, call, fault) and fault.at < view.exit(call):
                found[kind(call), OF_NODE + fault.how, BEFORE if fault.at < call.at else DURING] += 1
    return found


def _concerns(view: View, call: Asked, fault: Fault) -> bool:
    if fault.node and not fault.where:  # of a machine: while it lasts
        return view.away(call.at, view.exit(call))
    if not fault.node:
        return fault.where == call.folder
    return view.may_mean(call, fault.where) or job_of(fault.where) in call.argv  # also what an `up` resumes


def rows(counted: Counter[Cell]) -> str:
    """As Markdown, without faults that never came; the numbers of a cell are those of the moments, in order."""
    happened = {name for (_, name, _), times in counted.items() if times}
    names = [name for name in (*HITS, *(OF_NODE + fault for fault in FAULTS)) if name in happened]
    lines = [f"| command | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for command in COMMANDS:
        cells = [
            "/".join(str(counted[command, name, m]) if can_be(command, name, m) else "-" for m in moments(name))
            for name in names
        ]
        lines.append(f"| {command} | {' | '.join(cells)} |")
    return "\n".join(lines)
