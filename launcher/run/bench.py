"""`launcher doctor --bench`: every part of every node measured in the job's own image, at once, and judged.

A short container a node, which claims its GPUs as a run does. Nothing of it is left on the nodes. A node that is lost
meanwhile is named, what it said before is used, and the others are judged.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from launcher import container_scripts
from launcher.errors import LauncherError, NodesFailed, NodeUnfit
from launcher.health import machine, measures, verdict
from launcher.health.machine import MachineState, Trouble
from launcher.health.measures import Measure, Said
from launcher.health.rounds import Timetable, minutes_needed, rounds, timetable
from launcher.health.verdict import Finding, Network
from launcher.job.models import Job
from launcher.model import labels
from launcher.model.container import Phase
from launcher.model.facts import NodeFacts
from launcher.model.plan import NodePlan, Plan
from launcher.model.progress import Log
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import Future, in_background, run_all_settled
from launcher.planning import gpus
from launcher.records.paths import NodePaths
from launcher.records.snapshot import snapshot
from launcher.run.exec_shell import temporary_run
from launcher.run.gpus import with_claims

_PROGRAMS = ("bench_node.py", "bench_links.py", "bench_parts.py")
_POLL = 2.0  # seconds between two looks at a node
_TO_BEGIN = 5.0  # seconds that the checks before it may take of the time that was given
_LATE = 20.0  # seconds after its timetable until a node counts as lost
_SILENT = 10.0  # seconds without an answer until those that have not ended are not waited for
_MACHINE = 40.0  # seconds that a machine may take to tell of itself; nvidia-smi gets 20 of them
_BEGUN = b'{"kind": "begun"'
_LONGEST = 8 << 20  # bytes of a node's log


@dataclass(frozen=True)
class Examined:
    """What a bench found. skipped: nodes that were not measured, and why; notes: what could not be measured."""

    nodes: tuple[str, ...] = ()
    seconds: float = 0.0
    measures: tuple[Measure, ...] = ()
    findings: tuple[Finding, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class _Heard:
    """What is known of one node's part so far."""

    idle: MachineState  # before it began
    busy: MachineState = field(default_factory=MachineState)  # while its own parts were measured
    text: bytes = b""
    ended: bool = False
    code: int = 0
    problem: str = ""  # why it could not be asked last time
    silent_since: float = math.inf  # of time.monotonic()


def bench(job: Job, fleet: Fleet, seconds: float, unfit: Mapping[str, str], log: Log) -> Examined:
    """Measure for so long. unfit: nodes not to be measured, and why. Raises NodesFailed, ImageUnfit and the like."""
    began = time.monotonic()
    seen, skipped = _usable(job, fleet, unfit)
    if not seen:
        return Examined(skipped=skipped)
    names = [node.name for node, _ in seen]
    entries = tuple(entry for entry in job.machines if entry.name in names)
    paths = [each.target for each in job.mounts] + [each.at for each in job.data] if job.runtime == "docker" else []
    turns, with_gpus = rounds(len(seen)), any(chosen for _, chosen in seen)
    times = timetable(seconds, len(turns), gpus=with_gpus, reads=bool(paths))
    notes = _notes(len(seen), len(turns), seconds, times, minutes_needed(len(turns), gpus=with_gpus, reads=bool(paths)))
    spec = {"rounds": turns, "times": asdict(times), "paths": paths, "gpus": with_gpus, "precision": _precision(job)}
    program = ("python3", _PROGRAMS[0], json.dumps(spec, separators=(",", ":")))
    limit = math.ceil(times.total(len(turns)) + _LATE)
    alone = {"nodes": entries, "spares": None, "timeout": limit, "secrets": (), "processes": 1}
    with tempfile.TemporaryDirectory() as folder:
        for name in _PROGRAMS:
            Path(folder, name).write_bytes(container_scripts.text(name))
        code = snapshot(Path(folder))
    log(f"measuring {len(names)} nodes, {times.total(len(turns)) / 60:.1f} minutes at most")
    only, facts = fleet.only(names), [node for node, _ in seen]
    heard = dict(zip(names, map(_Heard, only.each(_machine)), strict=True))
    interfaces, gpu_names = dict[str, str](), dict[str, dict[str, str]]()
    try:
        with temporary_run("bench", job.model_copy(update=alone), program, only, facts, code, {}, log) as plan:
            interfaces = dict(zip(names, plan.rendezvous.interfaces, strict=True))
            gpu_names = {each.node: _gpu_names(each, seen[each.rank][0]) for each in plan.nodes}
            _follow(only, plan, heard, limit)
    except LauncherError as error:
        if not any(each.text for each in heard.values()):
            raise
        notes.append(f"not everything could be removed: {error}")  # a lost node: its containers end by themselves
    said = [_said(name, names, each, gpu_names.get(name, {})) for name, each in heard.items()]
    lost = {name: why for name, each in zip(names, said, strict=True) if (why := _lost(each, heard[name]))}
    notes += [f"{each.node}: {note}" for each in said for note in each.notes]
    ready = {node for each in said for node in each.together}
    late = [name for name in names if name not in ready | set(lost)]
    notes += [f"{name} was not ready in time, and was measured without the others" for name in late]
    negotiated = {name: each.busy.link.speed / 1000 for name, each in heard.items() if each.busy.link.speed}
    troubles = _troubles(heard, dict(zip(names, seen, strict=True)))
    found = verdict.judge(said, troubles, Network(interfaces, negotiated), lost)
    every = tuple(measure for each in said for measure in each.measures)
    return Examined(tuple(names), time.monotonic() - began, every, tuple(found), skipped, lost, tuple(notes))


