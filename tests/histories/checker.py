"""Which sentences of docs/promise.md a history breaks: pure functions, one for each sentence.

A checker assumes nothing about speed: what it calls broken is so however slow the machine was. Where a history leaves
open what was true, it says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.histories.history import (
    HEALED,
    Asked,
    Began,
    Crashed,
    Ended,
    Exited,
    Fault,
    Found,
    History,
    Hit,
    Kept,
    Record,
    Seen,
    Told,
    job_of,
)

DOCUMENTED = frozenset(range(7))
INTERRUPTED = DOCUMENTED | {-2, 130}  # of Python itself while it imports
KILLED = -9
TOGETHER = 5.0  # seconds: of two nodes that failed within this time, either may be named
ENDED = {"done", "failed", "stopped"}
SECRET = "a-secret-that-is-never-shown"
MASTERS = {"local", "local-0", "node1"}  # whose program has rank 0, where it takes part
COMMAND_CODE = 7  # of the command that `exec` runs
SSH_LOST = 255  # of the OpenSSH client, by which `exec` runs a command
NOT_STARTED = 126  # of docker, for a container that has just ended


@dataclass(frozen=True)
class Broken:
    sentence: int
    what: str
    at: float

    def __str__(self) -> str:
        return f"sentence {self.sentence} is broken at {self.at:.2f}: {self.what}"


@dataclass(frozen=True)
class Life:
    """One process of a program. ended: None if it did not say so. gone: when it was first seen to be away."""

    began: Began
    ended: Ended | None
    told: float | None
    last: float
    gone: float | None

    @property
    def over(self) -> bool:
        return self.ended is not None or self.gone is not None


class View:
    """A history by runs and calls."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.asked = history.all(Asked)
        self.exits = {each.call: each for each in history.all(Exited)}
        self.seen = history.all(Seen)
        self.found = history.all(Found)
        self.faults = history.all(Fault)

    @cached_property
    def lives(self) -> dict[str, list[Life]]:
        """The programs of each run."""
        lives: dict[str, list[Life]] = {}
        for began in self.history.all(Began):
            own = [each for each in self.history.records if _of(each) == _of(began)]
            ended = next((each for each in own if isinstance(each, Ended)), None)
            told = next((each.at for each in own if isinstance(each, Told)), None)
            last = max(each.at for each in own)
            alive = [s.at for s in self.seen if _of(began) in s.running]
            last = max([last, *alive])
            gone = next((s.at for s in self.seen if s.at > last and _of(began) not in s.running), None)
            lives.setdefault(began.run, []).append(Life(began, ended, told, last, gone))
        return lives

    def job(self, run: str) -> Asked | None:
        return next(iter(self.history.ups_of(run)), None)

    def exit(self, call: Asked) -> float:
        """When it exited; never, if that is not known."""
        return self.exits[call.call].at if call.call in self.exits else float("inf")

    def hits(self, call: Asked) -> list[Hit]:
        return self.history.hits(call.call)

    def started(self, call: Asked) -> bool:
        """Whether an `up` says that its run has started."""
        return call.call in self.exits and (" runs on " in self.exits[call.call].err or call.sweep)

    def may_mean(self, call: Asked, run: str) -> bool:
        """Whether the run may be what a command was asked about."""
        if call.command == "up":
            return call in self.history.ups_of(run)
        if call.has("--all", "--all-projects") or call.command in ("clean", "runs"):
            return call.has("--all-projects") or self._of_folder(call, run)
        if call.target:
            return run.startswith(call.target)
        end = self.exits.get(call.call)
        chosen = end is not None and f"run is {run}" in end.err  # the only one of a folder without an own run
        return self._of_folder(call, run) or call.has("--nodes") or chosen

    def _of_folder(self, call: Asked, run: str) -> bool:
        return any(up.folder == call.folder for up in self.history.ups_of(run))

    def names(self, call: Asked, run: str) -> bool:
        """Whether it surely is: by its own name, or as one of all, once every node had begun or no `up` was left."""
        job, every = self.job(run), call.has("--all", "--all-projects")
        if job is None or not (self._of_folder(call, run) if every else call.target == job.job and not job.sweep):
            return False
        began = {life.began.node for life in self.lives.get(run, []) if life.began.at < call.at}
        return len(began) == job.nodes or (every and all(self.exit(up) < call.at for up in self.history.ups_of(run)))

    def starting(self, up: Asked, at: float) -> bool:
        """Whether an `up` may not have started its run by then; a sweep's has always another one."""
        began = {each.node for each in self.history.all(Began) if job_of(each.run) == up.job and each.at < at}
        return up.command == "up" and (up.sweep or len(began) < up.nodes)

    def refused(self, call: Asked) -> bool:
        """Whether an `up` says that it has started nothing, for a reason of its own or after Ctrl-C."""
        end = self.exits.get(call.call)
        if call.command != "up" or call.sweep or end is None or self.started(call):
            return False
        return (end.code in (2, 3, 4) and not self.hits(call)) or "nothing was started" in end.err

    def attached(self, run: str, start: float, end: float) -> bool:
        """Whether anybody may have been attached to it in this time."""
        calls = [call for call in self.asked if call.follows and self.may_mean(call, run)]
        return any(call.at < end and self.exit(call) > start for call in calls)

    def struck(self, run: str) -> list[Fault]:
        """What befell its nodes. An engine that starts again ends the containers that it finds."""
        lives = self.lives.get(run, [])
        first, nodes = min((life.began.at for life in lives), default=0.0), {life.began.node for life in lives}
        engines = [f for f in self.faults if f.how == "engine" and f.node in nodes and self.away(first, f.at + 1, run)]
        return [*(fault for fault in self.faults if fault.where == run), *engines]

    def away(self, start: float, end: float, run: str = "") -> bool:
        """Whether anything befell a machine (of this run) in this time, or had not yet been healed."""
        nodes = {life.began.node for life in self.lives.get(run, [])}
        for fault in self.faults:
            if fault.node and not fault.where and fault.how != HEALED and (not run or fault.node in nodes):
                healed = [f.at for f in self.faults if (f.how, f.node) == (HEALED, fault.node) and f.at > fault.at]
                if fault.at < end and (not healed or healed[0] > start):
                    return True
        return False

    def filled(self, folder: str, end: float) -> bool:
        """Whether the disk of a folder has been filled by then."""
        return any(fault.how == "full" and fault.where == folder and fault.at < end for fault in self.faults)

    def again(self, run: str) -> str:
        """By which key its programs may begin again."""
        job = self.job(run)
        return job.again if job else ""

    def failures(self, run: str) -> list[tuple[float, str]]:
        """When, and on which node, a run's programs failed or were made to, the first one first."""
        own = [
            (life.ended.at, life.began.node)
            for life in self.lives.get(run, [])
            if life.ended and life.ended.code and not life.ended.lost and life.told is None
        ]
        return sorted([*own, *((fault.at, fault.node) for fault in self.struck(run) if fault.how != "suspend")])

    def stops(self, run: str) -> list[float]:
        """When anybody began to stop it."""
        found = []
        for call in self.asked:
            if not self.may_mean(call, run):
                continue
            ended, presses = self.exits.get(call.call), [h.at for h in self.hits(call) if h.how.startswith("interrupt")]
            if call.command == "down":
                found.append(call.at)
            elif call.command in ("up", "logs") and presses and (ended is None or ended.code != 0):
                found.append(presses[0])
            elif call.command == "up" and not self.started(call) and ended and ended.code not in (0, KILLED):
                found.append(call.at)  # undone
        return found


