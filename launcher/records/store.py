"""Read and write runs/<run id>/: plan, events, result; find a run by a user's argument."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError, RunUnknown
from launcher.faults import disk
from launcher.faults.transport import Wires
from launcher.job.files import known_secrets
from launcher.job.loader import parse_job
from launcher.job.overrides import short_commit
from launcher.local_files import APPEND, locked, open_regular, parse_object, write_atomic
from launcher.model import checked, labels
from launcher.model.host import cluster_name
from launcher.model.plan import CODE, Membership, Plan, Revision, RunId, is_run_id, plain
from launcher.model.runtime import TRAITS, Traits
from launcher.naming import first_of
from launcher.records.left_out import LeftOut
from launcher.records.masking import Masker, hide
from launcher.records.paths import RUNS, RunPaths, as_shown, not_a_folder, require_folder
from launcher.records.workdir import SentCode, sent_files

_NAMED = 5  # in a message
_LARGEST = 1 << 20  # bytes of job.yaml; more than the loader accepts
REVISION = "revision"  # event: with the fields of Revision
GROUPED = "group"  # event: with the fields of Membership
FETCHED = "fetched"  # event: `fetch` copied files to another folder
STOPPING = "stopping"  # event
JUST_NOW = 10.0  # seconds: what was seen of its nodes may be older than its end
STOPPING_AT_MOST = 120.0  # seconds that a stop takes: run.end.stop.GRACE, and files to collect and containers to remove
PURGED = "purged"  # event: the output folder on a host was deleted
BROUGHT = "brought"  # event: `fetch` copied what a program had written elsewhere in a node's container
ABANDONED = "abandoned"  # event: its sweep runs the variant on another machine
_STARTS = ("started", "undone")  # events; with `up --wait`, several
# The values of result.json and of a container in plan.json that are used; anybody may have written these files
_RESULT = {
    "state": str,
    "exit_code": int | None,
    "why": str,
    "failure": {"node": str, "rank": int | None, "exit_code": int | None, "what": str, "cure": str, "words": str},
    "nodes": [
        {"node": str, "rank": int, "exit_code": int | None, "oom_killed": bool | None, "restarts": int | None}
        | {"restarted": [str], "started": int | float | None, "finished": int | float | None}
        | {"victim": bool, "lost": str | None}
    ],
    "last": dict,
    "stopped_by": str | None,
    "gradients": str,
    "apart": str,
    "resume": str | None,
    "ended_by": str | None,
}
_CONTAINER = {
    "image": str,
    "argv": [str],
    "env": {},
    "gpus": [str],
    "mounts": [{}],
    "layout": {"code": str, "output": str},
    "user": str,
    "groups": [int],
}
_LONGEST_LINE = 1 << 20  # of metrics.jsonl and events.jsonl; neither the launcher nor a trainer writes longer ones


@dataclass(frozen=True)
class NodeOfRun:
    """A node of a run and how to reach it, from the run's record or from labels."""

    name: str
    host: str
    rank: int
    container: str  # container name
    output: str  # the run's output folder on the node
    ranks: range  # global ranks of its workers


