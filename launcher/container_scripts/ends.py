"""How the last generations of a run with min_nodes ended, and because of whom: pure functions of what nodes have seen.

A node that leaves its generation writes down an account of it: a member that is lost, or the program that has failed
somewhere. Where the nodes meet again, the accounts of the newest one make one End; those of the older ones went along
with the proposal that the newest began with, so all who took part in it have the same.

Python 3.7 without packages: it runs in the containers. tests/unit/test_ends.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Iterable, Mapping  # noqa: UP035 - 3.7 has no other

KEPT = 12  # ended generations that nodes remember
COSTS = 2  # ended generations that a node may cost before it sits out
REPEATS = 3  # generations in a row that may end with the same error


@dataclass(frozen=True)
class End:
    """How a generation ended, as one node has seen it or as the nodes have settled it."""

    generation: int
    nodes: tuple[str, ...] = ()  # because of these; () where nobody can be blamed
    error: str = ""  # of the programs there; "" where the nodes were lost
    step: int = 0  # the last one of metrics.jsonl so far


def history(known: Iterable[tuple[int, tuple[End, ...]]]) -> tuple[End, ...]:
    """How the last generations ended, oldest first. known: of each node, the newest that it joined and its accounts."""
    told = [(max([joined, *(end.generation for end in ends)]), ends) for joined, ends in known]
    newest = max(generation for generation, _ in told)
    if not newest:
        return ()
    accounts = [ends for generation, ends in told if generation == newest]
    before = max((tuple(end for end in ends if end.generation < newest) for ends in accounts), key=len)
    last = [end for ends in accounts for end in ends if end.generation == newest]
    return (*before, settled(newest, last, before[-1].step if before else 0))[-KEPT:]


def settled(generation: int, accounts: Iterable[End], step: int) -> End:
    """Of the nodes that were lost, the one that most accounts name; else those whose programs failed alike."""
    accounts = list(accounts)
    step = max([step, *(end.step for end in accounts)])
    lost = Counter(name for end in accounts if not end.error for name in end.nodes).most_common(2)
    if lost:  # where several were lost at once, or two blame each other, it was no single node
        alone = len(lost) == 1 or lost[0][1] > lost[1][1]
        return End(generation, (lost[0][0],) if alone else (), "", step)
    errors = Counter(end.error for end in accounts if end.error)
    error = min(errors, key=lambda text: (-errors[text], text), default="")
    nodes = sorted({name for end in accounts if end.error == error for name in end.nodes})
    return End(generation, tuple(nodes), error, step)


def sitting_out(ends: tuple[End, ...]) -> dict[str, tuple[int, ...]]:
    """The nodes that sit out the next generation while enough others are there, with those that they have cost.

    A node that has cost two sits out the next two, one that has cost three the next four, and so on. Those that have
    cost most come first: where not all can be done without, the others take part.
    """
    found = {}
    for name in sorted({name for end in ends for name in end.nodes}):
        costs = tuple(end.generation for end in ends if name in end.nodes)
        since = sum(end.generation > costs[-1] for end in ends)
        if len(costs) >= COSTS and since < 2 ** (len(costs) - 1):
            found[name] = costs
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), -item[1][-1])))


def repeated(ends: tuple[End, ...]) -> tuple[str, set[str]]:
    """The error with which the last generations ended, if it is the same and none got a step further, and its nodes."""
    last, before = ends[-REPEATS:], ends[-REPEATS - 1 : -REPEATS]
    if len(last) < REPEATS or any(end.error != last[0].error for end in last):
        return "", set()
    if last[-1].step > (before[0].step if before else 0):
        return "", set()
    return last[0].error, {name for end in last for name in end.nodes}


def read(kept: Iterable[Mapping[str, Any]]) -> tuple[End, ...]:
    """From their fields, as JSON has them."""
    return tuple(End(end["generation"], tuple(end["nodes"]), end["error"], end["step"]) for end in kept)