def _of(record: Record) -> tuple[str, str, int] | None:
    run, node, pid = (getattr(record, name, None) for name in ("run", "node", "pid"))
    return (run, node, pid) if run and node and pid else None


def done(view: View) -> Iterator[Broken]:
    """1. A run that is called done has ended with 0 on every rank; with min_nodes, on one node."""
    called: list[tuple[float, str, str]] = [(f.at, f.run, "its record") for f in view.found if f.state == "done"]
    for call in view.asked:
        end = view.exits.get(call.call)
        if end and call.command == "up" and call.follows and not call.sweep and end.code == 0 and not view.hits(call):
            runs = [run for run in view.lives if view.may_mean(call, run)]
            if len(runs) == 1:
                called.append((end.at, runs[0], f"{call}"))
        if end and call.command == "status" and (shown := _status(end)) and shown[1] == "done":
            called.append((end.at, shown[0], f"{call}"))
    for at, run, who in called:
        job = view.job(run)
        last = {life.began.node: life for life in view.lives.get(run, [])}
        bad = [node for node, life in last.items() if life.ended is None or life.ended.code or life.ended.at > at]
        if job and job.again == "min_nodes" and len(bad) < len(last):
            continue  # it went on without the others
        if job and (bad or len(last) < job.nodes):
            yield Broken(1, f"{who} calls {run} done, but not with 0: {bad or 'a node that never began'}", at)


