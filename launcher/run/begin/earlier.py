"""The files from which a new run resumes: what an earlier run's program wrote to its output folder and beside its code.

`launcher.run.saved` knows who has them, `launcher.run.begin.inherit` which node gets what. A file that another machine
has is read once, through this one, and written to all nodes that lack it at the same time. A file of the code that is
sent now is overwritten if it is what was sent to the earlier run, whose program has changed it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from launcher.errors import LauncherError, NodeUnfit
from launcher.job.scalars import duration
from launcher.model import labels
from launcher.model.container import WORKDIR, Phase
from launcher.model.facts import CLOCK_SLACK
from launcher.model.plan import Plan, RunId
from launcher.model.sizes import size_text
from launcher.naming import first_of
from launcher.node import trees
from launcher.node.connect import Fleet, connect
from launcher.node.engine import Engine
from launcher.node.parallel import on_each, run_all, run_all_catching
from launcher.node.trees import Entry, NodeClock, Place
from launcher.records.paths import RUNS, as_shown
from launcher.records.store import Record
from launcher.records.workdir import contents, sent_files
from launcher.run.begin.inherit import Heir, Share, shares, undecided, without_inherited
from launcher.run.saved import Holder, Listing, listing, moment, outputs, when, working_directories


@dataclass(frozen=True)
class Earlier:
    """An earlier run, from whose files a new one resumes. required: without any, the new one is not started."""

    run: RunId
    required: bool = True


OUTPUT = "output"  # the areas in which files are inherited: the output folder without WORKDIR, and this


@dataclass(frozen=True)
class _Copy:
    """What is copied into a folder of the new run, which several nodes of one machine may share."""

    area: str
    nodes: Sequence[str]
    engine: Engine
    heir: Heir
    share: Share
    clock: NodeClock  # of the node

    def at(self, holder: Holder) -> Sequence[Entry]:
        """Return the files that it gets from there."""
        return [entry for source, entry in self.share.files.values() if source is holder]


@contextmanager
def files_of(
    old: Record,
    plan: Plan,
    fleet: Fleet,
    code: bytes,
    ssh_config: Path | None,
    log: Callable[[str], None],
    *,
    required: bool = True,
) -> Iterator[Callable[[], None]]:
    """Yield a function that copies the files of an earlier run into the new output folders, before the nodes start.

    Searches the nodes of the new run, those of the earlier run's local record, and this machine. Reports what each node
    resumes from, before anything is written. code: the archive that is sent now. Raises NodesFailed if nodes have too
    little room, NodeUnfit if files are required and none were found.
    """
    run = old.run
    here = {engine.host: engine for engine in reversed(fleet.engines)}  # nodes of one machine: by the first
    elsewhere = {node.host: node for node in old.nodes() if node.host not in here}
    hosts = [(node.name, host) for host, node in elsewhere.items()]
    with connect(hosts, old.runtime, ssh_config, allow_failures=True, ping=False) as others:

        def list_here(engine: Engine) -> Listing:
            root = posixpath.dirname(plan.node_plan(engine.node).container.output_dir)
            return listing(engine, posixpath.join(root, run))

        listed = list(on_each(here.values(), list_here).values())
        found = run_all_catching([partial(listing, engine, elsewhere[engine.host].output) for engine in others.engines])
        listed += [each for each in found if isinstance(each, Listing)]
        failed = [e.node for e, each in zip(others.engines, found, strict=True) if isinstance(each, LauncherError)]
        silent = ", ".join(sorted([*failed, *others.failed]))
        asked = [*here.values(), *others.engines]
        answers = run_all_catching([partial(_still_running, engine, run) for engine in asked])
        if running := ", ".join(engine.node for engine, yes in zip(asked, answers, strict=True) if yes is True):
            what = f"{run} is still running on {running}: what it writes from now on is not in the new run"
            there = "" if old.nodes() else f" --nodes {','.join(here)}"
            log(f"warning: {what}; to stop it first: launcher down {run}{there}")
        holders = {OUTPUT: outputs(listed, old), WORKDIR: working_directories(listed, old)}
        if not plan.min_nodes:
            holders = {area: without_inherited(found) for area, found in holders.items()}
        yours, theirs = _settle(holders[WORKDIR], code, old)
        clocks = {each.engine.host: each.clock for each in listed}
        copies = [copy for area in holders for copy in _copies(holders[area], area, plan, fleet, clocks)]
        if yours or theirs:
            log(_settled(run, yours, theirs, known=old.sent_code is not None))
        found_any = any(copy.share.newest for copy in copies)
        if required and not found_any and not yours:
            raise _nothing(old, [each.engine.node for each in listed], silent)
        if silent:
            log(f"warning: no answer from {silent}: files of {run} that only they have are not used")
        if not found_any:
            yield lambda: None
            return
        _check_room(run, copies)
        for line in _of_clocks(listed, [each for area in holders.values() for each in area]):
            log(line)
        if not plan.min_nodes:
            for area in holders.values():
                if doubt := _doubt(undecided(area)):
                    log(doubt)
        for engine in fleet.engines:
            log(f"{engine.node}: {_describe(run, [copy for copy in copies if engine.node in copy.nodes])}")
        yield partial(_copy_all, copies)


def _still_running(engine: Engine, run: RunId) -> bool:
    phases = {state.phase for state in engine.list({labels.RUN: run, labels.PURPOSE: "run"})}
    return any(not phase.ended and phase is not Phase.CREATED for phase in phases)


def _settle(holders: Sequence[Holder], code: bytes, old: Record) -> tuple[Sequence[str], Sequence[str]]:
    """Decide whose a file is that the earlier run's program has changed and the code that is sent now has as well: the
    run's if it is unchanged here since the code of that run was sent, else the user's, which is not inherited then.

    Return the user's and the run's files. In whose place there is a folder now, or vice versa, is the user's.
    """
    sent = sent_files(code)
    folders = {str(parent) for path in sent for parent in PurePosixPath(path).parents}
    both = {path for holder in holders for path in holder.entries if path in sent}
    before = contents(old.code(), both) if both and old.sent_code is not None else {}
    now = contents(code, both) if before else {}
    theirs = {path for path in both if path in before and before[path] == now[path]}
    yours = set()
    for holder in holders:
        for path in list(holder.entries):
            above = any(str(parent) in sent for parent in PurePosixPath(path).parents)
            if above or path in folders or (path in both and path not in theirs):
                del holder.entries[path]
                yours.add(path)
    return sorted(yours), sorted(theirs)


def _settled(run: RunId, yours: Sequence[str], theirs: Sequence[str], *, known: bool) -> str:
    """known: whether the code of the earlier run is recorded here."""
    since = "changed here since" if known else f"as the code that was sent to {run} is not recorded here"
    found = [(theirs, "the run's, unchanged here since"), (yours, f"yours, {since}")]
    said = [f"{_named(paths)} {'is' if len(paths) == 1 else 'are'} {whose}" for paths, whose in found if paths]
    return f"the code sent now has files that the program of {run} had changed: {'; '.join(said)}"


def _copies(
    holders: Sequence[Holder], area: str, plan: Plan, fleet: Fleet, clocks: Mapping[str, NodeClock]
) -> list[_Copy]:
    """Decide what each node gets in an area. clocks: by host."""
    heirs: dict[tuple[str, str, str], list[tuple[Engine, frozenset[int]]]] = {}
    for engine in fleet.engines:
        planned = plan.node_plan(engine.node)
        mine = [planned] if planned.node == engine.node else plan.nodes  # a cluster's engine manages all nodes
        ranks = frozenset(rank for node in mine for rank in range(node.first_rank, node.first_rank + node.processes))
        spec = planned.container
        at = {OUTPUT: spec.output_dir, WORKDIR: spec.workdir}[area]
        name = posixpath.basename(spec.workdir)  # of the node
        on = next((key for key in heirs if key[1:] == (engine.host, at)), (name, engine.host, at))
        heirs.setdefault(on, []).append((engine, ranks))
    known = [
        Heir(name, host, frozenset[int]().union(*(ranks for _, ranks in on)), folder)
        for (name, host, folder), on in heirs.items()
    ]
    found = shares(holders, known, elastic=plan.min_nodes > 0)
    return [
        _Copy(area, [engine.node for engine, _ in on], on[0][0], heir, share, clocks[heir.host])
        for on, heir, share in zip(heirs.values(), known, found, strict=True)
    ]


def _nothing(old: Record, searched: Sequence[str], silent: str) -> NodeUnfit:
    here = f"{RUNS}/{old.run}/"
    what = f"has no files to resume from on {', '.join(searched)}, nor in {here}: nothing of its program is there"
    fix = f"do not purge a run that you want to resume, or keep a copy in {here}: launcher fetch --checkpoints"
    if not old.nodes():
        what += "; on which nodes it ran is not known here, as no record of it is in this folder"
        fix = "call `up` in the folder where it was started, or with nodes on which it ran"
    if gone := [how for host in dict.fromkeys(node.host for node in old.nodes()) if (how := old.purged(host))]:
        what += f"; its output folder was deleted {gone[0]}"
    if copied := [as_shown(folder) for folder in old.fetched_to() if folder.is_dir()]:
        fix = f"`launcher fetch` has copied files of it to {', '.join(map(str, copied))}: copy them to {here}"
    return NodeUnfit(f"run {old.run}", what + (f"; no answer from {silent}" if silent else ""), fix)


def _check_room(run: RunId, copies: Sequence[_Copy]) -> None:
    """Check the free space of all machines. Nodes of one machine share it. Raises NodesFailed."""
    needed: dict[str, int] = {}
    for copy in copies:
        needed[copy.heir.host] = needed.get(copy.heir.host, 0) + copy.share.bytes

    def check(engine: Engine, folder: str, size: int) -> None:
        free = trees.room(engine.files, folder).free
        if 0 <= free < size:
            what = f"the files of {run} need {size_text(size)} ({size:,} bytes)"
            what += f", but {folder} has room for {size_text(free)} ({free:,} bytes)"
            raise NodeUnfit(engine.node, what, "free disk space on the node: launcher clean")

    first = {copy.heir.host: copy for copy in reversed(copies)}
    run_all([partial(check, first[host].engine, first[host].heir.folder, size) for host, size in needed.items()])


def _of_clocks(listed: Sequence[Listing], holders: Sequence[Holder]) -> Iterator[str]:
    """Yield which clocks are wrong, and which files are of the future by their own node's clock."""
    for each in listed:
        if each.entries and abs(each.clock.offset) > CLOCK_SLACK:
            how = "ahead of" if each.clock.offset > 0 else "behind"
            off = duration(round(abs(each.clock.offset)))
            yield f"{each.engine.node}: its clock is {off} {how} this machine's; the times of its files are corrected"
    for holder in holders:
        if late := holder.of_the_future:
            what = f"{_named(late)} {'has a time' if len(late) == 1 else 'have times'} in the future of its own clock"
            yield f"warning: {holder.name}: {what}, and may not be the newest"


