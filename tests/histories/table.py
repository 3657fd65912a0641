"""How often each command was hit by each fault at each moment."""

from __future__ import annotations

from collections import Counter

from tests.histories.checker import View
from tests.histories.history import HEALED, HITS, MOMENTS, Asked, Fault, History

COMMANDS = (
    "up", "up -d", "up, a sweep", "up --resume", "up, restarts", "up, min_nodes", "logs", "logs --no-follow", "status",
    "runs", "fetch", "exec", "down", "down --all", "clean",
)  # fmt: skip
FAULTS = (
    "kill", "kill supervisor", "kill container", "suspend", "remove", "full", "engine", "pause", "connections", "cut",
)  # fmt: skip
BEFORE, DURING = "before", "during"  # the command was asked; it had not ended


def kind(call: Asked) -> str:
    if call.command == "up" and call.sweep:
        return "up, a sweep"
    if call.command == "up" and call.again:
        return f"up, {call.again}"
    options = {"up": ("--resume", "-d"), "logs": ("--no-follow",), "down": ("--all",)}.get(call.command, ())
    return next((f"{call.command} {option}" for option in options if call.has(option)), call.command)


def count(history: History) -> Counter[tuple[str, str, str]]:
    """By command, fault and moment; one that is not a signal to the command as "node: FAULT"."""
    view, found = View(history), Counter[tuple[str, str, str]]()
    for call in view.asked:
        found.update((kind(call), hit.how, hit.moment) for hit in view.hits(call))
        for fault in view.faults:
            if fault.how != HEALED and _concerns(view, call, fault) and fault.at < view.exit(call):
                found[kind(call), f"node: {fault.how}", BEFORE if fault.at < call.at else DURING] += 1
    return found


def _concerns(view: View, call: Asked, fault: Fault) -> bool:
    if fault.node and not fault.where:  # of a machine: while it lasts
        return view.away(call.at, view.exit(call))
    return fault.where == call.folder if not fault.node else view.may_mean(call, fault.where)


def rows(counted: Counter[tuple[str, str, str]]) -> str:
    """As Markdown, without faults that never came; the numbers of a cell are those of the moments, in order."""
    happened = {name for (_, name, _), times in counted.items() if times}
    names = [name for name in (*HITS, *(f"node: {fault}" for fault in FAULTS)) if name in happened]
    lines = [f"| command | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for command in COMMANDS:
        cells = [
            "/".join(str(counted[command, name, moment]) for moment in (MOMENTS if name in HITS else (BEFORE, DURING)))
            for name in names
        ]
        lines.append(f"| {command} | {' | '.join(cells)} |")
    return "\n".join(lines)