def stopped(view: View) -> Iterator[Broken]:
    """2. What is called stopped runs nowhere."""
    for call in view.asked:
        end = view.exits.get(call.call)
        if not end:
            continue
        if call.command == "down" and end.code == 0:
            runs = [run for run in view.history.runs() if view.names(call, run)]
        elif call.command == "status" and (shown := _status(end)) and shown[1] in ENDED:
            # what a supervisor leaves that was killed by hand is named beside the state, until `down`
            runs = [] if any(fault.how == "kill supervisor" for fault in view.struck(shown[0])) else [shown[0]]
        else:
            continue
        for run in runs:
            removed = any(fault.how == "remove" for fault in view.struck(run))
            looks = view.seen[-1:] if removed else view.seen  # its supervisor notices that within a second or more
            later = [s for s in looks if s.at > end.at and any(each[0] == run for each in s.running)]
            if later:
                yield Broken(2, f"{call} calls {run} ended, but it runs", later[0].at)
            held = [s for s in view.seen if s.at > end.at and any(each[0] == run for each in s.containers)]
            if held and call.command == "down" and " is kept" not in end.err:
                yield Broken(2, f"{call} leaves containers of {run}", held[0].at)


def owners(view: View) -> Iterator[Broken]:
    """3. A GPU and a port have one owner."""
    with_others = [
        run for run in view.lives if (job := view.job(run)) and job.nodes > 1
    ]  # one node needs no rendezvous
    every = [life for run in with_others for life in view.lives[run]]
    for one in (life for life in every if life.began.node in MASTERS):  # which listens there
        for other in every:
            meets = one.began.run != other.began.run and one.began.port == other.began.port
            meets = meets and not any(fault.how == "kill supervisor" for fault in view.struck(one.began.run))
            if meets and one.began.at < other.began.at < one.last:
                what = f"{other.began.run} began on port {one.began.port} while {one.began.run} had it"
                yield Broken(3, what, other.began.at)


