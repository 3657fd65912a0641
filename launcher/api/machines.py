"""Facts about machines, without a job or a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from os import PathLike

from launcher.errors import LauncherError
from launcher.model.facts import NodeFacts
from launcher.node.connect import connect
from launcher.node.parallel import run_all_catching
from launcher.node.ssh.config import chosen_config
from launcher.run.begin.claims import with_claims


def machines(
    nodes: Sequence[str], *, ssh_config: str | PathLike[str] | None = None
) -> tuple[list[NodeFacts], list[LauncherError]]:
    """Return the facts about these nodes, including the users of their GPUs, and the errors of the other nodes."""
    hosts = [(host, host) for host in dict.fromkeys(nodes)]
    with connect(hosts, None, chosen_config(ssh_config), allow_failures=True) as fleet:
        answers = run_all_catching([partial(with_claims, engine) for engine in fleet.engines])
    found: dict[str, NodeFacts] = {}
    for answer in answers:
        if isinstance(answer, NodeFacts):  # `local` has two engines: processes and containers
            others = found[answer.name].claims if answer.name in found else ()
            found[answer.name] = replace(answer, claims=(*others, *answer.claims))
    errors = [*fleet.failed.values(), *(each for each in answers if isinstance(each, LauncherError))]
    return list(found.values()), errors
