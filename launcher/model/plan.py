"""The plan of a run: `launcher plan` prints it, `launcher up` executes it."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.model.container import ContainerSpec
from launcher.model.runtime import TRAITS, Traits

_LONGEST_SHOWN = 60  # characters of a variant in a table
CODE = "code"  # the name under which a variant has its code
_CODE = re.compile(rf"(?<!\S){CODE}=[0-9a-f]{{8}}(?!\S)")  # of a commit, in a variant
_READABLE = 256  # maximum number of nodes of a plan that is indented

RunId = str
RUN_ID = r"[a-z0-9][a-z0-9-]{0,62}-[0-9]{8}-[0-9]{6}-[0-9a-f]{4}"


def new_run_id(job: str, now: float | None = None) -> RunId:
    """Return `<job>-<UTC date>-<UTC time>-<4 hex digits>`: sorts by time within a job, unique within a second."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{job}-{stamp}-{secrets.token_hex(2)}"


def is_run_id(text: str) -> bool:
    return re.fullmatch(RUN_ID, text) is not None


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters, without its middle: variants may differ at either end."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"


@dataclass(frozen=True)
class Revision:
    """A commit, and what it changes. parent: its first one; "": none is known here. stat: git diff --stat to it.

    asked: the name by which it was asked for, such as a branch; "": by its own.
    """

    commit: str
    parent: str = ""
    stat: str = ""
    asked: str = ""


@dataclass(frozen=True)
class KnownSweep:
    """All that a sweep runs. variants: their names, in order. file: the job file; "": unknown. options: of `up`, with
    which the file gave this job. commits: what each entry of `code` meant, a commit or a folder. settings: of the job,
    without what its variants change; {}: not recorded.
    """

    variants: tuple[str, ...]
    file: str = ""
    options: tuple[str, ...] = ()
    commits: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Membership:
    """Membership of a run in the group that `up` starts for a job with a sweep."""

    group: str  # an id in the format of run ids
    variant: str  # the arguments that distinguish the run
    sweep: KnownSweep | None = field(default=None, compare=False, repr=False)  # known to who starts the run
    # the same as values by option, or as a list of arguments; None: not recorded
    values: Mapping[str, Any] | Sequence[str] | None = field(default=None, compare=False, repr=False)
    added: bool = field(default=False, compare=False)  # to a sweep that had been started, by --into
    asked: str = field(default="", compare=False)  # as of Revision, if the variant has the commit of its code
    commit: str = field(default="", compare=False)  # the first characters of that, if it is not in the variant's name

    @property
    def named(self) -> str:
        """The variant, with the commit and the name by which its code was asked for: `code=1a2b3c4d (main) lr=0.1`."""
        name = f"{CODE}={self.commit} {self.variant}" if self.commit else self.variant
        return name if not self.asked else _CODE.sub(self._with_asked, name, 1)

    @property
    def named_values(self) -> Mapping[str, Any] | Sequence[str] | None:
        """The values as `named` has them."""
        if not isinstance(self.values, Mapping):
            return self.values
        known = {CODE: self.commit, **self.values} if self.commit else self.values
        return {**known, CODE: f"{known[CODE]} ({self.asked})"} if self.asked and CODE in known else known

    def _with_asked(self, code: re.Match[str]) -> str:
        return f"{code[0]} ({self.asked})"

    @property
    def shown(self) -> str:
        """The variant as tables show it: anybody may have written it, and of any length."""
        text = "".join(char if char.isprintable() else "?" for char in self.named)
        return shortened(text, _LONGEST_SHOWN)


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous: an IP address of the first node; each node's address and interface in that network."""

    address: str
    port: int
    addresses: tuple[str, ...]  # by node rank
    interfaces: tuple[str, ...]  # by node rank
    probed: bool  # False if connections between the nodes could not be tested


@dataclass(frozen=True)
class NodePlan:
    node: str
    host: str
    rank: int
    first_rank: int  # global rank of its first worker
    processes: int
    container: ContainerSpec
    speed: float = 0.0  # of its interface, in Gb/s; 0: unknown
    rdma: tuple[str, ...] = ()  # its RDMA devices with a link, if NCCL can use them
    efa: bool = False  # they are Amazon's EFA
    gpudirect: str = ""  # "never": its GPUs have none; "loaded": nvidia_peermem is loaded


@dataclass(frozen=True)
class Plan:
    run: RunId
    job: str
    runtime: str
    image: str  # reference
    image_id: str
    code: str  # digest of the code archive
    rendezvous: Rendezvous
    nodes: tuple[NodePlan, ...]  # by rank; the first is the master
    warnings: tuple[str, ...] = ()
    min_nodes: int = 0  # minimum number of nodes with which the run continues; 0: all are required
    spares: int = 0  # number of spare nodes, the last ones: they wait and replace lost nodes

    @property
    def traits(self) -> Traits:
        return TRAITS[self.runtime]

    @property
    def master(self) -> NodePlan:
        return self.nodes[0]

    def node_plan(self, node: str) -> NodePlan:
        """Return the plan of a node; of the first node for a cluster, whose engine manages all nodes."""
        return next((planned for planned in self.nodes if planned.node == node), self.master)

    def to_json(self) -> str:
        indent = 2 if len(self.nodes) <= _READABLE else None  # without indentation, Python writes ten times faster
        return json.dumps(plain(self), indent=indent, sort_keys=True)


def plain(value: Any) -> Any:
    """Return a value of this package as dicts, lists and scalars for JSON."""
    if value is None or isinstance(value, (str, int, float)):  # the most frequent case and the cheapest test
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(plain(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
