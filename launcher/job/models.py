"""The job file as frozen values. Field descriptions and examples are what the JSON Schema and docs/job.md show.

Every validator accepts the form that a user writes and its own normal form. Conflicting keys: `explain`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from launcher.job import fields
from launcher.job.arguments import merged
from launcher.job.parts import (
    MOST_NODES,
    ClusterOptions,
    DockerOptions,
    Image,
    NodeEntry,
    Nodes,
    NodesOrNumber,
    Part,
    Resources,
    RunPart,
    Secret,
)
from launcher.job.problems import BadValueError, LocatedError, Mark, Path, Positions, Problem, refusal, show
from launcher.job.scalars import ANY, Args, Gpus, whole
from launcher.model.runtime import TRAITS, Traits

MOST_VARIANTS = 10_000
MOST_CODES = 1_000
PORTS = range(29500, 29564)  # of which a run uses a free one, unless the job gives its port
ELASTIC = {"restarts": 10, "lost_after": "15s"}  # defaults with min_nodes


def is_commit(text: str) -> bool:
    """Return whether a text is the full name of a commit."""
    return re.fullmatch("[0-9a-f]{40}([0-9a-f]{24})?", text) is not None


def _every_combination(sweep: Any) -> Any:
    """Return the variants of `{grid: {lr: [0.1, 0.4], batch_size: [128, 256]}}`, one per combination; the last option
    varies fastest.
    """
    if not isinstance(sweep, Mapping):
        return sweep
    if set(sweep) != {"grid"}:
        raise BadValueError(f"expected a list of variants, or {{grid: {{lr: [0.1, 0.4]}}}}, not {show(sweep)}")
    grid = sweep["grid"]
    if not isinstance(grid, Mapping) or not grid:
        raise LocatedError([(("grid",), f"expected a mapping of options to lists of values, not {show(grid)}")])
    if wrong := [found for key, values in grid.items() for found in _wrong_values(("grid", key), values)]:
        raise LocatedError(wrong)
    if (size := math.prod(map(len, grid.values()))) > MOST_VARIANTS:
        raise LocatedError([(("grid",), f"has {size:,} combinations; expected at most {MOST_VARIANTS:,}")])
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _wrong_values(path: Path, values: Any) -> Iterator[tuple[Path, str]]:
    """Yield the problems of an option's values in a grid."""
    if not isinstance(values, (list, tuple)):
        yield path, f"expected a list of values, not {show(values)}"
    elif not values:
        yield path, "an empty list; expected at least one value"
    else:
        seen = set[str]()
        for index, value in enumerate(values):
            text = repr(getattr(value, "text", value))
            if text in seen:
                yield (*path, index), f"{show(value)} is listed twice: remove one of them"
            seen.add(text)