def output(view: View) -> Iterator[Broken]:
    """4. Every byte of output is shown once and in order, per rank, in the collected files; secrets masked."""
    for found in view.found:
        ours = any(up.folder == found.folder for up in view.history.ups_of(found.run))
        for name in found.secret if ours else ():  # another folder does not know the secret, and says so
            yield Broken(4, f"{found.folder}: {name} shows a secret", found.at)
    for call, end in ((call, view.exits.get(call.call)) for call in view.asked):
        if end and SECRET in end.out + end.err and "not masked" not in end.err:
            yield Broken(4, f"{call} shows a secret", end.at)
        again = any(other.again for other in view.asked)
        if end and call.follows and not call.sweep and (wrong := _out_of_order(end.out, again=again)):
            yield Broken(4, f"{call} shows {wrong}", end.at)
    for run, lives in view.lives.items():
        removed = any(fault.how == "remove" for fault in view.struck(run))  # then only `fetch` collects
        for node in {life.began.node for life in lives}:
            own = [life for life in lives if life.began.node == node]
            texts = [(f.at, f.logs[node]) for f in view.found if f.run == run and f.folder and node in f.logs]
            for at, text in texts:
                if wrong := _out_of_order(text, again=bool(view.again(run))):
                    yield Broken(4, f"the collected output of {node} of {run} has {wrong}", at)
            if (
                removed
                or len(own) != 1
                or own[0].ended is None
                or not any(f.run == run and f.folder for f in view.found)
            ):
                continue
            most = max((len(_numbers(text)) for _, text in texts), default=0)
            if most < own[0].ended.lines:
                what = f"{node} of {run} printed {own[0].ended.lines} lines, of which {most} were collected"
                yield Broken(4, what, own[0].ended.at)


def kept(view: View) -> Iterator[Broken]:
    """5. Nothing that a program wrote below its output folder and working directory is removed unasked."""
    for crash in view.history.all(Crashed):
        killed = any(fault.how == "kill" and fault.at < crash.at for fault in view.struck(crash.run))
        if killed and crash.what.startswith("BrokenPipeError"):  # what copies its output was killed a moment earlier
            continue
        yield Broken(5, f"{crash.node} of {crash.run} misses something while it runs: {crash.what}", crash.at)
    for file in view.history.all(Kept):
        asked = [c for c in view.asked if c.has("--unfetched") and (view.may_mean(c, file.run) or c.command == "clean")]
        copies = [found.files.get(file.path) for found in view.found if found.run == file.run]
        if view.found and file.text not in copies and not asked:
            have = "is cut short" if any(copy is not None for copy in copies) else "is nowhere"
            yield Broken(5, f"{file.path} of {file.run} {have}", file.at)


def refused(view: View) -> Iterator[Broken]:
    """6. A refused start leaves nothing: no process, container or folder, and it is not the latest run."""
    for call in filter(view.refused, view.asked):
        if view.away(call.at, view.exit(call)):
            continue  # what could not be undone is named
        for seen in (each for each in view.seen if each.at > view.exit(call)):
            runs = [*(r[0] for r in seen.running), *(r[0] for r in seen.containers), *seen.outputs]
            if left := [run for run in runs if call in view.history.ups_of(run)]:
                yield Broken(6, f"the refused {call} has left {left[0]}", seen.at)
                break
    for call in view.asked:
        end = view.exits.get(call.call)
        if call.command != "status" or call.target or not end or not (shown := _status(end)):
            continue
        others = [u for u in view.asked if u.command == "up" and u.folder == call.folder and view.exit(u) < call.at]
        if (up := view.job(shown[0])) in others and up and view.refused(up) and any(map(view.started, others)):
            yield Broken(6, f"{call} takes the refused {shown[0]} for the latest run", end.at)


def first_failure(view: View) -> Iterator[Broken]:
    """7. The first failure is named, or nothing is."""
    for found in view.found:
        failures = view.failures(found.run)
        if view.again(found.run) or view.away(0, found.at, found.run):
            continue  # a program may have failed before; what happened to a machine may be seen later
        if not found.failed or not failures or found.state != "failed":
            continue
        first = failures[0][0]
        if found.failed not in {node for at, node in failures if at <= first + TOGETHER}:
            what = f"{found.run} failed on {failures[0][1]} first, but {found.failed} is named"
            yield Broken(7, what, found.at)


