"""`launcher doctor --bench`: measure all components of all nodes concurrently, in the job's image, and evaluate them.

Each node runs a short container, which locks its GPUs as a run does and is removed afterwards. If a node is lost during
the measurement, it is reported, its results so far are used, and the other nodes are evaluated.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from launcher.errors import ImageUnfit, LauncherError, NodeUnfit
from launcher.features.bench.forecast import Forecast, TrainingStep, forecasts, work_of
from launcher.features.bench.health import machine, measures, verdict
from launcher.features.bench.health.machine import HealthProblem, MachineState
from launcher.features.bench.health.measures import Measure, NodeReport
from launcher.features.bench.health.rounds import Timetable, minutes_needed, rounds, timetable
from launcher.features.bench.health.verdict import Finding, Network
from launcher.job.arguments import argv_of
from launcher.job.models import Job
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.facts import NodeFacts
from launcher.model.plan import NodePlan, Plan
from launcher.model.progress import Log
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import Future, in_background, run_all_catching
from launcher.planning import gpus
from launcher.planning.command import workers
from launcher.records.paths import NodePaths
from launcher.records.snapshot import Snapshot, snapshot
from launcher.records.store import NodeOfRun
from launcher.records.trainer import TRAINER, installed
from launcher.run.begin.claims import with_claims
from launcher.run.begin.prepare import inspect_image
from launcher.run.shell import temporary_run
from launcher.run.watch.reader import (
    Appended,
    ContainerRemoved,
    EngineLogged,
    Event,
    NodeReader,
    StateSeen,
    WaitFailed,
    Wanted,
)

_SCRIPTS = Path(__file__).with_name("container_scripts")
_PROGRAMS = ("bench_node.py", "bench_links.py", "bench_parts.py", "bench_model.py")
_POLL = 2.0  # seconds between two polls of a node
_MORE = 5.0  # seconds by which the given time may be exceeded without a note
_LATE = 20.0  # seconds behind its timetable after which a node counts as lost
_SILENT = 10.0  # seconds without an answer from any unfinished node after which waiting stops
_QUERY_TIMEOUT = 40.0  # seconds for the query of a machine's state; nvidia-smi gets 20 of them
_STARTED = b'{"kind": "begun"'
_LONGEST = 8 << 20  # maximum bytes read from a node's log


@dataclass(frozen=True)
class BenchResult:
    """Result of a benchmark. skipped: nodes that were not measured, and why; notes: limitations of the measurement.

    work: a step of the job, if it is known; forecast: how fast it is with more nodes.
    """

    nodes: tuple[str, ...] = ()
    seconds: float = 0.0
    measures: tuple[Measure, ...] = ()
    findings: tuple[Finding, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    work: TrainingStep | None = None
    forecast: tuple[Forecast, ...] = ()

    @property
    def faulty(self) -> bool:
        """Whether a part is to blame."""
        return any(not each.undecided for each in self.findings)


@dataclass
class _Observed:
    """Data collected from one node so far."""

    idle: MachineState  # before it started
    busy: MachineState = field(default_factory=MachineState)  # during its local measurements
    text: bytes = b""
    logged: bytes = b""  # the engine's log, if the entry script has written none
    state: ContainerState | None = None  # the last one seen
    ended: bool = False  # and all of its text was read
    problem: str = ""  # why the last poll failed
    silent_since: float = math.inf  # of time.monotonic()

    def take(self, event: Event) -> None:
        match event:
            case Appended(data=data):
                self.text += data
            case EngineLogged(data=data):
                self.logged = data
            case StateSeen(state=state):
                self.state, self.problem, self.silent_since = state, "", math.inf
            case WaitFailed(error=error):
                self.fail(error.what)
            case ContainerRemoved():
                self.fail("its container was removed")

    def fail(self, problem: str) -> None:
        self.problem, self.silent_since = problem, min(self.silent_since, time.monotonic())


@dataclass(frozen=True)
class _Selected:
    """The nodes that are measured, by rank, each with the GPUs that the job would get; and why others are not."""

    nodes: Mapping[str, tuple[NodeFacts, tuple[str, ...]]]
    skipped: Mapping[str, str]

    @property
    def gpus(self) -> bool:
        return any(chosen for _, chosen in self.nodes.values())


@dataclass(frozen=True)
class _Measured:
    """What the nodes printed, and what their names mean. notes: limitations of the measurement."""

    observed: Mapping[str, _Observed]  # by node, by rank
    interfaces: Mapping[str, str]  # of the plan, by node
    gpu_names: Mapping[str, Mapping[str, str]]  # those in the container to those of nvidia-smi, by node
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """What the user says of a step on one node: the bytes of its gradients, its seconds."""

    gradients: float | None = None
    step: float | None = None


def bench(
    job: Job, fleet: Fleet, seconds: float, unfit: Mapping[str, str], log: Log, given: Given = Given()
) -> BenchResult:
    """Measure for `seconds`. unfit: nodes to skip, and why. Raises NodesFailed, ImageUnfit and other LauncherErrors."""
    started = time.monotonic()
    selected = _select(job, fleet, unfit)
    if not selected.nodes:
        return BenchResult(skipped=selected.skipped)
    trained = job.run.module == TRAINER and len(selected.nodes) > 1 and None in (given.gradients, given.step)
    model = argv_of(job.run.args) if trained else None
    measured = _measure(job, fleet.only(list(selected.nodes)), selected, seconds, model, log)
    found = _judge(selected, measured)
    most = max(workers(job, len(chosen)) for _, chosen in selected.nodes.values())
    work = work_of(found.measures, given.gradients, given.step, most)
    if work is not None and (name := _compression(job)) in [each.name for each in work.compressed]:
        work = replace(work, compression=name)
    expected = forecasts(found.nodes, found.measures, work) if work else ()
    return replace(found, seconds=time.monotonic() - started, work=work, forecast=expected)


def _select(job: Job, fleet: Fleet, unfit: Mapping[str, str]) -> _Selected:
    """Return the idle nodes; if any of them has GPUs, those with GPUs."""
    skipped = {entry.name: unfit[entry.name] for entry in job.machines if entry.name in unfit}
    engines = [engine for engine in fleet.engines if engine.node not in skipped]
    answers = run_all_catching([partial(_idle, job, engine) for engine in engines])
    usable = dict[str, tuple[NodeFacts, tuple[str, ...]]]()
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, LauncherError):
            skipped[engine.node] = answer.what
        else:
            usable[engine.node] = answer
    if any(chosen for _, chosen in usable.values()):
        skipped |= {name: "has no GPU, unlike other nodes" for name, (_, chosen) in usable.items() if not chosen}
    return _Selected({name: each for name, each in usable.items() if name not in skipped}, skipped)


def _measure(
    job: Job, fleet: Fleet, selected: _Selected, seconds: float, model: Sequence[str] | None, log: Log
) -> _Measured:
    """Run the programs on the selected nodes, which are the fleet's, and collect what they print.

    model: the options of the trainer, whose model is measured too.
    """
    facts = [node for node, _ in selected.nodes.values()]
    entries = tuple(entry for entry in job.machines if entry.name in selected.nodes)
    job = job.model_copy(update={"nodes": entries, "spares": None})
    image = inspect_image(job, fleet, facts)[0]
    if not image.python:
        raise ImageUnfit(f"image {image.reference}", "has no Python, which --bench needs", "use an image with torch")
    paths = [each.target for each in job.mounts] + [each.at for each in job.data] if job.traits.isolates else []
    turns = rounds(len(facts))
    parts = {"gpus": selected.gpus, "reads": bool(paths), "model": model is not None}
    times = timetable(seconds, len(turns), **parts)
    notes = _notes(len(facts), len(turns), seconds, times, minutes_needed(len(turns), **parts))
    spec = {"rounds": turns, "times": asdict(times), "paths": paths, "gpus": selected.gpus, "model": model}
    spec["precision"] = _precision(job)
    program = (image.python, _PROGRAMS[0], json.dumps(spec, separators=(",", ":")))
    limit = math.ceil(times.total(len(turns)) + _LATE)
    alone = {"timeout": limit, "secrets": (), "processes": 1}
    code = _code(trainer=model is not None)
    log(f"measuring {len(facts)} nodes, {times.total(len(turns)) / 60:.1f} minutes at most")
    observed = dict(zip(selected.nodes, map(_Observed, fleet.each(_machine_state)), strict=True))
    interfaces, gpu_names = dict[str, str](), dict[str, Mapping[str, str]]()
    try:
        with temporary_run("bench", job.model_copy(update=alone), program, fleet, facts, code, {}, log) as plan:
            interfaces = dict(zip(selected.nodes, plan.rendezvous.interfaces, strict=True))
            gpu_names = {each.node: _gpu_names(each, facts[each.rank]) for each in plan.nodes}
            _follow(fleet, plan, observed, limit)
    except LauncherError as error:
        if not any(each.text for each in observed.values()):
            raise
        notes.append(f"cleanup is incomplete: {error}")  # the containers of a lost node exit on their own
    return _Measured(observed, interfaces, gpu_names, tuple(notes))


def _judge(selected: _Selected, measured: _Measured) -> BenchResult:
    """Evaluate what was collected. Pure."""
    observed, names = measured.observed, list(measured.observed)
    results = [_result(name, names, each, measured.gpu_names.get(name, {})) for name, each in observed.items()]
    lost = {each.node: why for each in results if (why := _lost(each, observed[each.node]))}
    ready = {node for each in results for node in each.together}
    notes = [
        *measured.notes,
        *(f"{each.node}: {note}" for each in results for note in each.notes),
        *(
            f"{name} was not ready in time and was measured without the others"
            for name in names
            if name not in ready | set(lost)
        ),
    ]
    negotiated = {name: each.busy.link.speed / 1000 for name, each in observed.items() if each.busy.link.speed}
    problems = _problems(observed, selected.nodes)
    found = verdict.judge(results, problems, Network(measured.interfaces, negotiated), lost)
    every = tuple(measure for each in results for measure in each.measures)
    return BenchResult(tuple(names), 0.0, every, tuple(found), selected.skipped, lost, tuple(notes))


def _idle(job: Job, engine: Engine) -> tuple[NodeFacts, tuple[str, ...]]:
    """Return the node's facts and GPUs. Raises NodeUnfit if they are used by another run or process; InUse; ..."""
    node = with_claims(engine, port=True)
    entry = next(each for each in job.machines if each.name == engine.node)
    chosen = gpus.select(node, job.gpus_of(entry))
    if busy := gpus.in_use(node, [device for device in gpus.devices(node) if device.uuid in chosen]):
        raise NodeUnfit(node.name, f"in use: {'; '.join(busy)}")
    for state in engine.list({labels.RUN: None}):
        purpose = state.labels.get(labels.PURPOSE) if state.phase is Phase.RUNNING else ""
        if purpose == "bench":  # also on other GPUs: it uses the links and the disks
            whose = state.labels.get(labels.OWNER, "another user")
            raise NodeUnfit(node.name, f"in use: `doctor --bench` of {whose} is measuring it")
        if purpose == "run" and not chosen:
            raise NodeUnfit(node.name, f"in use: run {state.labels[labels.RUN]} is running there")
    return node, chosen


