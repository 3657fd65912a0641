"""How the last generations of a run with min_nodes ended, and because of which nodes: pure functions.

A node that leaves its generation writes an account of it: a member was lost, or the program failed on some node. At the
next rendezvous, the accounts of the newest generation are merged into one End. Those of older generations were part of
the proposal for the newest one, so all of its members have the same.

Python 3.7 without packages: it runs in the containers. tests/unit/test_ends.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence  # noqa: UP035 - 3.7 has no other

KEPT = 12  # number of ended generations that nodes remember
COSTS = 2  # generations that a node may end before it sits out
REPEATS = 3  # maximum number of consecutive generations with the same error


@dataclass(frozen=True)
class End:
    """How a generation ended, according to one node or as agreed by the nodes."""

    generation: int
    nodes: tuple[str, ...] = ()  # the nodes that caused it; () if undecided
    error: str = ""  # error of the programs on these nodes; "" if the nodes were lost
    step: int = 0  # the last step in metrics.jsonl so far


def history(known: Iterable[tuple[int, tuple[End, ...]]]) -> tuple[End, ...]:
    """Return how the last generations ended, oldest first. known: each node's newest joined generation and accounts."""
    latest = [(max([joined, *(end.generation for end in ends)]), ends) for joined, ends in known]
    newest = max(generation for generation, _ in latest)
    if not newest:
        return ()
    accounts = [ends for generation, ends in latest if generation == newest]
    before = max((tuple(end for end in ends if end.generation < newest) for ends in accounts), key=len)
    last = [end for ends in accounts for end in ends if end.generation == newest]
    return (*before, settled(newest, last, before[-1].step if before else 0))[-KEPT:]


def settled(generation: int, accounts: Iterable[End], step: int) -> End:
    """Merge the accounts: blame the lost node that most accounts name, else the nodes with the most frequent error."""
    accounts = list(accounts)
    step = max([step, *(end.step for end in accounts)])
    lost = Counter(name for end in accounts if not end.error for name in end.nodes).most_common(2)
    if lost:  # several nodes lost at the same time, or two that blame each other: no single cause
        alone = len(lost) == 1 or lost[0][1] > lost[1][1]
        return End(generation, (lost[0][0],) if alone else (), "", step)
    errors = Counter(end.error for end in accounts if end.error)
    error = min(errors, key=lambda text: (-errors[text], text), default="")
    nodes = sorted({name for end in accounts if end.error == error for name in end.nodes})
    return End(generation, tuple(nodes), error, step)


def sitting_out(ends: tuple[End, ...]) -> dict[str, tuple[int, ...]]:
    """Return the nodes that sit out the next generation if enough others remain, with the generations that they ended.

    After two such generations a node sits out the next two, after three the next four, and so on. Nodes that ended the
    most generations come first: if not all can be spared, the later ones take part.
    """
    found = {}
    for name in sorted({name for end in ends for name in end.nodes}):
        costs = tuple(end.generation for end in ends if name in end.nodes)
        since = sum(end.generation > costs[-1] for end in ends)
        if len(costs) >= COSTS and since < 2 ** (len(costs) - 1):
            found[name] = costs
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), -item[1][-1])))


def away(names: Sequence[str], ends: tuple[End, ...], when: str) -> list[str]:
    """Return why these nodes are no members. when: the last generation ended.

    A node on which the program failed by itself starts again and may only be late: it is not lost.
    """
    last = ends[-1] if ends else End(0)
    failed = [name for name in names if last.error and name in last.nodes]
    lost = [name for name in names if name not in failed]
    found = [f"the program failed on {', '.join(failed)} at {when}"] if failed else []
    return [*found, f"{', '.join(lost)} lost at {when}"] if lost else found


def repeated(ends: tuple[End, ...]) -> tuple[str, set[str]]:
    """Return the common error of the last generations, if none made progress, and its nodes; else "" and no nodes."""
    last, before = ends[-REPEATS:], ends[-REPEATS - 1 : -REPEATS]
    if len(last) < REPEATS or any(end.error != last[0].error for end in last):
        return "", set()
    if last[-1].step > (before[0].step if before else 0):
        return "", set()
    return last[0].error, {name for end in last for name in end.nodes}


def read(kept: Iterable[Mapping[str, Any]]) -> tuple[End, ...]:
    """Return ends from their fields in JSON."""
    return tuple(End(end["generation"], tuple(end["nodes"]), end["error"], end["step"]) for end in kept)
