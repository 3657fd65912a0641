"""The same step on many nodes at once, with every failure told and none hiding another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from launcher.errors import LauncherError, NodesFailed

Item = TypeVar("Item")
Result = TypeVar("Result")
AT_ONCE = 64  # threads; the ssh layer caps connection starts by itself


def each(step: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`step` on every item in parallel, results in order. Waits for all, then raises the one error or NodesFailed."""

    def guarded(item: Item) -> Result | LauncherError:
        try:
            return step(item)
        except LauncherError as error:
            return error

    if len(items) == 1:
        return [step(items[0])]
    with ThreadPoolExecutor(max_workers=min(AT_ONCE, max(1, len(items)))) as pool:
        outcomes = list(pool.map(guarded, items))
    errors = [outcome for outcome in outcomes if isinstance(outcome, LauncherError)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise NodesFailed(errors, of=len(items))
    return [outcome for outcome in outcomes if not isinstance(outcome, LauncherError)]