def _usable(
    job: Job, fleet: Fleet, unfit: Mapping[str, str]
) -> tuple[list[tuple[NodeFacts, tuple[str, ...]]], dict[str, str]]:
    """The nodes that nobody uses with the GPUs that the job would get, by rank; and why others are not measured."""
    skipped = dict(unfit)
    engines = [engine for engine in fleet.engines if engine.node not in skipped]
    answers = run_all_settled([partial(_idle, job, engine) for engine in engines])
    usable = []
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, LauncherError):
            skipped[engine.node] = answer.what
        else:
            usable.append(answer)
    if any(chosen for _, chosen in usable):
        skipped |= {node.name: "has no GPU, and others have" for node, chosen in usable if not chosen}
    return [(node, chosen) for node, chosen in usable if node.name not in skipped], skipped


def _idle(job: Job, engine: Engine) -> tuple[NodeFacts, tuple[str, ...]]:
    """Raises NodeUnfit where another run, or anybody, uses what is to be measured; InUse; NodeUnreachable."""
    node = with_claims(engine)
    entry = next(each for each in job.machines if each.name == engine.node)
    chosen = gpus.select(node, job.gpus_of(entry))
    if busy := gpus.in_use(node, [device for device in gpus.devices(node) if device.uuid in chosen]):
        raise NodeUnfit(node.name, f"in use: {'; '.join(busy)}")
    for state in engine.list({labels.PURPOSE: "run"}) if not chosen else ():
        if state.phase is Phase.RUNNING:
            raise NodeUnfit(node.name, f"in use: the run {state.labels[labels.RUN]} computes there")
    return node, chosen


def _notes(nodes: int, turns: int, seconds: float, times: Timetable, least: float) -> list[str]:
    found = []
    if turns < nodes - 1:
        found.append(f"a sample of the pairs: each node was measured with {turns} of the {nodes - 1} others")
    if times.total(turns) > seconds + _TO_BEGIN:
        found.append(f"{nodes} nodes need --minutes {least:g}; each measure was as short as is sensible")
    return found


def _precision(job: Job) -> str:
    """Of the trainer's --amp; of another program it is not known, and 16 bits are what most train in."""
    args = job.run.args
    wanted = args.get("amp", "bf16") if isinstance(args, Mapping) else "bf16"
    return wanted if wanted in ("bf16", "fp16", "none") else "bf16"