class Job(Part):
    """A job: which code runs in which environment on which machines."""

    name: fields.JobName = Field(
        description="Name of the job: up to 63 lower-case letters, digits and dashes. Run IDs start with it, and "
        "`launcher logs NAME` finds the latest run of the job.",
        examples=["imagenet"],
    )
    runtime: Literal["docker", "process"] = Field(
        default="docker",
        description="`docker`: a container on every node. `process`: processes on this machine without Docker, under "
        "the Python interpreter that runs the launcher; every entry of `nodes` is then `local`.",
        examples=["process"],
    )
    image: Image | None = Field(
        default=None,
        description="The container image. It contains Python, CUDA and torch, but not your code. Required with "
        "`runtime: docker`, not used with `runtime: process`.",
        examples=[{"base": "nvcr.io/nvidia/pytorch:26.09-py3", "packages": ["timm==1.0.20"]}],
    )
    code: fields.LocalPath = Field(
        default=".",
        description="Folder that is copied to every node; in the container it is /workspace/code, the working "
        "directory. A relative path is relative to the directory in which the launcher is called. runs/, .git, caches, "
        "virtual environments, private keys, known credential files and what `.dockerignore`, `.gitignore` or git's "
        "own lists (`.git/info/exclude`, `core.excludesFile`) exclude are not copied; files that git tracks are "
        "excluded by `.dockerignore` only.",
        examples=["./project"],
    )
    revision: fields.Revision | None = Field(
        default=None,
        description="A commit, branch or tag of the git repository with the folder `code`: that folder as it is there "
        "is copied, without touching the checkout. All of its files count as tracked.",
        examples=["HEAD~1"],
    )
    nodes: NodesOrNumber = Field(
        json_schema_extra={"minItems": 1},
        description="The machines: aliases of your ssh config, user@host:port, or `local` for this machine. The first "
        "one is the master and has rank 0. An entry with its own settings is a mapping. Each machine may be listed "
        "once; only `local` may be repeated, with `runtime: process`. For a cluster (`--on`) a number is enough: "
        "`nodes: 4`. With a sweep, `{pool: [a, b, c, d], each: 1}` names machines that share the variants.",
        examples=[["gpu-a", "gpu-b"], ["gpu-a", {"host": "trainer@10.0.0.7:2222", "name": "gpu-c", "gpus": [0, 1]}]],
    )
    gpus: fields.GpusField = Field(
        default="all",
        description="GPUs of each node: `all`, `none`, a number of idle GPUs, or a list of indices or UUIDs.",
        examples=[2, [0, 2]],
    )
    processes: fields.Processes = Field(
        default="auto",
        description="Workers per node. `auto`: one per GPU, or one on a node without GPUs.",
        examples=[4],
    )
    run: RunPart = Field(
        examples=[{"module": "train", "args": {"data": "/data/imagenet", "arch": "resnet50", "batch_size": 256}}],
    )
    mounts: fields.Mounts = Field(
        default=(),
        description="Folders of the nodes that are mounted into the containers: `{/on/the/node: /in/the/container}`. "
        "`~/` is the ssh user's home on each node. Append `:ro` to mount read-only.",
        examples=[{"/data/imagenet": "/data/imagenet:ro"}],
    )
    data: fields.DataSets = Field(
        default=(),
        description="Data sets that every node gets, verified, before the run starts; read-only in the containers. "
        "The node that has the source uses it in place, the others get a copy that later runs share. A URL is "
        "downloaded by one node, with the job's `env` and `secrets`.",
        examples=[
            {"imagenet": {"from": "gpu-a:/data/imagenet.pack", "at": "/data/imagenet.pack"}},
            {"imagenet": {"from": "s3://bucket/imagenet.pack", "at": "/data/imagenet.pack"}},
        ],
    )
    env: fields.Env = Field(
        default={},
        description="Environment variables, passed as written: `~` and `${HOME}` are not expanded.",
        examples=[{"OMP_NUM_THREADS": "4"}],
    )
    secrets: tuple[Secret, ...] = Field(
        default=(),
        description="Environment variables with secret values, which are never written to the job file, a command "
        "line, a label or a log. `NAME`: the value of the caller's environment. `{NAME: file}`: the content of a file "
        "that only its owner may read (`chmod 600`). A value of fewer than 4 characters is refused, "
        "as it cannot be masked in the output.",
        examples=[["WANDB_API_KEY", {"HF_TOKEN": "~/.secrets/hf"}]],
    )
    cache: fields.Flag = Field(
        default=True,
        description="Keep what torch.compile, Triton, CUDA and the trainer's decoder compile at run time, per image "
        "and machine, in `~/.launcher/cache` of the ssh user, for the next run. With `runtime: process` they use the "
        "user's own caches.",
        examples=[False],
    )
    models: fields.Flag = Field(
        default=False,
        description="Keep downloaded models and data sets (HF_HOME, TORCH_HOME) in `~/.launcher/cache/models` of the "
        "ssh user on each node, so that the next run does not download them again.",
        examples=[True],
    )
    output: fields.ContainerPath = Field(
        default="/output",
        description="Folder in the container for the output of the program: checkpoints and TensorBoard logs. On the "
        "node it is a new folder for every run.",
        examples=["/results"],
    )
    restarts: fields.Restarts = Field(
        default=0,
        description="How often the run may be restarted in total after a process has failed. The trainer resumes from "
        "its last checkpoint. Default with `min_nodes`: 10.",
        examples=[3],
    )
    min_nodes: fields.MinNodes | None = Field(
        default=None,
        description="Continue with at least this many nodes when machines are lost, including the first one. It must "
        "be more than half of nodes and spares together. Default: all nodes are needed.",
        examples=[2],
    )
    spares: Nodes | None = Field(
        default=None,
        description="Machines on standby, with the image and their GPUs, that replace lost nodes. Requires "
        "`min_nodes`. Entries are written as those of `nodes`.",
        examples=[["gpu-c"]],
    )
    lost_after: fields.Duration | None = Field(
        default=None,
        description="A node that has not responded for this long is considered lost. With `min_nodes` (default 15s) "
        "the others continue without it; with a pool (default 5m) another machine runs its variant.",
        examples=["30s"],
    )
    port: fields.Port = Field(
        default=PORTS[0],
        description="Rendezvous port on the first node; with `min_nodes` on every node. If it is not given and "
        f"{PORTS[0]} is in use, the next free one up to {PORTS[-1]}: several jobs can run on the same machines.",
        examples=[29600],
    )
    timeout: fields.Duration | None = Field(
        default=None,
        description="Maximum duration of the run, enforced on the nodes. Default: no limit.",
        examples=["24h"],
    )
    budget: fields.Duration | None = Field(
        default=None,
        description="How long the program may train: the run ends so long after the first step in `metrics.jsonl`, or, "
        "if it has none, after the program's start, and is then done; its last values are its result. Also written "
        "into the sweep: `sweep: {budget: 5m, grid: {...}}`. Default: no limit.",
        examples=["5m"],
    )
    hang_timeout: fields.Duration | None = Field(
        default=None,
        description="The run fails if it prints nothing and completes no step for this long. The error names the "
        "collective operation in which the ranks wait, and the missing rank. Default: no limit.",
        examples=["15m"],
    )
    resources: Resources = Field(
        default_factory=Resources,
        examples=[{"memory": "64g", "cpus": 16}],
    )
    docker: DockerOptions = Field(
        default_factory=DockerOptions,
        examples=[{"devices": ["/dev/fuse"], "cap_add": ["SYS_PTRACE"]}],
    )
    cluster: ClusterOptions = Field(
        default_factory=ClusterOptions,
        examples=[{"partition": "gpu", "time": "2d"}],
    )
    sweep: Annotated[tuple[fields.ArgsField, ...], BeforeValidator(_every_combination)] = Field(
        default=(),
        description="Variants of `run.args`, each run separately; together they are a group. A list of variants, or "
        "`{grid: {lr: [0.1, 0.4], batch_size: [128, 256]}}` for every combination. `{code: [main, ../worktree], "
        "grid: {...}}`, with or without a grid: with the code of each of these git revisions and folders.",
        examples=[[{"batch_size": 128}, {"batch_size": 256}], {"grid": {"lr": [0.1, 0.4], "batch_size": [128, 256]}}],
    )
    codes: Annotated[tuple[fields.Code, ...], Field(max_length=MOST_CODES)] = Field(
        default=(),
        description="With a sweep: the code of its variants, each a revision of the repository with the folder `code`, "
        "or a folder to use instead of `code`. Each is combined with all of `sweep`. `sweep: {code: [...]}` is "
        "equivalent.",
        examples=[["main", "HEAD", "../worktree"]],
    )
    each: Annotated[int, BeforeValidator(whole("a number of nodes", 1, MOST_NODES))] | None = Field(
        default=None,
        description="With a sweep: `nodes` is a pool, and each variant runs on this many of its machines. `nodes: "
        "{pool: [...], each: 1}` is equivalent.",
        examples=[1],
    )

    _origin: Positions = PrivateAttr(default_factory=Positions)
    _commits: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        """context: the `Positions` of a job that was loaded from a file."""
        if isinstance(context, Positions):
            self._origin = context

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_min_nodes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("min_nodes") is None:
            return data
        return {**ELASTIC, **{key: value for key, value in data.items() if value is not None or key not in ELASTIC}}

    @property
    def traits(self) -> Traits:
        return TRAITS[self.runtime]

    @property
    def ports(self) -> Sequence[int]:
        """Ports that the rendezvous may use, in this order."""
        return (self.port,) if "port" in self.model_fields_set else PORTS

    @property
    def machines(self) -> tuple[NodeEntry, ...]:
        """Nodes and spares, by rank: all machines that get a container."""
        return self.nodes + (self.spares or ())

    @property
    def commits(self) -> Mapping[str, str]:
        """The commits and folders of `revision` and `codes` by the texts that the job file has; {} until they are
        looked up.
        """
        return self._commits

    def at_commits(self, revision: str | None, codes: Sequence[str], commits: Mapping[str, str]) -> Job:
        """Return the job with commits in place of its revisions. commits: as the property."""
        job = self.model_copy(update={"revision": revision, "codes": tuple(codes)})
        job._commits = commits  # noqa: SLF001 - of the new job
        return job

    def gpus_of(self, node: NodeEntry) -> Gpus:
        return self.gpus if node.gpus is None else node.gpus

    def env_of(self, node: NodeEntry) -> dict[str, str]:
        return {**self.env, **node.env}

    def args_of(self, node: NodeEntry) -> Args:
        return merged(self.run.args, node.args) if node.args else self.run.args

    @property
    def file(self) -> FilePath | None:
        """The job file; None for a job that was not loaded from a file."""
        return self._origin.file

    @property
    def is_of_file(self) -> bool:
        """Whether its file alone gives this job: without options, and unchanged since it was loaded."""
        return self == self._origin.of_file

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `up` with which the job file gives this job: --set and --nodes."""
        return self._origin.options

    def hosts(self) -> list[tuple[str, str]]:
        """Return name and host of every machine, by rank. Raises JobInvalid if the job has only a number of nodes."""
        if any(node.host == ANY for node in self.machines):
            what = "a number of nodes requires a cluster, which chooses them: --on CLUSTER. Or list nodes: [a, b]"
            self.refuse([(("nodes",), what)])
        return [(node.name, node.host) for node in self.machines]

    def mark(self, path: Path) -> Mark:
        """Return the position of a key or its nearest parent; the job's name if the job was not loaded from a file."""
        return self._origin.where(path) or Mark(f"job {self.name}")

    def refuse(self, problems: Iterable[tuple[Path, str]]) -> None:
        """Raise JobInvalid with all problems, if any."""
        if found := [Problem(self.mark(path), path, message) for path, message in problems]:
            raise refusal(found)