def alone(view: View) -> Iterator[Broken]:
    """8. Of two commands at once each answers as if it were alone, or is refused as in use."""
    full = any(fault.how == "full" for fault in view.faults)
    for call in view.asked:
        end = view.exits.get(call.call)
        if not end:
            if view.found:
                yield Broken(8, f"{call} does not end", call.at)
            continue
        said = " ".join(end.err.split())[-200:]
        traceback = re.search(r'File "[^"]*/launcher/(cli|api|run)/', end.err) and "KeyboardInterrupt" not in end.err
        if traceback or "this is a bug in the launcher" in end.err:
            yield Broken(8, f"{call} meets an error that it does not know: {said}", end.at)
        holder = (
            re.search(r"by run (\S+) of", end.err) if call.command == "up" else None
        )  # others say why it was refused
        if holder and not _may_live(view, holder[1], call.at, end.at):
            yield Broken(8, f"{call} is refused for {holder[1]}, which was over", end.at)
        shown = _status(end)
        if shown and shown[1] in ("running", "restarting") and not _may_live(view, shown[0], call.at, end.at):
            yield Broken(8, f"{call} calls {shown[0]} {shown[1]}, but it was over", end.at)
        if view.hits(call) or full or view.away(call.at, end.at):
            continue
        beside = [each for each in view.asked if each.at < end.at and view.exit(each) > call.at]
        if call.command == "down" and end.code == 6 and not any(view.starting(each, call.at) for each in beside):
            yield Broken(8, f"{call} is not confirmed: {said}", end.at)
        reason = re.search("in use|locked by run", end.err) or call.has("--resume")
        reason = reason or any(each.command == "down" for each in beside)
        if end.code == 3 and view.refused(call) and not reason:
            yield Broken(8, f"{call} is refused, though nothing is in use: {said}", end.at)
    yield from _again(view)


def _again(view: View) -> Iterator[Broken]:
    """A variant of a sweep that was done is not run again."""
    for lives in _by_variant(view).values():
        for life in lives:
            again = [other for other in lives if life.ended and other.began.at > life.ended.at]
            if life.ended and not life.ended.code and life.told is None and again:
                what = f"{life.began.run} was done, and {again[0].began.run} ran the same variant again"
                yield Broken(8, what, again[0].began.at)
            twice = [o for o in lives if o is not life and life.began.at < o.began.at < life.last]
            if twice:
                yield Broken(8, f"{life.began.run} and {twice[0].began.run} run one variant", twice[0].began.at)


def _by_variant(view: View) -> dict[tuple[str, str, str], list[Life]]:
    found: dict[tuple[str, str, str], list[Life]] = {}
    for run, lives in view.lives.items():
        job = view.job(run)
        for life in lives if job and job.sweep else ():
            found.setdefault((job.job if job else "", life.began.variant, life.began.node), []).append(life)
    return found


def lost_launcher(view: View) -> Iterator[Broken]:
    """9. A lost launcher changes nothing, but peers of a failed rank are stopped only while somebody is attached."""
    for run, lives in view.lives.items():
        for life in lives:
            when = life.told if life.told is not None else None if life.ended else life.gone
            if when is None:
                continue
            struck = [f for f in view.struck(run) if f.at < when and f.node in ("", life.began.node)]
            peers = [at for at, node in view.failures(run) if at < when and node != life.began.node]
            if view.again(run) == "min_nodes" and (peers or view.away(life.began.at, when, run)):
                continue  # the others begin again together
            stops = [at for at in view.stops(run) if at < when]
            if not (struck or stops or (peers and view.attached(run, peers[0], when))):
                why = ", though nobody was attached after its peer had failed" if peers else " without a cause"
                yield Broken(9, f"{life.began.node} of {run} was ended{why}", when)


