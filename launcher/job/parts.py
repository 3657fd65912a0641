"""Mappings of the job file below its top level, as frozen values. Field descriptions and examples are what the JSON
Schema and docs/job.md show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.functional_serializers import PlainSerializer, model_serializer

from launcher.job import fields
from launcher.job.problems import BadValueError, LocatedError, printable, show
from launcher.job.scalars import ANY, names_of

MOST_NODES = 100_000


class Part(BaseModel):
    """A mapping of the job file. A key without a value (null) counts as absent and gets its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class Image(Part):
    """The container image that the job runs in."""

    base: fields.Reference | None = Field(
        default=None,
        description="Image to start from: a tag, or a digest (NAME@sha256:...). The launcher tests it, repairs its "
        "torchvision if necessary and installs `packages`. Give exactly one of `base` and `ref`.",
        examples=["nvcr.io/nvidia/pytorch:26.09-py3"],
    )
    ref: fields.Reference | None = Field(
        default=None,
        description="An existing image, used without changes: on the nodes, on this machine or in a registry.",
        examples=["registry.example.org/team/image:1.0"],
    )
    torchvision: fields.TorchVision = Field(
        default="auto",
        description="`auto`: keep the torchvision of `base` if it works, otherwise repair it. `keep`: do not test or "
        "change it. X.Y.Z: install this version.",
        examples=["0.24.0"],
    )
    packages: tuple[fields.Requirement, ...] = Field(
        default=(),
        description="Additional pip requirements, installed under the constraints of `base`. torch is never replaced.",
        examples=[["timm==1.0.20", "wandb"]],
    )

    @model_validator(mode="after")
    def _one_source(self) -> Image:
        if (self.base is None) == (self.ref is None):
            raise BadValueError("give one of base and ref" + ("" if self.base is None else ", not both"))
        for key, changed in (("torchvision", self.torchvision not in ("auto", "keep")), ("packages", self.packages)):
            if self.ref is not None and changed:
                raise LocatedError([((key,), "an image given as ref is not changed; give it as base instead")])
        for index, requirement in enumerate(self.packages):
            name = re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")
            if name in ("torch", "torchvision"):
                fix = "set image.torchvision" if name == "torchvision" else "choose another base"
                raise LocatedError([(("packages", index), f"{name} cannot be installed as a package; {fix}")])
        return self


