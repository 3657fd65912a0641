"""What happened in real runs, line by line: the events of their nodes, the messages about them, the actions.

Recorded from runs of plain processes and of the bed: at: seconds since the start, clock: seconds since the epoch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError, NodeUnfit, NodeUnreachable, NoRoomHere
from launcher.model.container import ContainerState, Phase
from launcher.records.collect import Collected
from launcher.records.store import NodeOfRun
from launcher.run.watch import messages, observed
from launcher.run.watch.attempts import Generation
from launcher.run.watch.messages import Message
from launcher.run.watch.observed import Action, FilesCollected, Moment, Observed, RestRead, Shown, StopPeers
from launcher.run.watch.reader import Appended, Event, StateSeen, WaitFailed

TRACES = sorted(file.stem for file in Path(__file__).parent.glob("*.jsonl"))
RUN = "job-20260101-000000-abcd"
OUT = "/out"
ERRORS = {each.__name__: each for each in (NodeUnreachable, NodeUnfit, NoRoomHere)}


def lines(name: str) -> list[dict[str, Any]]:
    text = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def of_run(name: str, rank: int = 0) -> NodeOfRun:
    return NodeOfRun(name, "local", rank, f"launcher-{name}", OUT, range(rank, rank + 1))


def started(line: dict[str, Any]) -> Observed:
    """Return what was known when following began. line: the first one of the trace."""
    start, nodes = line["start"], {node["name"]: of_run(node["name"], node["rank"]) for node in line["start"]["nodes"]}
    shown = [
        Shown(nodes[each["node"]], f"{OUT}/logs/{each['node']}.log", moves=each["moves"]) for each in start["shown"]
    ]
    least = start["min_nodes"]
    return observed.begin(
        RUN,
        nodes.values(),
        shown,
        Moment(0, line["clock"]),
        elastic=least > 0,
        isolates=start["runtime"] == "docker",
        may_lose=len(nodes) - least if least else 0,
    )


def event_of(line: dict[str, Any], known: Observed) -> Event | FilesCollected | None:
    name = line.get("node", "")
    match line.get("event"):
        case "bytes":
            return Appended(name, f"{OUT}/{line['path']}", line["offset"], line["data"].encode("latin-1"))
        case "state":
            return StateSeen(name, state_of(line))
        case "lost":
            return WaitFailed(name, error_of(line["error"]))
        case "rest":
            assert sorted(known.nodes[name].wanted().first_bytes) == sorted(f"{OUT}/{path}" for path in line["paths"])
            return RestRead(name, copies=line["here"])
        case "collected":
            ended = all(known.nodes[each].has_ended for each in line["results"])
            return FilesCollected({each: result_of(found) for each, found in line["results"].items()}, final=ended)
    return None


def error_of(fields: dict[str, Any]) -> LauncherError:
    return ERRORS[fields["class"]](fields["where"], fields["what"], fields["fix"])


def result_of(fields: dict[str, Any]) -> Collected | LauncherError:
    if "error" in fields:
        return error_of(fields["error"])
    return Collected(fields["moved"], tuple(map(error_of, fields["problems"])))


def state_of(fields: dict[str, Any]) -> ContainerState:
    known = ("exit_code", "oom_killed", "error")
    own = {name: fields[name] for name in known}
    return ContainerState("", "", "", {}, Phase(fields["phase"]), **own)


def message_of(line: dict[str, Any]) -> Message:
    fields = dict(line["fields"])
    if "state" in fields:
        fields["state"] = state_of(fields["state"])
    if "world" in fields:
        fields["world"] = Generation(**{**fields["world"], "members": tuple(fields["world"]["members"])})
    if line["message"] == "Output":
        fields["data"] = fields["data"].encode("latin-1")
    made: Message = getattr(messages, line["message"])(**fields)
    return made


def line_of(action: Action) -> dict[str, Any]:
    if isinstance(action, StopPeers):
        return {"action": "stop peers", "timeout": action.after}
    return {"action": "tell budget"}
