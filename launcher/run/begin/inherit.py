"""Which files of an earlier run each node of a new run gets: a pure function.

Every rank of a program may load a checkpoint if it finds one, so all nodes must find the same. Checkpoints are plain
files of unknown programs, which are told apart by name and time only. The rules, for `checkpoints/` and for the working
directories:

1. **Names that several nodes have** come from one node, the one that wrote the newest of these files, by its clock with
   the measured offset. So files of one moment are not combined with files of another. What the earlier run itself had
   inherited, and only another node's program has written since, does not count.
2. **Every node** gets all files of two nodes: of the earlier run's first node, where rank 0 writes for all, and of the
   node that wrote last.
3. **What only another node has**, such as the shard of its rank, stays there. It is copied only if the new run has the
   ranks of that node elsewhere.

Logs do not count as newest: a program writes them until its end. With min_nodes every node keeps its own files, and the
first node gets the newest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from launcher.node.trees import Entry
from launcher.records.inherited import superseded
from launcher.run.saved import EVENTS, Holder, newest

ABOUT_THE_SAME = 10.0  # seconds; with min_nodes, nodes write the same checkpoint at about the same time


@dataclass(frozen=True)
class Heir:
    """A folder of the new run, on one node or shared by several of one machine."""

    node: str
    host: str
    ranks: frozenset[int]
    folder: str


@dataclass(frozen=True)
class Share:
    """What an heir gets, by path: the file and who has it. own: the earlier run's files in its place, if any."""

    own: Holder | None
    files: Mapping[str, tuple[Holder, Entry]]

    @property
    def bytes(self) -> int:
        return sum(entry.size for _, entry in self.files.values())

    @property
    def newest(self) -> Entry | None:
        return newest(entry for _, entry in self.files.values())

    def is_own(self, path: str) -> bool:
        """Whether it keeps its own file: also if it has a copy of the one that it gets."""
        if self.own is None or path not in self.files:
            return False
        holder, entry = self.files[path]
        return holder.copy(entry, self.own) is not None

    @property
    def replaced(self) -> Sequence[str]:
        """Its own files in place of which it gets another node's."""
        mine = self.own.entries if self.own else {}
        return [path for path in mine if path in self.files and not self.is_own(path)]


def without_inherited(holders: Sequence[Holder]) -> list[Holder]:
    """Return the holders without files that a node had inherited and that another node's program has written since."""
    old = superseded([(each.began, each.entries.values()) for each in holders])
    return [
        replace(each, entries={path: entry for path, entry in each.entries.items() if path not in paths})
        for each, paths in zip(holders, old, strict=True)
    ]


def shares(holders: Sequence[Holder], heirs: Sequence[Heir], *, elastic: bool) -> list[Share]:
    """Return the share of each heir. elastic: the runs have min_nodes; the first heir has rank 0."""
    known = _by_rank(holders)
    if not known:
        return [Share(None, {}) for _ in heirs]
    if elastic:
        return [_elastic(known, heir, first=heir is heirs[0]) for heir in heirs]
    common = _common(known)
    return [_share(known, heir, common) for heir in heirs]


def _by_rank(holders: Sequence[Holder]) -> list[Holder]:
    return sorted((each for each in holders if each.entries), key=lambda each: min(each.ranks, default=math.inf))


def _common(holders: Sequence[Holder]) -> Mapping[str, tuple[Holder, Entry]]:
    """Return what every node gets: rules 1 and 2. holders: by rank; the lowest wins a tie."""
    claimed: dict[str, tuple[Holder, Entry]] = {}
    for holder in sorted(holders, key=lambda each: each.written(_contested(each, holders)), reverse=True):
        for path, entry in holder.entries.items():
            claimed.setdefault(path, (holder, entry))
    last = max(holders, key=_written)
    return {path: claimed[path] for each in (holders[0], last) for path in each.entries if EVENTS not in path}


def _contested(holder: Holder, holders: Sequence[Holder]) -> Entry | None:
    """Return its newest file that another one has with other content."""

    def differs(entry: Entry) -> bool:
        return any(entry.path in other.entries and not holder.copy(entry, other) for other in holders)

    return newest(entry for entry in holder.entries.values() if differs(entry))


def undecided(holders: Sequence[Holder]) -> Sequence[tuple[Holder, Entry]]:
    """Return the newest files of names that several nodes have, the newest first, if their order is not certain: those
    that are older by less than the error of the clocks of both machines. At least two, or none.
    """
    found = [(holder, entry) for holder in _by_rank(holders) if (entry := _contested(holder, holders))]
    if not found:
        return []
    found.sort(key=lambda pair: pair[0].written(pair[1]), reverse=True)
    best, newest_ = found[0]

    def near(holder: Holder, entry: Entry) -> bool:
        later = best.written(newest_) - holder.written(entry)
        return holder.host != best.host and later < best.clock.error + holder.clock.error

    others = [pair for pair in found[1:] if near(*pair)]
    return [found[0], *others] if others else []


def _share(holders: Sequence[Holder], heir: Heir, common: Mapping[str, tuple[Holder, Entry]]) -> Share:
    own = _own(holders, heir)
    before = [each for each in holders if each.ranks & heir.ranks]  # the nodes that had its ranks
    files = {path: (each, entry) for each in filter(None, (own, *before)) for path, entry in each.entries.items()}
    return Share(own, _nearest({**files, **common}, holders, heir))


def _elastic(holders: Sequence[Holder], heir: Heir, *, first: bool) -> Share:
    own, last = _own(holders, heir), max(holders, key=_written)
    mine = {path: (own, entry) for path, entry in own.entries.items()} if own else {}
    if first and (own is None or _written(own) < _written(last) - ABOUT_THE_SAME):
        mine |= {path: (last, entry) for path, entry in last.entries.items()}
    return Share(own, _nearest(mine, holders, heir))


def _own(holders: Sequence[Holder], heir: Heir) -> Holder | None:
    """Return what is on the heir's machine: of a node with its name, if there were several, else of the only one."""
    there = [each for each in holders if each.host == heir.host and not each.fetched]
    named = [each for each in there if each.name == heir.node]
    return next(iter(named or (there if len(there) == 1 else ())), None)


def _nearest(
    files: Mapping[str, tuple[Holder, Entry]], holders: Sequence[Holder], heir: Heir
) -> Mapping[str, tuple[Holder, Entry]]:
    """Replace holders of other machines by one on the heir's machine that has a copy of the same file.

    A file that would be below another one, or below a link, of another node is left out.
    """
    here = [each for each in holders if each.host == heir.host]

    def below_another(path: str) -> bool:
        return any(str(parent) in files for parent in PurePosixPath(path).parents)

    def nearest(source: Holder, entry: Entry) -> tuple[Holder, Entry]:
        copies = ((each, there) for each in here if (there := source.copy(entry, each)))
        return (source, entry) if source.host == heir.host else next(copies, (source, entry))

    return {path: nearest(*found) for path, found in files.items() if not below_another(path)}


def _written(holder: Holder) -> float:
    return holder.written(holder.newest)
