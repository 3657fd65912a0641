"""Container labels, the only persistent record of which run uses which node, and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from launcher.model import checked
from launcher.model.plan import Membership, RunId
from launcher.model.runtime import TRAITS

RUN = "launcher.run"
JOB = "launcher.job"
NODE = "launcher.node"  # the node's name in the job file
HOST = "launcher.host"  # as given by the caller: ssh alias, user@host:port or "local"
NODE_RANK = "launcher.node_rank"
RANKS = "launcher.ranks"  # first global rank and number of its workers: "8+8"
NODES = "launcher.nodes"  # hosts of all nodes of the run, comma-separated, in rank order
CODE = "launcher.code"  # digest of the code archive
GPUS = "launcher.gpus"  # UUIDs, comma-separated
OUTPUT = "launcher.output"  # the run's output folder on the node
UID = "launcher.uid"  # uid of the ssh user on the node, who owns the run
OWNER = "launcher.owner"  # user@host of the caller
CREATED = "launcher.created"  # seconds since the epoch, by the caller's clock
VERSION = "launcher.version"
RUNTIME = "launcher.runtime"  # launcher.model.runtime
MIN_NODES = "launcher.min_nodes"  # minimum number of nodes with which the run continues, if not all
SPARES = "launcher.spares"  # with MIN_NODES: number of spare nodes at the end of the list
GROUP = "launcher.group"  # the ID of its sweep; runs of none, and those of older launchers, lack this and VARIANT
VARIANT = "launcher.variant"  # its variant's name, printable and bounded
PURPOSE = "launcher.purpose"  # run | shell | bench | claim | probe; any launcher removes probes that it finds
SPLIT = ","
LONGEST_VARIANT = 1000  # characters
NO_HOST = "-"  # in NODES: the cluster chooses the machine


@dataclass(frozen=True)
class RunLabels:
    """The parsed labels of a run's container or of its GPU lock."""

    run: RunId
    purpose: str
    runtime: str
    node: str
    rank: int  # of the node
    ranks: range  # global ranks of its workers
    every_host: str  # in the format of NODES: a tuple for each container of a large cluster would take much memory
    gpus: tuple[str, ...]  # UUIDs
    output: str
    uid: int
    owner: str
    created: int
    min_nodes: int  # minimum number of nodes with which the run continues; 0: all are required
    spares: int  # number of spare nodes, the last ones
    group: Membership | None = None  # its sweep

    @property
    def nodes(self) -> int:
        """Number of nodes of the run."""
        return self.every_host.count(SPLIT) + 1

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of all nodes of the run, by rank, as given by its caller."""
        return tuple(self.every_host.split(SPLIT))

    @property
    def started_by(self) -> str:
        return f"{self.owner} (uid {self.uid})"


def readable(labels: Mapping[str, object]) -> bool:
    """Return whether all labels are present and valid."""
    try:
        read(labels)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=16)  # a long string, equal in all containers of a run
def _hosts(value: str | None) -> str:
    return checked.text(value, "[!-~]{1,200000}", "list of nodes")


def read(labels: Mapping[str, object]) -> RunLabels:
    """Parse and validate labels: any user of a node's engine can set them. Raises ValueError if one is invalid."""
    run = checked.run_id(labels.get(RUN))
    first, _, count = checked.text(labels.get(RANKS), "[0-9]+[+][0-9]+", "range of ranks").partition("+")
    start = checked.number(first, 10**6)
    hosts = labels.get(NODES)
    gpus = checked.text(labels.get(GPUS), "[A-Za-z0-9.:/,-]{0,8000}", "list of GPUs")
    return RunLabels(
        run=run,
        purpose=checked.text(labels.get(PURPOSE), "[a-z]{1,20}", "purpose"),
        runtime=checked.text(labels.get(RUNTIME), "|".join(TRAITS), "runtime"),
        node=checked.node_name(labels.get(NODE)),
        rank=checked.number(labels.get(NODE_RANK), 10**5),
        ranks=range(start, start + checked.number(count, 10**4)),
        every_host=_hosts(hosts if isinstance(hosts, str) else None),
        gpus=tuple(uuid for uuid in gpus.split(SPLIT) if uuid),
        output=checked.output_folder(labels.get(OUTPUT), run),
        uid=checked.number(labels.get(UID), 2**32),
        owner=checked.text(labels.get(OWNER), "[!-~]{1,400}", "caller"),
        created=checked.number(labels.get(CREATED), 10**12),
        min_nodes=checked.number(labels.get(MIN_NODES, "0"), 10**5),
        spares=checked.number(labels.get(SPARES, "0"), 10**5),
        group=_group(labels),
    )


def of_group(group: Membership) -> dict[str, str]:
    """Return the labels of a run of a sweep."""
    name = "".join(char if char.isprintable() else "?" for char in group.variant)
    return {GROUP: group.group, VARIANT: name[:LONGEST_VARIANT]}


def _group(labels: Mapping[str, object]) -> Membership | None:
    if GROUP not in labels:
        return None
    name = checked.printable(labels.get(VARIANT), LONGEST_VARIANT, "name of a variant")
    return Membership(checked.run_id(labels[GROUP]), name)