def exit_codes(view: View) -> Iterator[Broken]:
    """10. Exit codes are as documented."""
    for call in view.asked:
        end, hits = view.exits.get(call.call), view.hits(call)
        if not end:
            continue
        hows = {hit.how for hit in hits}
        allowed = INTERRUPTED if hows & {"interrupt", "interrupt twice"} else DOCUMENTED
        allowed |= {KILLED} if "kill" in hows else set()
        if call.command == "exec":
            allowed |= {COMMAND_CODE, 128 - KILLED}  # that of the command, which ends with its container
            runs = [run for run in view.lives if view.names(call, run)]
            untouched = not hits and not view.away(call.at, end.at)
            allowed |= set() if untouched else {SSH_LOST}
            allowed |= {NOT_STARTED} if "so the command could not start" in end.err else set()
            if call.has("--nodes") and view.filled(call.folder, end.at):
                untouched = False  # there may be no room for the record that another folder makes
            if runs and untouched and end.code != COMMAND_CODE and _alive_throughout(view, runs[0], call.at, end.at):
                allowed = frozenset({COMMAND_CODE})
        runs = [run for run in view.lives if view.may_mean(call, run)]
        follows = call.command == "up" and call.follows and not call.sweep
        if follows and not hows - {"suspend"} and len(runs) == 1 and view.started(call):
            allowed &= _expected(view, call, runs[0], end)
        if end.code not in allowed:
            what = f"{call} exits with {end.code}, not {sorted(allowed)}: {' '.join(end.err.split())[-200:]}"
            yield Broken(10, what, end.at)


def _expected(view: View, call: Asked, run: str, end: Exited) -> set[int]:
    """The exit codes of an `up` that nobody interrupted."""
    lives = list({life.began.node: life for life in view.lives[run]}.values())  # the last one of each node
    codes = [life.ended.code if life.ended else None for life in lives]
    if view.away(call.at, end.at) or (view.again(run) == "min_nodes" and any(codes)):
        return set(DOCUMENTED)
    if any(at < end.at for at in view.stops(run)):
        return {0, 1, 5}
    if view.struck(run):
        return {0, 1}
    if len(lives) == call.nodes and all(code == 0 for code in codes):
        return {0}
    return {1} if any(codes) else {0, 1}


def _alive_throughout(view: View, run: str, start: float, end: float) -> bool:
    """Whether the master's program was there before, and after, and no node of it was touched."""
    masters = [life for life in view.lives.get(run, []) if life.began.node in MASTERS]
    return bool(masters) and not view.struck(run) and any(m.began.at < start and m.last > end for m in masters)


def _may_live(view: View, run: str, start: float, end: float) -> bool:
    """Whether any process or start of it may have been there in this time."""
    ups = view.history.ups_of(run)
    starting = any(up.at < end and (view.exit(up) > start or not view.started(up)) for up in ups)
    looks = [seen for seen in view.seen if seen.at < start]
    starting = starting or bool(view.again(run)) or view.away(start, end)
    if starting or not looks or run not in view.lives:
        return True
    return any(each[0] == run for each in looks[-1].running)


def _status(end: Exited) -> tuple[str, str] | None:
    """The run and the state that `status --json` shows."""
    shown = re.match(r'\s*\{\s*"run": "([^"]+)",\s*"state": "([^"]+)"', end.out)
    return (shown[1], shown[2]) if shown else None


def _numbers(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if re.match(r"(local(-\d)?|node\d) \d+( |$)", line)]


def _out_of_order(text: str, *, again: bool) -> str:
    """What is wrong with the numbers of a program's lines, "" for nothing. again: it may have begun again."""
    last = -1
    for number in _numbers(text):
        if number != last + 1 and not (again and number == 0):
            return f"line {number} after {last}"
        last = number
    return ""


SENTENCES: tuple[Callable[[View], Iterator[Broken]], ...] = (
    done, stopped, owners, output, kept, refused, first_failure, alone, lost_launcher, exit_codes,
)  # fmt: skip


def check(history: History) -> list[Broken]:
    view = View(history)
    return sorted((broken for sentence in SENTENCES for broken in sentence(view)), key=lambda broken: broken.at)