def _code(*, trainer: bool) -> Snapshot:
    """Pack the programs, as a run's code, with the trainer if its model is measured."""
    with tempfile.TemporaryDirectory() as folder:
        for name in _PROGRAMS:
            Path(folder, name).write_bytes((_SCRIPTS / name).read_bytes())
        if trainer and (installed() / "__main__.py").is_file():
            shutil.copytree(installed(), Path(folder, TRAINER), ignore=shutil.ignore_patterns("__pycache__"))
        return snapshot(Path(folder))


def _notes(nodes: int, turns: int, seconds: float, times: Timetable, least: float) -> list[str]:
    found = []
    if turns < nodes - 1:
        found.append(f"a sample of the pairs: each node was measured with {turns} of the {nodes - 1} others")
    if times.total(turns) > seconds + _MORE:
        found.append(
            f"each measurement had its minimum duration; {nodes} nodes need --minutes {least:g} for longer ones"
        )
    return found


def _precision(job: Job) -> str:
    """Return the precision of the trainer's --amp; bf16 for other programs, whose precision is unknown."""
    args = job.run.args
    wanted = args.get("amp", "bf16") if isinstance(args, Mapping) else "bf16"
    return wanted if wanted in ("bf16", "fp16", "none") else "bf16"


def _compression(job: Job) -> str:
    """Return the trainer's --gradient-compression; "" if it is not given."""
    argv = argv_of(job.run.args)
    named = [value for option, value in pairwise(argv) if option == "--gradient-compression"]
    return named[-1] if named else ""