def _gpu_names(planned: NodePlan, node: NodeFacts) -> dict[str, str]:
    """What nvidia-smi calls each GPU that a container has, by what torch calls it there and by its UUID."""
    chosen = [device for device in gpus.devices(node) if device.uuid in planned.container.gpus]
    by_place = {f"GPU {place}": device.name for place, device in enumerate(chosen)}
    return by_place | {device.uuid.lower().removeprefix("gpu-"): device.name for device in chosen}


def _follow(fleet: Fleet, plan: Plan, heard: Mapping[str, _Heard], limit: float) -> None:
    """Until every node has ended, or is lost and all others have ended; `limit` seconds at most."""
    over = threading.Event()
    until = time.monotonic() + limit
    threads: list[Future[None]] = [
        in_background(partial(_listen, engine, plan, heard[engine.node], over)) for engine in fleet.engines
    ]
    try:
        while time.monotonic() < until:
            for thread in threads:
                if thread.wait(0):
                    thread()  # raises what it has ended with
            if all(time.monotonic() - each.silent_since > _SILENT for each in heard.values() if not each.ended):
                break
            time.sleep(0.5)
    finally:
        over.set()


def _listen(engine: Engine, plan: Plan, heard: _Heard, over: threading.Event) -> None:
    planned = plan.on(engine.node)
    log = NodePaths(planned.container.output_dir, planned.node).log
    while not over.is_set() and not heard.ended:
        try:
            state = engine.wait(planned.container.name, _POLL)
            try:
                while len(heard.text) < _LONGEST and (more := engine.files.read(log, len(heard.text))):
                    heard.text += more
            except FileNotFoundError:
                pass  # it begins
            if not heard.busy.complete and _BEGUN in heard.text:
                heard.busy = _machine(engine, plan.rendezvous.interfaces[planned.rank])
            heard.problem, heard.silent_since, heard.code = "", math.inf, state.exit_code or 0
            heard.ended = state.phase.ended
        except LauncherError as error:
            heard.problem, heard.silent_since = error.what, min(heard.silent_since, time.monotonic())
            over.wait(_POLL)


def _machine(engine: Engine, interface: str = "") -> MachineState:
    """Raises NodeUnreachable, NodeUnfit."""
    return machine.parse(engine.sh(machine.script(), interface, "", timeout=_MACHINE).decode(errors="replace"))


def _troubles(heard: Mapping[str, _Heard], measured: Mapping[str, tuple[NodeFacts, tuple[str, ...]]]) -> list[Trouble]:
    """What the machines say of themselves, each once. measured: by node, its facts and the GPUs that count."""
    found: list[Trouble] = []
    busy = dict[str, MachineState]()
    for name, (node, chosen) in measured.items():
        own = {device.gpu.uuid for device in gpus.devices(node) if device.uuid in chosen}
        idle, busy[name] = (
            replace(state, gpus=tuple(gpu for gpu in state.gpus if gpu.uuid in own))
            for state in (heard[name].idle, heard[name].busy)
        )
        found += machine.troubles(name, idle, busy=False)
        found += machine.troubles(name, busy[name], busy=True)
    found += machine.between({name: state for name, state in busy.items() if state.complete})
    return list(dict.fromkeys(found))


def _said(name: str, names: Sequence[str], heard: _Heard, gpu_names: Mapping[str, str]) -> Said:
    return measures.read(name, names, heard.text.decode(errors="replace"), gpu_names)


def _lost(said: Said, heard: _Heard) -> str:
    """Why a node did not come to the end; "" where it did."""
    if said.phase == "end":
        return ""
    where = {"": "before it began", "local": "while its own parts were measured"}.get(
        said.phase, f"in the phase {said.phase}"
    )
    if heard.problem or not heard.ended:
        return f"{where}: {heard.problem or 'it did not end in time'}"
    lines = [line for line in heard.text.decode(errors="replace").splitlines() if line and measures.MARK not in line]
    words = lines[-1] if lines else "it printed nothing"
    return f"{where}, with exit code {heard.code}: {words[:200]}"


def failures(error: LauncherError) -> str:
    """In one line."""
    every = error.errors if isinstance(error, NodesFailed) else [error]
    return "; ".join(f"{each.where}: {each.what}" for each in every)