class NodeEntry(Part):
    """A node of the job."""

    name: fields.NodeName = Field(
        default="",
        description="Name of the node in logs and tables. Default: its host without user and port.",
        examples=["gpu-c"],
    )
    host: fields.Host = Field(
        description="An alias of your ssh config, user@host:port, or `local` for this machine.",
        examples=["trainer@10.0.0.7:2222"],
    )
    gpus: fields.GpusField | None = Field(
        default=None, description="GPUs of this node; overrides the job's `gpus`.", examples=[[0, 1]]
    )
    address: fields.Address | None = Field(
        default=None,
        description="IP address at which the other nodes reach this node. Default: detected.",
        examples=["192.168.7.7"],
    )
    env: fields.Env = Field(
        default={},
        description="Environment variables on this node; they override the job's `env`.",
        examples=[{"NCCL_IB_HCA": "mlx5_0"}],
    )
    args: fields.ArgsField = Field(
        default={},
        description="Arguments of the program on this node; they override those of the same name in `run.args`. The "
        "launcher's trainer accepts other batch sizes on machines of other speeds.",
        examples=[{"batch_size": 96}],
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        return {"host": data} if isinstance(data, (str, int, float)) and not isinstance(data, bool) else data


def nodes_by_number(nodes: Any) -> Any:
    """Replace a number of nodes, such as `nodes: 4`, by as many entries that a cluster chooses the machines for."""
    if isinstance(nodes, bool) or not isinstance(nodes, int):
        return nodes
    if not 1 <= nodes <= MOST_NODES:
        raise BadValueError(f"expected a number of nodes from 1 to {MOST_NODES}, or a list of nodes, not {nodes}")
    return [{"name": f"node-{rank}", "host": ANY} for rank in range(nodes)]


def _with_names(nodes: tuple[NodeEntry, ...]) -> tuple[NodeEntry, ...]:
    """Return the entries with default names added. Raises BadValueError for an empty list."""
    if not nodes:
        raise BadValueError("an empty list; expected at least one node")
    return tuple(
        node if node.name else node.model_copy(update={"name": name})
        for node, name in zip(nodes, names_of([node.host for node in nodes]), strict=True)
    )


def _as_written(nodes: tuple[NodeEntry, ...]) -> int | list[Any]:
    """Return the shortest form: a number, or a list in which default names and mappings of a host alone are omitted."""
    if all(node.host == ANY for node in nodes):
        return len(nodes)
    entries = []
    for node, name in zip(nodes, names_of([node.host for node in nodes]), strict=True):
        entry = node.model_dump(exclude_defaults=True, exclude={"name"} if node.name == name else None)
        entries.append(node.host if set(entry) == {"host"} else entry)
    return entries


Nodes = Annotated[tuple[NodeEntry, ...], AfterValidator(_with_names), PlainSerializer(_as_written)]
NodesOrNumber = Annotated[Nodes, BeforeValidator(nodes_by_number)]


class RunPart(Part):
    """The program that every node runs. Give exactly one of `module`, `script` and `command`."""

    module: fields.ModuleName | None = Field(
        default=None,
        description="A Python module, run by torchrun. `train` is the launcher's own trainer, which is added to the "
        "code unless the code has a module of that name.",
        examples=["train"],
    )
    script: fields.LocalPath | None = Field(
        default=None, description="A Python file in the code folder, run by torchrun.", examples=["path/main.py"]
    )
    command: fields.Argv | None = Field(
        default=None,
        description="Any command, run once per node without torchrun.",
        examples=[["bash", "-c", "nvidia-smi && env"]],
    )
    args: fields.ArgsField = Field(
        default={},
        description="Arguments of the program. In a mapping, `batch_size: 256` becomes `--batch-size 256`, `amp: true` "
        "becomes `--amp`, `false` and `null` are omitted, and a list becomes `--key a b`. A key that begins with a "
        "dash is passed as written: `--batch_size: 256`. So are numbers, and a list of arguments.",
        examples=[{"arch": "resnet50", "epochs": 6, "amp": True}],
    )

    @model_validator(mode="after")
    def _one_program(self) -> RunPart:
        given = [key for key in ("module", "script", "command") if getattr(self, key) is not None]
        if len(given) != 1:
            raise BadValueError(f"give exactly one of module, script, command, not {' and '.join(given) or 'none'}")
        if self.command is not None and not (self.command and self.command[0]):
            raise LocatedError([(("command",), "the command is empty")])
        if self.command is not None and re.match(r"[\w.-]+\s+\S", self.command[0]):
            listed = ", ".join(self.command[0].split())
            raise LocatedError([(("command", 0), f"expected one item per word: [{printable(listed)}, ...]")])
        if self.script is not None and self.script.endswith(".ipynb"):
            fix = f"convert it: jupyter nbconvert --to script {self.script}"
            raise LocatedError([(("script",), f"{self.script} is a notebook, which Python does not run; {fix}")])
        return self


class Secret(Part):
    """A secret: the name of its variable, and the file that contains it (None: the caller's environment does)."""

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
    """What a run needs of each node: limits of its container, and room for its output."""

    memory: fields.Size | None = Field(
        default=None,
        description="Maximum memory. Default: no limit; 8 GiB less than the machine has if its GPU shares it "
        "(DGX Spark).",
        examples=["64g"],
    )
    cpus: fields.Cpus | None = Field(
        default=None, description="Maximum number of CPUs. Default: no limit.", examples=[16]
    )
    shm: fields.Size | None = Field(
        default=None,
        description="Size of /dev/shm. Requires `docker: {ipc: private}` or `{ipc: shareable}`.",
        examples=["16g"],
    )
    output: fields.Size | None = Field(
        default=None,
        description="Free space that the output folder needs, such as for checkpoints. A node with less is refused "
        "before anything is sent or started. Default: not checked.",
        examples=["50g"],
    )


class DockerOptions(Part):
    """Docker options in addition to the container's defaults: host network, `--ipc=host`, all of /dev/infiniband."""

    ipc: Literal["host", "private", "shareable", "none"] = Field(
        default="host",
        description="IPC mode of the container. With `host` it shares the node's /dev/shm, which data loaders need.",
        examples=["private"],
    )
    extra_hosts: Mapping[fields.HostName, fields.HostAddress] = Field(
        default={},
        description="Additional lines of /etc/hosts: host name to IP address, or to `host-gateway`.",
        examples=[{"storage": "10.0.0.9"}],
    )
    devices: tuple[fields.Device, ...] = Field(
        default=(), description="Additional devices: /dev/x[:/dev/y[:rwm]].", examples=[["/dev/fuse"]]
    )
    cap_add: tuple[fields.Capability, ...] = Field(
        default=(), description="Additional Linux capabilities.", examples=[["SYS_PTRACE"]]
    )


class ClusterOptions(Part):
    """Slurm options of this job, with `launcher up --on CLUSTER`. They override those of the settings file."""

    partition: fields.SbatchWord = Field(default="", description="Partition of the nodes.", examples=["gpu"])
    account: fields.SbatchWord = Field(default="", description="Account to charge.", examples=["lab"])
    qos: fields.SbatchWord = Field(default="", description="Quality of service (QOS).", examples=["normal"])
    time: fields.Duration | None = Field(
        default=None,
        description="Time limit. Default: that of the settings file, otherwise derived from `timeout`.",
        examples=["2d"],
    )
    options: tuple[fields.SbatchOption, ...] = Field(
        default=(),
        description="Additional options of sbatch, after those of the settings file.",
        examples=[["--constraint=h100"]],
    )