def _gpu_names(planned: NodePlan, node: NodeFacts) -> dict[str, str]:
    """Map the container's GPUs, by torch's name in the container and by UUID, to their names in nvidia-smi."""
    chosen = [device for device in gpus.devices(node) if device.uuid in planned.container.gpus]
    by_index = {f"GPU {index}": device.name for index, device in enumerate(chosen)}
    return by_index | {device.uuid.lower().removeprefix("gpu-"): device.name for device in chosen}


def _follow(fleet: Fleet, plan: Plan, observed: Mapping[str, _Observed], limit: float) -> None:
    """Collect data until every node has finished or is lost, for at most `limit` seconds."""
    over = threading.Event()
    until = time.monotonic() + limit
    threads: list[Future[None]] = [
        in_background(partial(_watch, engine, plan, observed[engine.node], over)) for engine in fleet.engines
    ]
    try:
        while time.monotonic() < until:
            for thread in threads:
                if thread.wait(0):
                    thread()  # raises its error
            if all(time.monotonic() - each.silent_since > _SILENT for each in observed.values() if not each.ended):
                break
            time.sleep(0.5)
    finally:
        over.set()


def _watch(engine: Engine, plan: Plan, observed: _Observed, over: threading.Event) -> None:
    planned = plan.node_plan(engine.node)
    output = planned.container.output_dir
    log = NodePaths(output, planned.node).log
    node = NodeOfRun(planned.node, engine.host, planned.rank, planned.container.name, output, range(0))

    def wanted() -> Wanted:
        return Wanted({log: 0}, log) if len(observed.text) < _LONGEST else Wanted()

    reader = NodeReader(node, engine, wanted, observed.take)
    while not over.is_set() and not observed.ended:
        reader.wait(_POLL)
        try:
            if not observed.problem:
                reader.read_rest(engine.files, output)
                if not observed.busy.complete and _STARTED in observed.text:
                    observed.busy = _machine_state(engine, plan.rendezvous.interfaces[planned.rank])
        except LauncherError as error:
            observed.fail(error.what)
        if observed.problem:
            over.wait(_POLL)
        else:
            observed.ended = observed.state is not None and observed.state.phase.ended


