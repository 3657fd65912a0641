"""What the user asked for: the job file as frozen values. Field descriptions are the JSON Schema's documentation.

Every validator takes the form that a user writes and its own normal form. Keys that exclude each other: `explain`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from pydantic.functional_serializers import PlainSerializer, model_serializer

from launcher.job import fields
from launcher.job.problems import BadValueError, LocatedError, Mark, Origin, Path, Problem, refusal, show
from launcher.job.scalars import ANY, Gpus, names_of, whole

MOST_NODES = 100_000
MOST_VARIANTS = 10_000
ELASTIC = {"restarts": 10, "lost_after": "15s"}  # defaults with min_nodes


class Part(BaseModel):
    """A mapping of the job file. A key without a value (null) counts as left out, so that it has its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class Image(Part):
    """The environment that the job runs in."""

    base: fields.Reference | None = Field(
        default=None,
        description="Image to start from: a tag, or tag@sha256:... It is checked, repaired and extended as asked.",
    )
    ref: fields.Reference | None = Field(default=None, description="An existing image, used as it is. Instead of base.")
    torchvision: fields.TorchVision = Field(
        default="auto",
        description="auto: keep the base's if it works, else make it work; keep: leave it and check nothing; "
        "X.Y.Z: have this version.",
    )
    packages: tuple[fields.Requirement, ...] = Field(
        default=(),
        description="Extra pip requirements, installed under the base's own constraints. torch is never replaced.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Image:
        if (self.base is None) == (self.ref is None):
            raise BadValueError("give one of base and ref" + ("" if self.base is None else ", not both"))
        for key, changed in (("torchvision", self.torchvision not in ("auto", "keep")), ("packages", self.packages)):
            if self.ref is not None and changed:
                raise LocatedError([((key,), "an image given by ref is used as it is; give it as base to change it")])
        for index, requirement in enumerate(self.packages):
            name = re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")
            if name in ("torch", "torchvision"):
                fix = "set image.torchvision" if name == "torchvision" else "choose another base"
                raise LocatedError([(("packages", index), f"{name} is not installed as a package; {fix}")])
        return self


class NodeEntry(Part):
    """One machine of the job; the first of them is the master and has rank 0."""

    name: fields.NodeName = Field(
        default="", description="What the node is called in logs and tables. Default: its host, without user and port."
    )
    host: fields.Host = Field(description="An alias of the ssh config, user@host:port, or local.")
    gpus: fields.GpusField | None = Field(default=None, description="This node's GPUs, instead of the job's.")
    address: fields.Address | None = Field(
        default=None, description="Its IP address as the other nodes reach it. Default: found by trying."
    )
    env: fields.Env = Field(default={}, description="Environment variables on this node, over the job's.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        return {"host": data} if isinstance(data, (str, int, float)) and not isinstance(data, bool) else data


def _by_number(nodes: Any) -> Any:
    """`nodes: 4` is four of a cluster's."""
    if isinstance(nodes, bool) or not isinstance(nodes, int):
        return nodes
    if not 1 <= nodes <= MOST_NODES:
        raise BadValueError(f"expected a number of nodes from 1 to {MOST_NODES}, or their names, not {nodes}")
    return [{"name": f"node-{rank}", "host": ANY} for rank in range(nodes)]


def _every_combination(sweep: Any) -> Any:
    """`{grid: {lr: [0.1, 0.4], batch_size: [128, 256]}}` is a variant for each combination; the last option varies
    first.
    """
    if not isinstance(sweep, Mapping):
        return sweep
    if set(sweep) != {"grid"}:
        raise BadValueError(f"expected a list of variants, or {{grid: {{lr: [0.1, 0.4]}}}}, not {show(sweep)}")
    grid = sweep["grid"]
    if not isinstance(grid, Mapping) or not grid:
        raise LocatedError([(("grid",), f"expected a mapping of options to lists of values, not {show(grid)}")])
    wrong = [key for key, values in grid.items() if not isinstance(values, (list, tuple)) or not values]
    if wrong:
        raise LocatedError([(("grid", key), f"expected a list of values, not {show(grid[key])}") for key in wrong])
    if (size := math.prod(map(len, grid.values()))) > MOST_VARIANTS:
        raise LocatedError([(("grid",), f"has {size:,} combinations; expected {MOST_VARIANTS:,} at most")])
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _with_names(nodes: tuple[NodeEntry, ...]) -> tuple[NodeEntry, ...]:
    """The entries, each with its own name or its default one. Raises BadValueError for an empty list."""
    if not nodes:
        raise BadValueError("an empty list; expected one node or more")
    return tuple(
        node if node.name else node.model_copy(update={"name": name})
        for node, name in zip(nodes, names_of([node.host for node in nodes]), strict=True)
    )


def _as_written(nodes: tuple[NodeEntry, ...]) -> int | list[Any]:
    """Without the names that follow from the hosts; a host by itself where nothing else is said of a node."""
    if all(node.host == ANY for node in nodes):
        return len(nodes)
    entries = []
    for node, name in zip(nodes, names_of([node.host for node in nodes]), strict=True):
        entry = node.model_dump(exclude_defaults=True, exclude={"name"} if node.name == name else None)
        entries.append(node.host if set(entry) == {"host"} else entry)
    return entries


Nodes = Annotated[tuple[NodeEntry, ...], AfterValidator(_with_names), PlainSerializer(_as_written)]


class Run(Part):
    """What is run on every node."""

    module: fields.ModuleName | None = Field(
        default=None,
        description="A module, run by torchrun as python -m would. train: the launcher's own, unless the code has one.",
    )
    script: fields.LocalPath | None = Field(
        default=None, description="A Python file inside the code folder, run by torchrun."
    )
    command: fields.Argv | None = Field(default=None, description="Any command, run once a node, without torchrun.")
    args: fields.ArgsField = Field(
        default={},
        description="Its arguments. A mapping: k: v gives --k v, underscores become dashes, true gives --k, false and "
        "null nothing, a list --k a b. A list is used as it is.",
    )

    @model_validator(mode="after")
    def _one_thing(self) -> Run:
        given = [key for key in ("module", "script", "command") if getattr(self, key) is not None]
        if len(given) != 1:
            raise BadValueError(f"give exactly one of module, script, command, not {' and '.join(given) or 'none'}")
        if self.command is not None and not (self.command and self.command[0]):
            raise LocatedError([(("command",), "an empty command")])
        return self


class Secret(Part):
    """A secret: its variable's name, and the file that holds it (None: the caller's environment does)."""

    name: fields.EnvName = Field(description="The environment variable's name.")
    file: fields.LocalPath | None = Field(default=None, description="A file that only its owner may read.")

    @model_validator(mode="before")
    @classmethod
    def _from_entry(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if isinstance(data, Mapping) and len(data) == 1:
            (name, file), *_ = data.items()
            if not isinstance(file, str):
                raise BadValueError(f"expected the path of a file, not {show(file)}")
            return {"name": name, "file": file}
        raise BadValueError(f"expected NAME or {{NAME: file}}, not {show(data)}")

    @model_serializer
    def _entry(self) -> str | dict[str, str]:
        return {self.name: self.file} if self.file else self.name


class Resources(Part):
    """Limits of each node's container."""

    memory: fields.Size | None = Field(default=None, description="Most memory, such as 64g. Default: no limit.")
    cpus: fields.Cpus | None = Field(default=None, description="Most CPUs, such as 16 or 1.5. Default: no limit.")
    shm: fields.Size | None = Field(default=None, description="Size of /dev/shm, such as 16g; only without --ipc=host.")


class DockerOptions(Part):
    """What the container defaults do not do."""

    ipc: Literal["host", "private", "shareable", "none"] = Field(
        default="host",
        description="The container's IPC mode. host: it shares the node's /dev/shm, as data loaders need.",
    )
    extra_hosts: Mapping[fields.HostName, fields.HostAddress] = Field(
        default={}, description="Lines for /etc/hosts: name to IP address."
    )
    devices: tuple[fields.Device, ...] = Field(default=(), description="Further devices, /dev/x[:/dev/y[:rwm]].")
    cap_add: tuple[fields.Capability, ...] = Field(default=(), description="Further capabilities, such as SYS_PTRACE.")


class ClusterOptions(Part):
    """What this job asks of Slurm, over the settings of the cluster."""

    partition: fields.SbatchWord = Field(default="", description="The partition of the nodes.")
    account: fields.SbatchWord = Field(default="", description="The account that is charged.")
    qos: fields.SbatchWord = Field(default="", description="The quality of service (QOS).")
    time: fields.Duration | None = Field(
        default=None, description="Slurm's time limit, such as 2d. Default: the cluster's, else by timeout."
    )
    options: tuple[fields.SbatchOption, ...] = Field(
        default=(), description="Further options of sbatch, after those of the cluster."
    )


class Job(Part):
    """A job of the launcher: which code runs in which environment on which machines."""

    name: fields.JobName = Field(
        description="The job's name: small letters, digits and dashes. A run's id begins with it."
    )
    runtime: Literal["docker", "process"] = Field(
        default="docker",
        description="docker: containers. process: plain processes on this machine, with the caller's Python.",
    )
    image: Image | None = Field(
        default=None, description="The environment. Needed for runtime docker, unused for process."
    )
    code: fields.LocalPath = Field(
        default=".", description="Folder put into every container at /workspace/code, the working directory."
    )
    nodes: Annotated[Nodes, BeforeValidator(_by_number)] = Field(
        json_schema_extra={"minItems": 1},
        description="The machines; the first is the master and has rank 0. Each once; only local may repeat, under "
        "runtime process. For a cluster (--on) their number is enough. {pool: [a, b, c, d], each: 1}: machines for the "
        "variants of a sweep, each on so many of them.",
    )
    gpus: fields.GpusField = Field(
        default="all", description="GPUs of each node: all, none, how many (idle ones), or a list of indices or UUIDs."
    )
    processes: fields.Processes = Field(default="auto", description="Workers a node. auto: one a GPU, one without.")
    run: Run = Field(description="What is run on every node.")
    mounts: fields.Mounts = Field(
        default=(),
        description="Folders of the node in the container: {/on/node: /in/container:ro}; :rw is the default.",
    )
    data: fields.DataSets = Field(
        default=(),
        description="Data that every node has before the start, read-only: {name: {from: ./here or host:/path, "
        "at: /in/container}}. A node gets a verified copy; on the node that it comes from it is used in place.",
    )
    env: fields.Env = Field(default={}, description="Environment variables, passed on as written.")
    secrets: tuple[Secret, ...] = Field(
        default=(), description="NAME: taken from the caller's environment; {NAME: file}: from a file with mode 0600."
    )
    output: fields.ContainerPath = Field(
        default="/output",
        description="Folder inside the container for what the run writes; on the node a fresh one a run.",
    )
    restarts: fields.Restarts = Field(
        default=0, description="How often the run may be restarted in total. Default with min_nodes: 10."
    )
    min_nodes: fields.MinNodes | None = Field(
        default=None,
        description="Go on with at least so many nodes when machines are lost; 2 x min_nodes > nodes + spares. "
        "Default: all are needed.",
    )
    spares: Nodes | None = Field(
        default=None, description="Machines that wait, ready, and take the place of a lost one."
    )
    lost_after: fields.Duration | None = Field(
        default=None,
        description="A node that has been silent for so long is lost. With min_nodes, default 15s: the others go on. "
        "With a pool, default 5m: another one runs its variant.",
    )
    port: fields.Port = Field(default=29500, description="The port of the rendezvous, on the first node.")
    timeout: fields.Duration | None = Field(
        default=None, description="Most time for the whole job, such as 24h. Default: none."
    )
    hang_timeout: fields.Duration | None = Field(
        default=None, description="So long without output and without a step is a failure, such as 15m. Default: none."
    )
    resources: Resources = Field(default_factory=Resources, description="Limits of each node's container.")
    docker: DockerOptions = Field(default_factory=DockerOptions, description="What the container defaults do not do.")
    cluster: ClusterOptions = Field(
        default_factory=ClusterOptions, description="With --on a Slurm cluster: what this job asks of it."
    )
    sweep: Annotated[tuple[fields.ArgsField, ...], BeforeValidator(_every_combination)] = Field(
        default=(),
        description="Variants of run.args, run as one group: a list, or {grid: {lr: [0.1, 0.4], batch_size: [128, "
        "256]}} for every combination.",
    )
    each: Annotated[int, BeforeValidator(whole("a number of nodes", 1, MOST_NODES))] | None = Field(
        default=None,
        description="With a sweep: `nodes` is a pool, and a variant runs on so many of them. nodes: {pool: [...], "
        "each: 1} says the same.",
    )

    _origin: Origin = PrivateAttr(default_factory=Origin)

    def model_post_init(self, context: Any) -> None:
        """context: the `Origin` of a job that was loaded from a file."""
        if isinstance(context, Origin):
            self._origin = context

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_min_nodes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("min_nodes") is None:
            return data
        return {**ELASTIC, **{key: value for key, value in data.items() if value is not None or key not in ELASTIC}}

    @property
    def machines(self) -> tuple[NodeEntry, ...]:
        """The nodes, then the spares: all that a container is made on, by rank."""
        return self.nodes + (self.spares or ())

    def gpus_of(self, node: NodeEntry) -> Gpus:
        return self.gpus if node.gpus is None else node.gpus

    def env_of(self, node: NodeEntry) -> dict[str, str]:
        return {**self.env, **node.env}

    @property
    def file(self) -> FilePath | None:
        """The job file; None for a job that is of no file."""
        return self._origin.file

    def hosts(self) -> list[tuple[str, str]]:
        """Name and host of every machine, by rank. Raises JobInvalid where the job says only how many."""
        if any(node.host == ANY for node in self.machines):
            what = "a number is for a cluster, which chooses the machines; name it: --on CLUSTER. Or list nodes: [a, b]"
            self.refuse([(("nodes",), what)])
        return [(node.name, node.host) for node in self.machines]

    def mark(self, path: Path) -> Mark:
        """Where a key, or its nearest parent, was written; the job's name for a job that is of no file."""
        return self._origin.where(path) or Mark(f"job {self.name}")

    def refuse(self, problems: Iterable[tuple[Path, str]]) -> None:
        """Raises JobInvalid with all of them, if there are any."""
        if found := [Problem(self.mark(path), path, message) for path, message in problems]:
            raise refusal(found)