def _doubt(near: Sequence[tuple[Holder, Entry]]) -> str:
    """near: the result of undecided()."""
    if not near:
        return ""
    shown = " and ".join(f"{holder.name}'s {entry.path} ({moment(holder, entry)})" for holder, entry in near)
    return f"which is newer is not certain, by the clocks of their nodes: {shown}; {near[0][0].name}'s are used"


def _describe(run: RunId, copies: Sequence[_Copy]) -> str:
    """Say from what a node resumes: how many files, of which node, and the newest of them."""
    groups: dict[str, dict[str, tuple[Holder, Entry]]] = {}
    for copy in copies:
        for path, found_ in copy.share.files.items():
            whose = "its own" if copy.share.is_own(path) else f"{found_[0].name}'s"
            groups.setdefault(whose, {})[path] = found_
    if not any(copy.share.newest for copy in copies):
        return f"does not resume: no file of {run} is for it"
    found = [_group(whose, files) for whose, files in sorted(groups.items(), key=lambda item: item[0] == "its own")]
    left = [path for copy in copies for path in copy.share.replaced]
    return f"resumes from {' and '.join(found)}" + (f"; not from its own {_named(left)}" if left else "")


def _group(whose: str, files: Mapping[str, tuple[Holder, Entry]]) -> str:
    path, last = _newest(files)
    if len(files) == 1:
        return f"{whose} {_shown(path, *last)}"
    size = size_text(sum(entry.size for _, entry in files.values()))
    return f"{whose} {len(files)} files ({size}), the newest {path} ({moment(*last)})"