def _machine_state(engine: Engine, interface: str = "") -> MachineState:
    """Query a machine's state. Raises NodeUnreachable, NodeUnfit."""
    printed = engine.machine.script(machine.script(), interface, "", timeout=_QUERY_TIMEOUT).out
    return machine.parse(printed.decode(errors="replace"))


def _problems(
    observed: Mapping[str, _Observed], measured: Mapping[str, tuple[NodeFacts, tuple[str, ...]]]
) -> list[HealthProblem]:
    """Return the problems in the machines' states, each once. measured: facts and measured GPUs by node."""
    found: list[HealthProblem] = []
    busy = dict[str, MachineState]()
    for name, (node, chosen) in measured.items():
        own = {device.gpu.uuid for device in gpus.devices(node) if device.uuid in chosen}
        idle, busy[name] = (
            replace(state, gpus=tuple(gpu for gpu in state.gpus if gpu.uuid in own))
            for state in (observed[name].idle, observed[name].busy)
        )
        found += machine.problems(name, idle, busy=False)
        found += machine.problems(name, busy[name], busy=True)
    found += machine.between({name: state for name, state in busy.items() if state.complete})
    return list(dict.fromkeys(found))


def _result(name: str, names: Sequence[str], observed: _Observed, gpu_names: Mapping[str, str]) -> NodeReport:
    return measures.read(name, names, observed.text.decode(errors="replace"), gpu_names)


def _lost(result: NodeReport, observed: _Observed) -> str:
    """Return why a node did not finish, or "" if it did."""
    if result.phase == "end":
        return ""
    where = {"": "before it started", "local": "during its local measurements"}.get(
        result.phase, f"in the phase {result.phase}"
    )
    if observed.problem or not observed.ended:
        return f"{where}: {observed.problem or 'it did not finish in time'}"
    text = observed.text or observed.logged
    lines = [line for line in text.decode(errors="replace").splitlines() if line and measures.MARK not in line]
    output = lines[-1] if lines else "no output"
    code = observed.state.exit_code if observed.state else None
    return f"{where}, with exit code {code}: {output[:200]}"
