"""The user's settings file, for settings that a job file may not have, as it may come from someone else."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from launcher.errors import JobInvalid, UsageError
from launcher.features import FEATURES
from launcher.job.document import compose
from launcher.job.fields import Duration, SbatchOption, SbatchWord, Size, matching, parse_webhook, schema
from launcher.job.problems import BadValueError, Path, Positions, Problem, expected, nearest, refusal, unknown_key
from launcher.job.scalars import whole
from launcher.local_files import open_regular
from launcher.model.limits import DEFAULT_LIMITS, settings_file

_FOR_ALL = stat.S_IWGRP | stat.S_IWOTH


class _Section(BaseModel):
    """A key without a value (null) counts as absent and gets its default, as in a job file."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)  # most users have no settings file

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


Count = Annotated[int, PlainValidator(whole("a number", 1, 10**9)), schema(type="integer", minimum=1)]
GpuCount = Annotated[int, PlainValidator(whole("a number of GPUs", 0, 1024)), schema(type="integer", minimum=0)]


class Notify(_Section):
    """Notification when a run ends. A job file cannot set it."""

    command: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Command to run. It receives a JSON object with run, state, exit_code and text on stdin, and the "
        "variables LAUNCHER_RUN and LAUNCHER_STATE. `~/` at the start of an item is your home folder.",
        examples=[["notify-send", "launcher"]],
    )
    webhook: Annotated[str, BeforeValidator(parse_webhook)] = Field(
        default="",
        description="URL that receives the same JSON object as a POST request.",
        examples=["https://chat.example.org/hooks/1"],
    )

    @field_validator("command")
    @classmethod
    def _program(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if command and not command[0]:
            raise BadValueError("expected a program as its first item, not ''")
        return command


class Limits(_Section):
    """Limits on what a node may send, so that a faulty node can neither fill the disk nor block a command."""

    file: Size = Field(
        default=4 << 30,
        description="Maximum size of each file that is collected or followed, at least 6m. Larger files stay on the "
        "node, with a warning. For checkpoints the free disk space is the limit.",
        examples=["4g"],
    )
    collect: Duration = Field(
        default=600, description="Maximum time to collect all new files of a node.", examples=["10m"]
    )
    answer: Size = Field(
        default=DEFAULT_LIMITS.size,
        description="Maximum size of the output of a command on a node, and of a response of its container engine, at "
        "least 6m. Images are not limited.",
        examples=["64m"],
    )
    data_files: Count = Field(
        default=1_000_000,
        description="Maximum number of files below a URL of data.",
        examples=[5_000_000],
    )
    wait: Duration = Field(
        default=int(DEFAULT_LIMITS.seconds), description="Maximum time to wait for such a response.", examples=["60s"]
    )


Folder = Annotated[str, matching(r"(/[^\x00-\x1f]*)?", "an absolute path")]
_DNS = "[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_NAME = "[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
KubernetesName = Annotated[str, matching(f"({_DNS})?", "a name of lower-case letters, digits, - and .")]
LabelKey = Annotated[str, matching(f"({_DNS}/)?{_NAME}", "a label's key, such as team or example.org/team")]
LabelValue = Annotated[str, matching(f"({_NAME})?", "a label's value: at most 63 letters, digits, _, . and -")]
ClusterName = Annotated[
    str, matching("[a-z0-9][a-z0-9-]{0,62}", "a name of at most 63 lower-case letters, digits and dashes")
]


class Cluster(_Section):
    """A Slurm cluster, on which `launcher up --on NAME` runs a job."""

    kind: Literal["slurm"] = Field(description="Slurm.", examples=["slurm"])
    login: Annotated[str, matching(".+", "a machine")] = Field(
        description="Machine that has sbatch: an alias of your ssh config, or `local`.",
        examples=["hpc-login"],
    )
    workdir: Annotated[str, matching(r"/[^\x00-\x1f]*", "an absolute path")] = Field(
        description="Folder that the login machine and all nodes share. Runs are in WORKDIR/.launcher/RUN.",
        examples=["/shared/ada"],
    )
    partition: SbatchWord = Field(default="", description="Partition of the nodes.", examples=["gpu"])
    account: SbatchWord = Field(default="", description="Account to charge.", examples=["lab"])
    qos: SbatchWord = Field(default="", description="Quality of service (QOS).", examples=["normal"])
    time: Duration | None = Field(
        default=None,
        description="Time limit. Default: the job's `timeout` plus five minutes, otherwise that of the partition.",
        examples=["2d"],
    )
    options: tuple[SbatchOption, ...] = Field(
        default=(), strict=False, description="Additional options of sbatch.", examples=[["--constraint=h100"]]
    )
    container: Literal["pyxis", "apptainer", "oci", "none"] = Field(
        default="none", description="How containers are run. `oci`: `srun --container`.", examples=["pyxis"]
    )
    python: Annotated[str, matching(".+", "a program")] = Field(
        default="python3",
        description="Python interpreter on the nodes for jobs without containers.",
        examples=["/shared/ada/venv/bin/python"],
    )
    setup: tuple[Annotated[str, matching(r"[^\x00-\x1f]*", "one line of text")], ...] = Field(
        default=(),
        strict=False,
        description="Lines of bash to execute before the nodes start.",
        examples=[["source /etc/profile.d/modules.sh", "module load cuda"]],
    )
    gpus: GpuCount | None = Field(
        default=None, description="GPUs per node, the meaning of `gpus: all` in a job.", examples=[8]
    )
    cpus_per_gpu: Count | None = Field(
        default=None, description="CPUs per GPU. Default: all CPUs of the nodes (`--exclusive`).", examples=[12]
    )
    at_once: Count | None = Field(
        default=None,
        description="Maximum number of variants of a sweep that run at the same time. Default: no limit.",
        examples=[4],
    )


class Kubernetes(_Section):
    """A Kubernetes cluster, for the manifests that `launcher export --on NAME` prints."""

    kind: Literal["kubernetes"] = Field(description="Kubernetes.", examples=["kubernetes"])
    namespace: KubernetesName = Field(default="", description="Namespace.", examples=["team"])
    queue: KubernetesName = Field(default="", description="LocalQueue of Kueue.", examples=["gpus"])
    service_account: KubernetesName = Field(default="", description="Service account.", examples=["trainer"])
    pull_secrets: tuple[KubernetesName, ...] = Field(
        default=(), strict=False, description="Secrets with which images are pulled.", examples=[["registry"]]
    )
    gpus: GpuCount | None = Field(
        default=None, description="GPUs per node, the meaning of `gpus: all` in a job.", examples=[8]
    )
    labels: Mapping[LabelKey, LabelValue] = Field(
        default={},
        description="Labels of the JobSet or Job and of its pods, as for Kueue's priority class, or a team's costs.",
        examples=[{"team": "vision", "kueue.x-k8s.io/priority-class": "high"}],
    )
    annotations: Mapping[LabelKey, str] = Field(
        default={},
        description="Annotations of the same, as for Kueue's topology.",
        examples=[{"kueue.x-k8s.io/podset-required-topology": "cloud.provider.com/topology-block"}],
    )
    ttl: Duration | None = Field(
        default=None,
        description="Time after its end at which Kubernetes removes the JobSet or Job with its pods. Default: never.",
        examples=["1d"],
    )
    pod: Mapping[str, Any] = Field(
        default={},
        description="Merged into the pod specification: tolerations, nodeSelector and others; lists by `name`.",
        examples=[{"nodeSelector": {"pool": "h100"}}],
    )


class Settings(_Section):
    """The settings file."""

    notify: Notify = Field(default_factory=Notify.model_construct)
    limits: Limits = Field(default_factory=Limits.model_construct)
    clusters: Mapping[ClusterName, Annotated[Cluster | Kubernetes, Field(discriminator="kind")]] = Field(
        default={}, description="Clusters by name."
    )
    data_root: Folder | Mapping[str, Folder] = Field(
        default="",
        description="Folder in which nodes keep copies of data sets, instead of ~/.launcher/data: one for all nodes, "
        "or a mapping of host to folder.",
        examples=["/scratch/launcher"],
    )

    def data_root_of(self, host: str) -> str:
        """ "" for the default."""
        return self.data_root if isinstance(self.data_root, str) else self.data_root.get(host, "")

    def cluster(self, name: str) -> Cluster:
        """Return a Slurm cluster. Raises UsageError if the file has no Slurm cluster of that name."""
        found = self._named(name)
        if not isinstance(found, Cluster):
            fix = f"launcher export JOB --to jobset --on {name} --image REGISTRY/NAME@sha256:..."
            raise UsageError(
                f"--on {name}", "is a Kubernetes cluster, for which the launcher only writes manifests", fix
            )
        if not any(found.kind in feature.clusters for feature in FEATURES.values()):
            raise UsageError(f"--on {name}", f"this launcher has no clusters of kind {found.kind}", "install all of it")
        return found

    def kubernetes(self, name: str) -> Kubernetes:
        """Return a Kubernetes cluster. Raises UsageError if the file has no Kubernetes cluster of that name."""
        found = self._named(name)
        if not isinstance(found, Kubernetes):
            raise UsageError(f"--on {name}", "is a Slurm cluster", "--to slurm")
        return found

    def _named(self, name: str) -> Cluster | Kubernetes:
        if name not in self.clusters:
            known = nearest(name, self.clusters) or f"; known clusters: {', '.join(self.clusters) or 'none'}"
            what = f"no such cluster in {settings_file(os.environ)}{known}"
            fix = f"add it there: clusters: {{{name}: {{kind: slurm, login: ..., workdir: /shared/...}}}}"
            raise UsageError(f"--on {name}", what, fix)
        return self.clusters[name]


_MODELS: Mapping[Path, type[BaseModel]] = {(): Settings, ("notify",): Notify, ("limits",): Limits}
_KINDS: Mapping[str, type[BaseModel]] = {"slurm": Cluster, "kubernetes": Kubernetes}
_FIX = "correct or remove it"

_read: dict[str, Settings] = {}  # last settings that were used in this process, by file


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings. Raises UsageError if the file is invalid or others may write it.

    If the file becomes invalid while this process runs, the last valid settings are used.
    """
    file = settings_file(environ)
    settings, wrong = _read_file(file)
    if wrong is None:
        _read[str(file)] = settings
    elif str(file) not in _read:
        raise wrong
    return _read[str(file)]


def use_valid_settings(environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """In this process, use what is valid of the file: what stops or cleans must not depend on the rest.

    warn: called with what is wrong, once.
    """
    file = settings_file(environ)
    settings, wrong = _read_file(file)
    if wrong is not None and str(file) not in _read:
        _read[str(file)] = settings
        warn(f"{wrong.where}: {wrong.what}\nthis command uses what is valid of the file")


def _read_file(file: FilePath) -> tuple[Settings, UsageError | None]:
    """Return what is valid of the file, and what is wrong with it."""
    nothing = Settings.model_construct()
    try:
        with open_regular(file) as opened:
            status, text = os.fstat(opened.fileno()), opened.read().decode()
    except FileNotFoundError:
        return nothing, None
    except (OSError, UnicodeDecodeError) as error:
        return nothing, UsageError(str(file), f"cannot be read: {error}", _FIX)
    if status.st_uid not in (os.geteuid(), 0):
        what = f"belongs to another user (uid {status.st_uid}), who could have a command run as you"
        fix = f"read it, then run: sudo chown {os.geteuid()} {shlex.quote(str(file))}"
        return nothing, UsageError(str(file), what, fix)
    if status.st_mode & _FOR_ALL:
        what = "is writable by others, who could have a command run as you"
        return nothing, UsageError(str(file), what, f"run: chmod 600 {shlex.quote(str(file))}")
    try:
        root, problems = compose(text, str(file))
    except JobInvalid as error:
        return nothing, UsageError(error.where, error.what, _FIX)
    if root is None or root.value is None:
        return nothing, None
    settings, found = _valid(root.plain())
    positions, known = Positions(root.marks()), {problem.path for problem in problems}
    problems += (Problem(positions.where(at) or root.mark, at, text) for at, text in found if at not in known)
    if not problems:
        return settings, None
    refused = refusal(problems)
    return settings, UsageError(refused.where, refused.what, "all keys: docs/job.md#the-settings-file")


def _valid(data: Any) -> tuple[Settings, list[tuple[Path, str]]]:
    """Return the settings without the keys that are invalid, and the problems of these."""
    problems: list[tuple[Path, str]] = []
    while True:
        try:
            return Settings.model_validate(data), problems
        except ValidationError as error:
            found = list(_explained(error))
        problems = problems or found
        data = _without(data, found[0][0]) or {}


def _without(data: Any, path: Path) -> Any:
    """Return the mapping without this key, or without the mapping that lacks it; None if nothing is left."""
    if not path or not isinstance(data, dict) or path[0] not in data:
        return None
    inner = _without(data[path[0]], path[1:])
    return {key: value if key != path[0] else inner for key, value in data.items() if key != path[0] or inner} or None


def _explained(error: ValidationError) -> Iterator[tuple[Path, str]]:
    """Yield path and message of every error."""
    for detail in error.errors(include_url=False):
        path: Path = tuple(part for part in detail["loc"] if part != "[key]")
        models = dict(_MODELS)
        if path[:1] == ("clusters",) and len(path) > 2:
            models[path[:2]] = _KINDS[str(path[2])]
            path = (*path[:2], *path[3:])
        cause = detail.get("ctx", {}).get("error")
        if path[:1] == ("data_root",):
            yield path[:1], "expected an absolute path, or a mapping of hosts to such paths"
        elif isinstance(cause, ValueError):
            yield path, str(cause)
        elif detail["type"] == "extra_forbidden":
            yield path, "unknown key" + unknown_key(str(path[-1]), models[path[:-1]].model_fields)
        elif detail["type"] == "union_tag_not_found":
            yield (*path, "kind"), f"required key is missing; expected {' or '.join(_KINDS)}"
        else:
            yield path, expected(detail, list(models[path].model_fields) if path in models else ())
