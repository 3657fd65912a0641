"""Plays a history: a plan, made from a seed, of what two callers do and what befalls them; and looks at what was true.

Plain processes in a folder of their own: a home, and two projects, the second of which has a small disk if root plays.
On the test bed: bed.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.cli import Cli
from tests.histories import history as h
from tests.histories.checker import COMMAND_CODE, SECRET
from tests.hook import GARBAGE, hook
from tests.ports import free_port

FOLDERS = ("one", "two")
PROGRAM = Path(__file__).with_name("program.py")
GROUP = "GROUP"  # in a command line: the ID of the job's sweep, once there is one
PATIENCE = 6.0  # seconds to wait for the moment of a hit, and for a command before the next step
ENDS = 300.0  # seconds in which a command that nothing keeps must end


@dataclass(frozen=True)
class Program:
    """What a run's programs do. codes: by node. term: how SIGTERM is taken: saves (0), exits (143), ignores."""

    lines: int = 10
    pause: float = 0.05
    wide: int = 20  # bytes of a line
    codes: dict[str, int] = field(default_factory=dict)
    hangs: bool = False
    forks: bool = False
    files: bool = True
    term: str = "saves"
    saving: float = 0.0
    meets: bool = False  # of two nodes, each notices the other one's end


@dataclass(frozen=True)
class Step:
    """A command of a caller or, with `fault`, what befalls a node of a job's run or a folder's disk.

    job: that is started, or struck. hit: the signal that the command gets, at a moment: at once, after so many seconds,
    at its first word, once a container has started, or once its program has begun; a fault after so many seconds
    of the last command, unless that has ended, or once the program has begun. waits: the next step begins when the
    command has ended.
    """

    folder: str = "one"
    argv: tuple[str, ...] = ()
    job: str = ""
    nodes: tuple[str, ...] = ()  # of the job, as programs know them
    sweep: bool = False
    again: str = ""  # see history.Asked
    program: Program | None = None
    port: int = 0  # which of the history's ports
    hit: str = ""
    moment: str = ""
    waits: bool = True
    fault: str = ""
    node: str = ""
    lasting: float = 0.0  # seconds, of a machine's fault


# --- the plan


@dataclass(frozen=True)
class Place:
    """What there is to play with. faults: of a run's node. machine: those of a machine, which last."""

    faults: tuple[str, ...]
    machine: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("local",)

    def names(self, count: int, dice: random.Random) -> tuple[str, ...]:
        """Of so many nodes; `local` alone has no number."""
        if self.hosts == ("local",):
            return tuple(f"local-{rank}" for rank in range(count)) if count > 1 else self.hosts
        return self.hosts if count > 1 else (dice.choice(self.hosts),)


PLAIN = Place(("kill", "kill supervisor", "suspend", "remove", "full"))
BED = Place(
    ("kill", "kill container", "suspend", "remove", "full"),
    ("engine", "pause", "connections", "cut"),
    ("node1", "node2"),
)


def plan(seed: str, steps: int = 16, place: Place = PLAIN) -> list[Step]:
    """The same for the same seed."""
    dice, made = random.Random(seed), list[Step]()
    while len(made) < steps:
        made += scene(dice, made, place)
    return made


def scene(dice: random.Random, made: Sequence[Step], place: Place) -> list[Step]:
    """What comes next, after what was made."""
    ups = [step for step in made if step.program]
    kind = dice.choices(["up", "command", "fault"], [4 if len(ups) < 6 else 1, 7 if ups else 0, 2 if ups else 0])[0]
    return {"up": up, "command": command, "fault": _fault}[kind](dice, ups, place)