def _newest(files: Mapping[str, tuple[Holder, Entry]]) -> tuple[str, tuple[Holder, Entry]]:
    return max(files.items(), key=when)


def _shown(path: str, holder: Holder, entry: Entry) -> str:
    return f"{path} ({moment(holder, entry)}, {size_text(entry.size)})"


def _named(paths: Sequence[str]) -> str:
    return first_of(sorted(paths), 3)


def _copy_all(copies: Sequence[_Copy]) -> None:
    """Copy what is on the same machine, then what others have. Raises NodesFailed, NodeUnfit."""

    def copy_here(copy: _Copy) -> None:
        for holder in dict.fromkeys(source for source, _ in copy.share.files.values()):
            if holder.host == copy.heir.host:
                paths = [entry.path for entry in copy.at(holder)]
                trees.copy(copy.engine.files, holder.folder, copy.heir.folder, paths, below=holder.output)

    run_all([partial(copy_here, copy) for copy in copies])
    missing: dict[Holder, dict[Entry, list[Place]]] = {}
    for copy in copies:
        for holder, entry in copy.share.files.values():
            if holder.host != copy.heir.host:
                place = Place(copy.engine.machine, copy.heir.folder, holder.clock.shift(copy.clock))
                missing.setdefault(holder, {}).setdefault(entry, []).append(place)
    for holder, wanted in missing.items():
        trees.fan_out(holder.name, holder.files, holder.folder, wanted, below=holder.output)