@dataclass(frozen=True)
class Record:
    """A run's folder on this machine, readable by its owner only, as the output of programs may be confidential.

    secrets: the values of the job's secrets; None: those that this caller has.
    """

    paths: RunPaths
    secrets: Sequence[str] | None = field(default=None, repr=False)

    @property
    def run(self) -> RunId:
        return self.paths.run

    @classmethod
    def of(cls, plan: Plan, secrets: Sequence[str], runs: Path) -> Record:
        """Return the record of a run that is about to start; nothing is written yet."""
        return cls(RunPaths(runs / plan.run), secrets)

    def write(self, plan: Plan, job_yaml: str, code: bytes, group: Membership | None = None) -> None:
        """Create the folder and write job, plan, code and the run's sweep before the run starts."""
        self._make_folders()
        if group is not None:
            self.join(group)
        write_atomic(self.paths.job, job_yaml.encode())
        write_atomic(self.paths.code, code)
        self.write_plan(plan)  # last: a folder without a plan is no run

    def write_plan(self, plan: Plan) -> None:
        write_atomic(self.paths.plan, plan.to_json().encode())

    @classmethod
    def rebuild(
        cls,
        run: RunId,
        runtime: str,
        nodes: Sequence[NodeOfRun],
        runs: Path = RUNS,
        min_nodes: int = 0,
        spares: int = 0,
        hosts: Sequence[str] = (),
        group: Membership | None = None,
    ) -> Record:
        """Create the record of a run found by its labels; an existing readable record is not changed.

        hosts: of all nodes of the run, including those that are not in `nodes`.
        """
        record = cls(RunPaths(runs / run))
        if not record.nodes():
            record._make_folders()
            known = {"run": run, "job": job_of(run), "runtime": runtime, "min_nodes": min_nodes, "spares": spares}
            plan = {**known, "nodes": [*map(_node_to_json, nodes)], "hosts": list(hosts)}
            write_atomic(record.paths.plan, json.dumps(plan, indent=2).encode())
            if group is not None and record.group is None:
                record.join(group)
        return cls(record.paths)

    def write_left_out(self, folder: Path, left_out: LeftOut) -> None:
        """Record what was left out of the code, and why, so that a failure can name it."""
        text = json.dumps({"folder": str(folder), "left_out": left_out.why}, indent=2)
        write_atomic(self.paths.left_out, text.encode())

    def left_out(self) -> tuple[Path, LeftOut]:
        """Return the code's folder on this machine and what was left out of it; nothing if that was not recorded."""
        found = read_json(self.paths.left_out) or {}
        why = found.get("left_out")
        known = {str(name): str(reason) for name, reason in why.items()} if isinstance(why, dict) else {}
        return Path(str(found.get("folder", ""))), LeftOut(known)

    def of_revision(self, revision: Revision) -> None:
        """Record of which commit its code is, and what that changes."""
        self.event(REVISION, **plain(revision))

    @property
    def revision(self) -> Revision | None:
        """The commit of which its code is; None if it is that of a folder."""
        for line in self.events(REVISION):
            commit, *others = (line.get(key) for key in ("commit", "parent", "stat", "asked"))
            return Revision(str(commit), *(str(text or "") for text in others))
        return None

    def _make_folders(self) -> None:
        """Raise UsageError if one of them exists and is not a folder."""
        for folder in (self.paths.root.parent, self.paths.root, self.paths.logs):
            require_folder(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @cached_property
    def mask(self) -> Masker:
        hide(self._known_secrets[0])
        return Masker(self._known_secrets[0])

    @property
    def unmasked(self) -> str:
        """A warning if this caller does not know all secrets of the run, else ""."""
        lacks = self._known_secrets[1]
        return f"not masked, as their values are unknown on this machine: {lacks}" if lacks else ""

    @cached_property
    def _known_secrets(self) -> tuple[Sequence[str], str]:
        """The values of the secrets that this caller has, and the names of the others."""
        if self.secrets is not None:
            return self.secrets, ""
        with suppress(OSError, UnicodeDecodeError, LauncherError):  # an invalid job.yaml is reported when it is needed
            job = parse_job(self.job_text(), str(self.paths.job))
            values, missing = known_secrets(job, self.paths.root.parent.parent, os.environ)  # where `up` was called
            return values, ", ".join(missing)
        return [], "secrets of this run, if any (its job.yaml is missing)"

    @cached_property
    def sent_code(self) -> SentCode | None:
        """The files of the code that was sent to the nodes; None if its archive is missing here or damaged."""
        try:
            return sent_files(self.code())
        except (OSError, EOFError, tarfile.TarError, zlib.error):
            return None

    def code(self) -> bytes:
        """The archive of the code that was sent to the nodes. Raises OSError."""
        with open_regular(self.paths.code) as file:
            return file.read()

    def job_text(self) -> str:
        """Return the text of job.yaml. Raises OSError, UnicodeDecodeError."""
        with open_regular(self.paths.job) as file:
            return file.read(_LARGEST).decode("utf-8")

    @property
    def is_command(self) -> bool:
        """Whether its program is a `run.command`, without torchrun; False if job.yaml is missing."""
        with suppress(OSError, UnicodeDecodeError, LauncherError):
            return parse_job(self.job_text(), str(self.paths.job)).run.command is not None
        return False

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl. Errors are ignored: a full disk here must not stop a run."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **self.mask.deep(plain(fields))})
        with suppress(OSError), open_regular(self.paths.events, APPEND) as file:
            file.write(f"{line}\n".encode())

    def first(self, kind: str, **fields: Any) -> bool:
        """Append an event unless it is there, so that one of several commands does what it says. Return whether it was
        not there; True if that cannot be recorded.
        """
        with suppress(OSError), locked(self.paths.events):
            if any(fields.items() <= line.items() for line in self.events(kind)):
                return False
            self.event(kind, **fields)
        return True

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """The recorded events of one kind, with their fields."""
        return (line for line in read_json_lines(self.paths.events) if line.get("event") == kind)

    def finish(self, result: dict[str, Any]) -> str:
        """Write result.json. Return the reason if that failed, else ""."""
        known = self.mask.deep(plain({"run": self.run, **result}))
        try:
            write_atomic(self.paths.result, json.dumps(known, indent=2).encode())
        except OSError as error:
            why = disk.full(said=error).what if disk.is_full(error) else error.strerror
            return f"{as_shown(self.paths.result)} was not written: {why}; to write it later: launcher logs {self.run}"
        return ""

    def remove(self) -> None:
        """Remove the record of a run that never started, and runs/ if it is then empty; errors are ignored."""
        shutil.rmtree(self.paths.root, ignore_errors=True)
        with suppress(OSError):
            self.paths.root.parent.rmdir()

    def result(self) -> dict[str, Any] | None:
        """The recorded result; None if the end is unknown: a lost node may become reachable again."""
        return self._result if self._result and self._result["state"] != "lost" else None

    @property
    def _result(self) -> dict[str, Any] | None:
        found = checked.fitting(read_json(self.paths.result) or {}, _RESULT)
        return found if "state" in found else None

    def ignored(self) -> Iterator[str]:
        """What the files of the record have that is not used, as it has another form; each with its consequence."""
        if self.paths.plan.exists() and not self.nodes():
            yield f"{as_shown(self.paths.plan)} is not valid, so the run is left out; to write it again: --nodes A,B"
        read, used = read_json(self.paths.result) or {}, self._result
        if used is None and self.paths.result.exists():
            yield f"{as_shown(self.paths.result)} is not valid and is ignored"
        elif used is not None and (wrong := [key for key, value in read.items() if used.get(key) != value]):
            yield f"{as_shown(self.paths.result)} has values of another type, which are ignored: {', '.join(wrong)}"

    def join(self, group: Membership) -> None:
        """Record the sweep to which the run belongs."""
        values = {} if group.values is None else {"values": plain(group.values)}
        added = {"added": True} if group.added else {}
        commit = {"commit": group.commit} if group.commit else {}
        self.event(GROUPED, group=group.group, variant=group.variant, **values, **added, **commit)

    @property
    def group(self) -> Membership | None:
        """The sweep to which the run belongs; None if it is of none."""
        for line in self.events(GROUPED):
            values = line.get("values")
            known = values if isinstance(values, (dict, list)) else None
            added, variant = line.get("added") is True, str(line.get("variant"))
            commit = str(line.get("commit") or "")
            code = f"{CODE}={commit}" if commit else variant
            revision = self.revision if f"{CODE}=" in code else None
            asked = revision.asked if revision and f"{CODE}={short_commit(revision.commit)}" in code else ""
            return Membership(str(line.get("group")), variant, values=known, added=added, asked=asked, commit=commit)
        return None

    @property
    def code_digest(self) -> str | None:
        """The digest of its code; None for a record that was rebuilt from labels."""
        return str(code) if (code := self._plan.get("code")) else None

    @property
    def started(self) -> bool:
        """Whether all containers were started without rollback."""
        return any(self.events("started"))

    @property
    def refused(self) -> bool:
        """Whether its `up` was rolled back, or ended before anything was started. False if that is unknown."""
        ends = [line["event"] for line in read_json_lines(self.paths.events) if line.get("event") in _STARTS]
        return ends[-1] == "undone" if ends else "why" in (self.result() or {})

    @property
    def why_not_started(self) -> str:
        """Why it is on no node, although nobody has removed it from there, and what to do; "" if it was started.

        Its record may have no start for another reason: if it has a container, it was started.
        """
        if self.refused:
            reasons = [line.get("reason") for line in self.events("undone")]
            return str((self.result() or {}).get("why") or (reasons or [""])[-1] or "the reason is not recorded")
        if self.rebuilt or self.started or self.result() is not None:
            return ""
        what = "its launcher is just starting it, or was killed before it had"
        return f"{what}\n  -> to remove what that may have left: launcher down {self.run}"

    @property
    def abandoned(self) -> bool:
        """Whether its sweep has moved its variant to another machine, or was about to."""
        return any(self.events(ABANDONED))

    @property
    def rebuilt(self) -> bool:
        """Whether it was found on its nodes: another folder, or a lost record of this one, may have started it."""
        return "rendezvous" not in self._plan

    @property
    def unfinished(self) -> bool:
        """Whether it was started here and may still be running: neither its end nor its removal is recorded."""
        return not self.rebuilt and not self.refused and self.result() is None and not self.confirmed_down

    @property
    def confirmed_down(self) -> bool:
        """Whether every node has confirmed to `down` that nothing of it is left there but output folders."""
        return any(line.get("failed") == [] and not line.get("kept") for line in self.events("down"))

    @property
    def being_stopped(self) -> bool:
        """Whether a `down` or a second Ctrl-C in this folder is just stopping it, or has just done so."""
        now, began = time.time(), self._last(STOPPING)
        ended = self._last("down")
        return 0 <= now - began < STOPPING_AT_MOST and (ended < began or now - ended < JUST_NOW)

    def _last(self, kind: str) -> float:
        """Return when the last event of this kind was recorded; 0: never."""
        times = [line.get("time") for line in self.events(kind)]
        return max((float(each) for each in times if isinstance(each, (int, float))), default=0.0)

    @property
    def resumes(self) -> RunId | None:
        """The earlier run from whose checkpoints it resumed."""
        named = (line.get("earlier") for line in self.events("resumes"))
        return next((run for run in named if isinstance(run, str) and is_run_id(run)), None)

    @property
    def inherits(self) -> bool:
        """Whether a node's files may be copies of the earlier run's for which another node's stand (records.inherited).

        Not with min_nodes, where each node keeps its own.
        """
        return self.resumes is not None and not self.min_nodes

    @property
    def resume_command(self) -> str:
        """The command that continues it: with its job file, or with the recorded job if options changed that."""
        named = (line.get("file") for line in self.events("job"))
        file = next((file for file in named if isinstance(file, str) and file), str(as_shown(self.paths.job)))
        on = next((name for node in self.nodes() if (name := cluster_name(node.host)) is not None), None)
        return shlex.join(["launcher", "up", file, *(["--on", on] if on else []), "--resume", self.run])

    def fetched_to(self) -> list[Path]:
        """The folders to which `fetch` copied files of it, other than its own."""
        named = (line.get("folder") for line in self.events(FETCHED))
        return [Path(folder) for folder in dict.fromkeys(named) if isinstance(folder, str) and folder.startswith("/")]

    def brought(self) -> set[str]:
        """The nodes from whose containers `fetch` has copied what the program wrote elsewhere."""
        return {node for line in self.events(BROUGHT) if isinstance(node := line.get("node"), str)}

    def copies(self) -> list[Path]:
        """The folders on this machine that have files of its output folders."""
        own = [self.paths.root] if any(self.paths.logs.glob("*")) else []
        return [*own, *(folder for folder in self.fetched_to() if folder.is_dir())]

    def purged(self, host: str) -> str:
        """Who deleted its output folder on a host, with which command and when, as far as it is recorded here."""
        for line in self.events(PURGED):
            by, command, when = line.get("by"), line.get("command"), line.get("time")
            if line.get("host") == host and isinstance(by, str) and isinstance(when, int | float):
                return f"by {by} on {time.strftime('%d %b at %H:%M', time.localtime(when))} (launcher {command})"
        return ""

    @property
    def taken_down(self) -> bool:
        """Whether `down` has stopped it, even if not on every node."""
        return any(self.events("down"))

    def nodes(self) -> tuple[NodeOfRun, ...]:
        """The nodes by rank; () if the plan cannot be parsed."""
        return self._nodes

    @cached_property
    def _nodes(self) -> tuple[NodeOfRun, ...]:
        try:
            return tuple(_node_from_json(node, self.run) for node in self._plan["nodes"])
        except (LookupError, TypeError, ValueError):
            return ()

    def other_hosts(self, found_since: Sequence[NodeOfRun] = ()) -> tuple[str, ...]:
        """For a rebuilt record: hosts of the run's nodes that are not in `nodes`, nor in `found_since`: they were not
        queried, or have no container any more.
        """
        known, found = {node.rank for node in (*self.nodes(), *found_since)}, self._plan.get("hosts")
        hosts = dict(enumerate(found if isinstance(found, list) else []))
        return tuple(str(host) for rank, host in hosts.items() if rank not in known and host != labels.NO_HOST)

    def container(self, rank: int) -> dict[str, Any]:
        """The ContainerSpec of the node of this rank as JSON; most keys are missing in a rebuilt record."""
        at = next((index for index, node in enumerate(self.nodes()) if node.rank == rank), None)
        found: dict[str, Any] = {} if at is None else checked.fitting(self._plan["nodes"][at]["container"], _CONTAINER)
        return found

    def images(self) -> set[str]:
        """Names and IDs of the images of its containers; empty in a rebuilt record."""
        found = [self._plan.get("image"), self._plan.get("image_id")]
        found += [self.container(node.rank).get("image") for node in self.nodes()]
        return {name for name in found if isinstance(name, str) and name}

    def interfaces(self) -> dict[int, tuple[str, str]]:
        """The planned interface and address of each node, by rank; {} in a rebuilt record."""
        meeting, form = self._plan.get("rendezvous"), {"interfaces": [str], "addresses": [str]}
        found = checked.fitting(meeting, form) if isinstance(meeting, dict) else {}
        return dict(enumerate(zip(found.get("interfaces", ()), found.get("addresses", ()), strict=False)))

    def wires(self) -> dict[str, Wires]:
        """What the plan knows of the network of each node, by name."""
        known = {node.rank: found for node, found in zip(self.nodes(), self._plan.get("nodes", ()), strict=False)}
        wires, interfaces = {}, self.interfaces()
        for node in self.nodes():
            own = checked.fitting(
                known[node.rank], {"speed": int | float, "rdma": [str], "efa": bool, "gpudirect": str}
            )
            speed, (name, _) = own.get("speed", 0), interfaces.get(node.rank, ("", ""))
            wires[node.name] = Wires(
                speeds={name: speed} if speed > 0 else {},
                active=tuple(own.get("rdma", ())),
                efa=own.get("efa", False),
                gpudirect=own.get("gpudirect", ""),
            )
        return wires

    @property
    def min_nodes(self) -> int:
        """Minimum number of nodes with which the run continues; 0: all are needed."""
        return self._number("min_nodes")

    @property
    def spares(self) -> int:
        """How many of the last nodes are spares."""
        return self._number("spares")

    @property
    def port(self) -> int:
        """The rendezvous port on the first node; 0 if the plan is missing."""
        meeting = self._plan.get("rendezvous")
        try:
            return checked.number(meeting["port"], 65535) if isinstance(meeting, dict) else 0
        except (LookupError, ValueError):
            return 0

    def _number(self, key: str) -> int:
        try:
            return checked.number(self._plan.get(key, 0), 10**5)
        except ValueError:
            return 0

    @property
    def runtime(self) -> str:
        found = self._plan.get("runtime")
        return found if found in TRAITS else "docker"

    @property
    def traits(self) -> Traits:
        return TRAITS[self.runtime]

    @cached_property
    def _plan(self) -> dict[str, Any]:
        return read_json(self.paths.plan) or {}


def records(runs: Path = RUNS) -> list[Record]:
    """Return all recorded runs, the latest last. Folders without a readable plan are ignored; --nodes rebuilds them.

    Raises UsageError if runs/ is not a folder.
    """
    require_folder(runs)
    if not runs.is_dir():
        return []
    found = [Record(RunPaths(path)) for path in runs.iterdir() if is_run_id(path.name)]
    readable = [record for record in found if record.nodes()]
    return sorted(readable, key=lambda r: (created(r.run), r.paths.plan.stat().st_mtime_ns))


def misplaced(runs: Path = RUNS) -> list[str]:
    """Return what is wrong in runs/: entries with a run's name that are not folders, such as dangling links, and files
    of records that are not valid.
    """
    named = [path for path in sorted(runs.iterdir()) if is_run_id(path.name)] if runs.is_dir() else []
    no_folders = [f"{as_shown(path)} {what}" for path in named if (what := not_a_folder(path))]
    return [*no_folders, *(problem for path in named for problem in Record(RunPaths(path)).ignored())]


def job_of(run: RunId) -> str:
    return run[:-21]


def created(run: RunId) -> str:
    """Return the part of a run ID that sorts by time."""
    return run[-20:-5]


@contextmanager
def without_nodes(fix: str) -> Iterator[None]:
    """For what has no --nodes: where a search advises these, advise `fix`."""
    try:
        yield
    except RunUnknown as unknown:
        if "--nodes" not in unknown.next_step:
            raise
        raise RunUnknown(unknown.where, unknown.what, fix) from None


def find(text: str | None, runs: Path = RUNS) -> Record:
    """Return the run selected by an ID, a unique prefix, a job's name (its latest run), or None (the latest run).

    The latest run is one that was started, and in this folder if there is any: not one whose `up` was refused, nor one
    of which this folder only has a record because it was found on its nodes. Raises RunUnknown if there is no such run
    or several match a prefix.
    """
    known = records(runs)
    started = sorted((r for r in known if not r.refused), key=lambda record: not record.rebuilt)
    run = resolve(text, [r.run for r in known], f"{runs.absolute()}{os.sep}", [r.run for r in started])
    return next(r for r in known if r.run == run)


def resolve(text: str | None, known: Sequence[RunId], where: str, started: Sequence[RunId] | None = None) -> RunId:
    """Select one of the run IDs `known`, the latest last, like `find`.

    where: the searched location, for messages. started: those that may be the latest run, the latest last; None: all.
    """
    place = where if where.startswith("on ") else f"in {where} (runs are recorded where `up` is called)"
    if not known:
        fix = "start a run: launcher up JOB; or give the nodes of a run: --nodes a,b"
        raise RunUnknown("", f"no runs {place}", fix)
    if text is not None and text in known:
        return text
    of_job = [run for run in known if text in (None, job_of(run))]
    if latest := [run for run in (known if started is None else started) if run in of_job]:
        return latest[-1]
    if of_job:
        what = f"no run{'' if text is None else f' of {text}'} has started; {of_job[-1]} did not start"
        raise RunUnknown(where, what, f"to see why: launcher logs {of_job[-1]}; list the runs: launcher runs")
    matching = [run for run in known if run.startswith(str(text))]
    if len(matching) == 1:
        return matching[0]
    if matching:
        what = f"matches {len(matching)} runs: {first_of(matching[::-1], _NAMED)}"
        raise RunUnknown(str(text), what, "give more characters of the run ID")
    raise RunUnknown(
        str(text),
        f"no such run {place}",
        "list the runs: launcher runs; or give the nodes of the run: --nodes a,b",
    )


def _node_to_json(node: NodeOfRun) -> dict[str, Any]:
    """Return the part of a NodePlan that `Record.nodes` needs."""
    return {
        "node": node.name,
        "host": node.host,
        "rank": node.rank,
        "first_rank": node.ranks.start,
        "processes": len(node.ranks),
        "container": {"name": node.container, "output_dir": node.output},
    }


def _node_from_json(node: Any, run: RunId) -> NodeOfRun:
    container, first = node["container"], checked.number(node["first_rank"], 10**6)
    return NodeOfRun(
        name=checked.node_name(node["node"]),
        host=checked.text(node["host"], "[A-Za-z0-9_\\[][!-~]{0,299}", "host"),
        rank=checked.number(node["rank"], 10**5),
        container=checked.text(container["name"], "[A-Za-z0-9][A-Za-z0-9_.-]*", "container's name"),
        output=checked.output_folder(container["output_dir"], run),
        ranks=range(first, first + checked.number(node["processes"], 10**4)),
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, unreadable or invalid."""
    try:
        with open_regular(path) as file:
            return parse_object(file.read())
    except OSError:
        return None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per line. Other lines are ignored, such as a truncated last line."""
    with suppress(OSError), open_regular(path) as file:
        for line in iter(partial(file.readline, _LONGEST_LINE), b""):
            if (found := parse_object(line)) is not None:
                yield found
