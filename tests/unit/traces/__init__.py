"""What happened in real runs, line by line: the events of their nodes, the messages about them, the actions.

Recorded from runs of plain processes and of the bed: at: seconds since the start, clock: seconds since the epoch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.model.container import ContainerState, Phase
from launcher.run.watch import messages
from launcher.run.watch.attempts import World
from launcher.run.watch.messages import Message

TRACES = sorted(file.stem for file in Path(__file__).parent.glob("*.jsonl"))


def lines(name: str) -> list[dict[str, Any]]:
    text = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def state_of(fields: dict[str, Any]) -> ContainerState:
    known = ("exit_code", "oom_killed", "error")
    own = {name: fields[name] for name in known}
    return ContainerState("", "", "", {}, Phase(fields["phase"]), **own)


def message_of(line: dict[str, Any]) -> Message:
    fields = dict(line["fields"])
    if "state" in fields:
        fields["state"] = state_of(fields["state"])
    if "world" in fields:
        fields["world"] = World(**{**fields["world"], "members": tuple(fields["world"]["members"])})
    if line["message"] == "Output":
        fields["data"] = fields["data"].encode("latin-1")
    made: Message = getattr(messages, line["message"])(**fields)
    return made