def up(dice: random.Random, ups: Sequence[Step], place: Place) -> list[Step]:
    job = f"j{len(ups):02}"
    nodes, sweep = dice.choice([1, 1, 2, 2, 2]), dice.random() < 0.2
    again = dice.choice(["", "", "", "restarts", "min_nodes"])
    if again == "min_nodes":
        nodes, sweep = (2 if place.machine else 3), False
    names = place.names(1 if sweep else nodes, dice)
    failing = [name for name in names if dice.random() < 0.25]
    program = Program(
        lines=dice.choice([1, 5, 20, 40, 200]),
        pause=dice.choice([0.0, 0.02, 0.1, 0.1]),
        wide=dice.choice([0, 20, 2000]),
        codes={name: dice.choice([1, 3, 77]) for name in failing},
        hangs=dice.random() < 0.3,
        forks=dice.random() < 0.15,
        files=dice.random() < 0.8,
        term=dice.choices(["saves", "exits", "ignores"], [5, 5, 1])[0],
        saving=dice.choice([0.0, 0.0, 1.0]),
        meets=len(names) == 2 and not again and dice.random() < 0.4,
    )
    argv = ["up", f"{job}.yaml", *(["-d"] if not sweep and dice.random() < 0.5 else [])]
    folder = dice.choice(FOLDERS)
    earlier = [step.job for step in ups if not step.sweep and step.folder == folder]
    if earlier and not sweep and dice.random() < 0.3:
        argv += ["--resume", dice.choice(earlier)]
    step = Step(folder, tuple(argv), job, names, sweep, again, program, dice.randrange(2))
    step = _hit(dice, replace(step, waits="-d" in argv or dice.random() < 0.3), 0.5)
    resumed = replace(step, argv=("up", f"{job}.yaml", "--resume", GROUP), program=None, waits=dice.random() < 0.5)
    if not step.hit and dice.random() < 0.4:  # the fault comes as soon as its program has begun
        return [replace(step, waits=False), replace(strike(dice, step, place), moment="began")]
    return [step, *([_hit(dice, replace(resumed, hit=""), 0.5)] if sweep and step.hit else [])]


def command(dice: random.Random, ups: Sequence[Step], place: Place) -> list[Step]:
    """Sometimes two at once, of two callers."""
    name = dice.choice(["logs", "logs", "status", "status", "runs", "fetch", "exec", "down", "down", "clean"])
    about = dice.choice(list(ups)[-3:])
    folder = about.folder if dice.random() < 0.8 else dice.choice(FOLDERS)
    target = [about.job] if name not in ("runs", "clean") and dice.random() < 0.7 else []
    options = {
        "logs": dice.choice([[], ["--no-follow"], ["--all"]]),
        "status": ["--json"],
        "runs": ["--json"],
        "fetch": dice.choice([[], ["--checkpoints"]]),
        "down": dice.choice([[], [], ["--purge"]]),
        "clean": ["--yes"],
    }.get(name, [])
    if name == "down" and dice.random() < 0.3:
        target, options = [], [*options, "--all"]
    if folder != about.folder and name != "runs":
        options = [*options, "--nodes", ",".join(place.hosts)]
    tail = ["--", "sh", "-c", f"exit {COMMAND_CODE}"] if name == "exec" else []
    step = Step(folder, (name, *target, *options, *tail), waits=name != "logs" and dice.random() < 0.8)
    step = _hit(dice, step, 0.5)
    return [replace(step, waits=False), replace(step, hit="")] if dice.random() < 0.15 else [step]


def _hit(dice: random.Random, step: Step, chance: float) -> Step:
    if dice.random() >= chance:
        return step
    moments = ["at once", f"{dice.uniform(0.05, 0.6):.2f}", f"{dice.uniform(0.2, 3):.2f}", "word"]
    return replace(step, hit=dice.choice(h.HITS), moment=dice.choice([*moments, *(["began"] if step.program else [])]))


def strike(dice: random.Random, about: Step, place: Place, how: str = "") -> Step:
    """What befalls a job. how: by default any."""
    names = about.nodes
    if about.sweep:
        names = place.hosts if place.machine else ("local-0", "local-1")  # any of the pool
    chosen, node = dice.choice([*place.faults, *place.machine]), dice.choice(names)
    how = how or chosen
    lasting = round(dice.uniform(0.5, 5.0), 1) if how in place.machine else 0.0
    return Step("two" if how == "full" else about.folder, job=about.job, fault=how, node=node, lasting=lasting)


def _fault(dice: random.Random, ups: Sequence[Step], place: Place) -> list[Step]:
    """While some commands are under way, or before them."""
    about = dice.choice(list(ups)[-2:])
    step, several = strike(dice, about, place), [command(dice, ups, place)[0] for _ in range(3)]
    commands = [replace(each, waits=False) for each in several]
    if dice.random() < 0.5:
        return [replace(step, moment="began"), *commands]
    during = [replace(each, hit="") for each in commands]
    return [*during, replace(step, moment=f"{dice.uniform(0.05, 0.5):.2f}"), *commands[:1]]


def dump(steps: Sequence[Step]) -> str:
    return "".join(json.dumps({"step": asdict(step)}) + "\n" for step in steps)


def load(lines: Sequence[str]) -> list[Step]:
    found = [json.loads(line)["step"] for line in lines if line.startswith('{"step"')]
    programs = [Program(**each["program"]) if each["program"] else None for each in found]
    return [
        Step(**{**each, "argv": tuple(each["argv"]), "nodes": tuple(each["nodes"]), "program": program})
        for each, program in zip(found, programs, strict=True)
    ]


