"""What old runs left on nodes: find it, and remove it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike

from launcher.errors import LauncherError, UsageError
from launcher.node.connect import connect
from launcher.node.parallel import run_all
from launcher.node.ssh.config import chosen_config
from launcher.records.store import Record, records
from launcher.run.end.leftovers import Leftovers, find_leftovers, remove_leftovers
from launcher.run.locate import unsearched


@dataclass(frozen=True)
class FoundLeftovers:
    """Leftovers by node. failed: errors of nodes and of folders that could not be read. asked: the number of nodes.

    remove: removes these leftovers, while the nodes are connected. Raises NodesFailed. no_engine: why the container
    engine of `local` was not searched, if one is expected there.
    """

    nodes: Sequence[Leftovers]
    failed: Sequence[LauncherError]
    asked: int
    remove: Callable[[Sequence[Leftovers]], object]
    no_engine: LauncherError | None


@contextmanager
def leftovers(
    nodes: Sequence[str] | None = None, *, ssh_config: str | PathLike[str] | None = None
) -> Iterator[FoundLeftovers]:
    """Search these nodes, or all nodes of the runs recorded here, which stay connected in the context.

    Raises UsageError without a node, NodesFailed.
    """
    known = records()
    hosts = nodes or list(dict.fromkeys(node.host for record in known for node in record.nodes()))
    if not hosts:
        raise UsageError("launcher clean", "no run is recorded here", "name the nodes: --nodes a,b")
    with connect([(host, host) for host in hosts], None, chosen_config(ssh_config), allow_failures=True) as fleet:
        listed = find_leftovers(fleet.engines, known)
        found = [each for each in listed if isinstance(each, Leftovers)]
        failed = [*fleet.failed.values(), *(each for each in listed if isinstance(each, LauncherError))]
        failed += [each.unread for each in found if each.unread]
        no_engine = unsearched(fleet, lambda: known)
        yield FoundLeftovers(found, failed, len(hosts), partial(_remove, known), no_engine)


def _remove(known: Sequence[Record], chosen: Sequence[Leftovers]) -> None:
    run_all([partial(remove_leftovers, each, known) for each in chosen])