# --- playing it


@dataclass
class Call:
    """A command that was started, and what it has printed so far."""

    asked: h.Asked
    process: Any
    text: dict[str, list[str]] = field(default_factory=lambda: {"out": [], "err": []})
    readers: list[threading.Thread] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def spoke(self) -> bool:
        return any(self.text.values())

    def signal(self, number: int) -> None:
        """Not by its process object, for which another thread waits."""
        with contextlib.suppress(ProcessLookupError):
            if not self.over.is_set():
                os.kill(self.process.pid, number)


class World:
    """Of plain processes. mark: the variable TRUTH of its runs, by which their processes are known."""

    everywhere: tuple[str, ...] = ()  # options by which `down` finds what this world has anywhere

    def __init__(self, root: Path, webhook: str) -> None:
        self.root, self.home, self.truth, self.mark = root, root / "home", root / "truth", str(root / "truth")
        self.home.mkdir()
        settings = root / "config" / "launcher" / "settings.yaml"
        settings.parent.mkdir(parents=True)
        settings.write_text(f"notify: {{webhook: '{webhook}/'}}\n")
        settings.chmod(0o600)
        folders = {"HOME": "home", "XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config"}
        env = {name: str(root / folder) for name, folder in folders.items()}
        env |= {"TRUTH": str(self.truth), "TOKEN": SECRET, "COLUMNS": "200"}
        env |= {"DOCKER_HOST": f"unix://{root}/none"}  # whatever this machine's engine has is not of this world
        env |= self.variables()
        self.cli = {name: Cli(root / name, env) for name in FOLDERS}
        for name in FOLDERS:
            (root / name).mkdir(exist_ok=True)
            shutil.copy(PROGRAM, root / name)
        first = free_port()
        self.ports = (first, first + 1)
        self.records: list[h.Record] = []
        self.calls: list[Call] = []
        self.lock = threading.Lock()

    def variables(self) -> dict[str, str]:
        """Further ones, of the commands."""
        return {}

    def note(self, record: h.Record) -> None:
        with self.lock:
            self.records.append(record)

    # --- commands

    def start(self, step: Step) -> Call:
        argv = tuple(self.group(step) if word == GROUP else word for word in step.argv)
        about = (step.job, len(step.nodes), step.sweep, step.again)
        asked = h.Asked(time.monotonic(), len(self.calls), step.folder, argv, *about)
        self.note(asked)
        call = Call(asked, self.cli[step.folder].start(*argv))
        self.calls.append(call)
        for name, stream in (("out", call.process.stdout), ("err", call.process.stderr)):
            call.readers.append(threading.Thread(target=_read, args=(stream, call.text[name]), daemon=True))
        for thread in (*call.readers, threading.Thread(target=self._await, args=(call,), daemon=True)):
            thread.start()
        return call

    def _await(self, call: Call) -> None:
        code = call.process.wait()
        for reader in call.readers:
            reader.join()
        out, err = ("".join(call.text[name]) for name in ("out", "err"))
        self.note(h.Exited(time.monotonic(), call.asked.call, code, out, err))
        call.over.set()

    def group(self, step: Step) -> str:
        """The ID of a job's sweep, which its first run has recorded."""
        for events in (self.root / step.folder / "runs").glob(f"{step.job}-*/events.jsonl"):
            for line in filter(None, (_text(events) or "").splitlines()):
                if found := json.loads(line).get("group"):
                    return str(found)
        return step.job

    def write_job(self, step: Step) -> None:
        program = step.program
        assert program
        run = {"command": ["python3", PROGRAM.name, json.dumps(asdict(program))]}
        keys: dict[str, Any] = {"name": step.job, "gpus": "none", "run": run, "secrets": ["TOKEN"]}
        keys |= {"port": self.ports[step.port], "env": {"TRUTH": self.mark}}
        keys |= {"restarts": 2} if step.again else {}
        keys |= {"min_nodes": 2} if step.again == "min_nodes" else {}
        keys |= {"sweep": [["a"], ["b"], ["c"]]} if step.sweep else {}
        keys |= self.where(step)
        (self.root / step.folder / f"{step.job}.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))

    def where(self, step: Step) -> dict[str, Any]:
        """The keys of a job that say where it runs."""
        nodes: Any = {"pool": ["local", "local"]} if step.sweep else ["local"] * len(step.nodes)
        return {"runtime": "process", "nodes": nodes}

    def hit(self, call: Call, step: Step) -> None:
        """At the moment that the step says; not at all if the command has ended by then."""
        if step.moment == "word":
            _until(lambda: call.spoke or call.over.is_set())
        elif step.moment == "began":
            _until(lambda: call.over.is_set() or any(each.run.startswith(step.job) for each in self.programs(h.Began)))
        elif step.moment == "started":
            _until(lambda: call.over.is_set() or any(h.job_of(run) == step.job for run in self.started()))
        elif step.moment != "at once":
            call.over.wait(float(step.moment))
        self.send(call, step.hit, at_once=step.moment == "at once")

    def send(self, call: Call, how: str, *, at_once: bool = False) -> None:
        now = time.monotonic()
        moment = h.AT_ONCE if at_once else h.SPOKE if call.spoke else h.SILENT
        if call.over.is_set():
            return
        self.note(h.Hit(now, call.asked.call, how, moment))
        call.signal({"kill": signal.SIGKILL, "suspend": signal.SIGSTOP}.get(how, signal.SIGINT))
        if how == "interrupt twice":
            _until(lambda: call.over.is_set() or "Ctrl-C again" in "".join(call.text["err"]))
            call.signal(signal.SIGINT)

    # --- faults

    def strike(self, step: Step) -> None:
        if step.moment == "began":
            _until(lambda: any(_fits(each, step) for each in self.programs(h.Began)))
        elif step.moment:
            self.calls[-1].over.wait(float(step.moment))
        if step.fault == "full":
            self.fill(step)
            return
        if step.lasting:
            self.strike_machine(step)
            return
        began = [each for each in self.programs(h.Began) if _fits(each, step)]
        ended = {each.pid for each in self.programs(h.Ended)}
        for each in began[-1:]:
            if each.pid in ended or not self.is_there(each):
                return
            self.note(h.Fault(time.monotonic(), step.fault, each.run, each.node))
            with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended meanwhile
                self.befall(step.fault, each)

    def strike_machine(self, step: Step) -> None:
        raise NotImplementedError("this machine is not struck")

    def _folder(self, began: h.Began) -> Path:
        return self.home / ".launcher" / began.run / ".node" / began.node

    def is_there(self, began: h.Began) -> bool:
        """Whether the node of a program still is."""
        return self._folder(began).exists()

    def befall(self, fault: str, began: h.Began) -> None:
        folder = self._folder(began)
        if fault == "remove":
            shutil.rmtree(folder)
        elif fault == "kill supervisor":
            os.kill(json.loads((folder / "state.json").read_text())["supervisor"], signal.SIGKILL)
        else:
            self.signal(began, signal.SIGSTOP if fault == "suspend" else signal.SIGKILL)

    def signal(self, began: h.Began, number: int) -> None:
        os.kill(began.pid, number)

    def fill(self, step: Step) -> None:
        """Fill the disk of a folder, or free it."""
        ballast = self.root / step.folder / "ballast"
        if not os.path.ismount(self.root / step.folder):
            return
        self.note(h.Fault(time.monotonic(), "freed" if ballast.exists() else "full", step.folder))
        if ballast.exists():
            ballast.unlink()
            return
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(b"x" * 4096)

    def go_on(self) -> None:
        """What was suspended goes on, and the disk has room."""
        for call in self.calls:
            call.signal(signal.SIGCONT)
        for fault in [each for each in self.records if isinstance(each, h.Fault) and each.how == "suspend"]:
            for each in self.programs(h.Began):
                if (each.run, each.node) == (fault.where, fault.node):
                    with contextlib.suppress(ProcessLookupError):
                        self.signal(each, signal.SIGCONT)
        (self.root / "two" / "ballast").unlink(missing_ok=True)

    def end(self) -> None:
        """Leave no process behind, whatever has happened."""
        for call in self.calls:
            call.signal(signal.SIGKILL)
        for *_, pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- what is true

    def programs(self, kind: type[h.R]) -> list[h.R]:
        """What programs have written down."""
        texts = [log.read_text() for log in self.logs() if log.exists()]
        lines = [line for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]  # one is just written
        return [each for each in h.load(lines) if isinstance(each, kind)]

    def logs(self) -> list[Path]:
        """What programs write down."""
        return [self.truth]

    def homes(self) -> list[Path]:
        """The folders that have the runs' output folders."""
        return [self.home / ".launcher"]

    def containers(self) -> list[tuple[str, str]]:
        """What each node has of a run: the run and the node."""
        found = (self.home / ".launcher").glob("*/.node/*/spec.json")
        return [(path.parts[-4], path.parts[-2]) for path in found]

    def started(self) -> Iterator[str]:
        """The runs of which a node's container has started."""
        return (path.parts[-4] for path in (self.home / ".launcher").glob("*/.node/*/state.json"))

    def look(self) -> h.Seen:
        at = time.monotonic()
        running = tuple((run, node, ident) for run, node, ident, _ in self.processes())
        outputs = {path.name for home in self.homes() for path in home.glob("j[0-9]*")}
        seen = h.Seen(at, running, tuple(self.containers()), tuple(sorted(outputs)))
        self.note(seen)
        return seen

    def processes(self) -> Iterator[tuple[str, str, int, int]]:
        """This world's: the run, the node, the ID that a program gives itself, the PID."""
        for pid, env in _processes(self.mark):
            if "LAUNCHER_CONTAINER" in env:
                run = env["LAUNCHER_CONTAINER"].removeprefix("launcher-").rpartition("-")[0]
                yield run, env.get("LAUNCHER_NODE", ""), pid, pid

    def find(self) -> Iterator[h.Found]:
        """What is there at the end."""
        kept = self.programs(h.Kept)
        projects = [(name, self.root / name / "runs") for name in FOLDERS]
        for folder, top in [*projects, *(("", home) for home in self.homes())]:
            for root in sorted(top.glob("j[0-9]*")):
                paths = [each.path for each in kept if each.run == root.name]
                files = {path: text for path in paths if (text := _text(root / path)) is not None}
                found = h.Found(time.monotonic(), folder, root.name, files=files)
                if folder:
                    result = json.loads(_text(root / "result.json") or "{}")
                    logs = {path.stem: _text(path) or "" for path in root.glob("logs/[ln]o*.log")}
                    shows = [str(each.relative_to(root)) for each in root.rglob("*") if SECRET in (_text(each) or "")]
                    failure = result.get("failure") or {}
                    found = replace(found, state=result.get("state", ""), failed=failure.get("node", ""), logs=logs)
                    found = replace(found, secret=tuple(shows))
                yield found


def play(steps: Sequence[Step], root: Path, make: Callable[[Path, str], World] = World) -> h.History:
    """Play a plan in a new folder."""
    with _small_disk(root / "two"), hook(GARBAGE) as webhook:
        world = make(root, webhook.address)
        try:
            for step in (each for each in steps if each.program):
                world.write_job(step)
            for step in steps:
                world.look()
                if step.fault:
                    world.strike(step)
                    continue
                call = world.start(step)
                if step.hit:
                    world.hit(call, step)
                if step.waits and step.hit != "suspend":
                    call.over.wait(PATIENCE)
            _settle(world)
        finally:
            world.end()
    return h.History(tuple(sorted([*world.records, *world.programs(h.Record)], key=lambda each: each.at)))


def _settle(world: World) -> None:
    """Let everything end that ends by itself, stop the rest, and look at what is there."""
    world.go_on()
    for call in world.calls:
        call.over.wait(2.0 if call.asked.follows else ENDS)
        if call.asked.sweep and not call.over.is_set():
            world.send(call, "kill")  # it would start one variant after another
    for _ in range(2):  # the first one ends what still follows a run; the second one is alone
        for folder in FOLDERS:
            world.start(Step(folder, ("down", "--all", "--all-projects", *world.everywhere))).over.wait(ENDS)
            world.look()
        for call in world.calls:
            call.over.wait(ENDS)
    if any(isinstance(each, h.Fault) and each.how == "full" for each in world.records):
        for run in sorted((world.root / "two" / "runs").glob("*-*")):  # what found no room
            world.start(Step("two", ("fetch", run.name))).over.wait(ENDS)
    _until(lambda: not world.look().running)
    for found in world.find():
        world.note(found)


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Only root mounts one; without, this fault is left out."""
    folder.mkdir()
    mounted = os.geteuid() == 0
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "launcher-test", folder], check=True)
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def _processes(mark: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The processes of a world's runs: PID and environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                continue
            words = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            env = dict(word.split("=", 1) for word in words if "=" in word)
            if env.get("TRUTH") == mark:
                yield int(process.name), env


def _fits(began: h.Began, step: Step) -> bool:
    return h.job_of(began.run) == step.job and began.node == step.node


def _read(stream: Any, into: list[str]) -> None:
    into.extend(iter(stream.readline, ""))


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return None


def _until(true: Callable[[], object]) -> None:
    limit = time.monotonic() + PATIENCE
    while not true() and time.monotonic() < limit:
        time.sleep(0.02)
