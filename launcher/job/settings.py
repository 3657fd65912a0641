"""The user's own settings file: what no job file may say, because it may come from a stranger."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.errors import UsageError
from launcher.job.fields import Duration, SbatchOption, SbatchWord, Size
from launcher.job.problems import nearest
from launcher.model.limits import DEFAULT_LIMITS, settings_file

_FOR_ALL = stat.S_IWGRP | stat.S_IWOTH


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)  # most users have none: it costs nothing


class Notify(_Section):
    """`notify:` of the settings file; each of the two may be left out."""

    command: tuple[str, ...] = Field(default=(), strict=False)  # argv; the notice is JSON on its stdin
    webhook: str = Field(default="", pattern="^(https?://.+)?$")  # gets the notice as a POST


class Limits(_Section):
    """`limits:` of the settings file: what a node may send, so that a broken one fills no disk and keeps no command."""

    file: Size = 4 << 30  # bytes of a file that is collected; a larger one is left on the node. Not for checkpoints
    collect: Duration = 600  # seconds for the files of a node
    answer: Size = DEFAULT_LIMITS.size  # bytes of a command's output, or of what a container engine says
    wait: Duration = int(DEFAULT_LIMITS.seconds)  # seconds for such an answer


Folder = Annotated[str, Field(pattern="^(/[^\x00-\x1f]*)?$")]
_DNS = "^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"
ClusterName = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]{0,62}$")]


class Cluster(_Section):
    """One of `clusters:` of the settings file: where `up --on NAME` runs a job."""

    kind: Literal["slurm"]
    login: str = Field(min_length=1)  # an ssh alias of the machine that has sbatch, or `local`
    workdir: str = Field(pattern="^/[^\x00-\x1f]*$")  # a folder that the login machine and all nodes share
    partition: SbatchWord = ""
    account: SbatchWord = ""
    qos: SbatchWord = ""
    time: Duration | None = None  # what the partition may be asked for; else the job's timeout and five minutes
    options: tuple[SbatchOption, ...] = Field(default=(), strict=False)
    container: Literal["pyxis", "apptainer", "oci", "none"] = "none"
    python: str = Field(default="python3", min_length=1)  # on the nodes: of a virtual environment on the shared folder
    setup: tuple[Annotated[str, Field(pattern=r"^[^\x00-\x1f]*$")], ...] = Field(default=(), strict=False)  # bash
    gpus: int | None = Field(default=None, ge=0)  # of a node: what `gpus: all` means
    cpus_per_gpu: int | None = Field(default=None, ge=1)  # else a job has all processors of its nodes
    at_once: int | None = Field(default=None, ge=1)  # variants of a sweep; else as many as there is room for


class Kubernetes(_Section):
    """One of `clusters:` too, for `export --on NAME` alone: what its manifests say beside the job."""

    kind: Literal["kubernetes"]
    namespace: str = Field(default="", pattern=_DNS)
    queue: str = Field(default="", pattern=_DNS)  # Kueue's LocalQueue
    service_account: str = Field(default="", pattern=_DNS)
    pull_secrets: tuple[Annotated[str, Field(pattern=_DNS)], ...] = Field(default=(), strict=False)
    pod: Mapping[str, Any] = Field(default={})  # merged into the pod's spec: tolerations, nodeSelector, anything


class Settings(_Section):
    """The whole settings file."""

    notify: Notify = Field(default_factory=Notify.model_construct)
    limits: Limits = Field(default_factory=Limits.model_construct)
    clusters: Mapping[ClusterName, Annotated[Cluster | Kubernetes, Field(discriminator="kind")]] = Field(default={})
    # Where nodes keep copies of data, instead of ~/.launcher/data: one folder for all, or by host
    data_root: Folder | Mapping[str, Folder] = ""

    def data_root_of(self, host: str) -> str:
        """ "" for the default."""
        return self.data_root if isinstance(self.data_root, str) else self.data_root.get(host, "")

    def cluster(self, name: str) -> Cluster:
        """Raises UsageError for a name that the file does not have, or that is no Slurm."""
        found = self._named(name)
        if not isinstance(found, Cluster):
            fix = f"launcher export JOB --to jobset --on {name} --image REGISTRY/NAME@sha256:..."
            raise UsageError(f"--on {name}", "is Kubernetes, for which the launcher only writes manifests", fix)
        return found

    def kubernetes(self, name: str) -> Kubernetes:
        """Raises UsageError for a name that the file does not have, or that is no Kubernetes."""
        found = self._named(name)
        if not isinstance(found, Kubernetes):
            raise UsageError(f"--on {name}", "is a Slurm cluster", "--to slurm")
        return found

    def _named(self, name: str) -> Cluster | Kubernetes:
        if name not in self.clusters:
            known = ", ".join(self.clusters) or "none"
            what = f"no such cluster in the settings file, which has: {known}"
            raise UsageError(f"--on {name}", what, "clusters: {NAME: {kind: slurm, login: ..., workdir: /shared/...}}")
        return self.clusters[name]


_read: dict[str, Settings] = {}  # by file, what this process has last read well


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Raises UsageError for a file that is wrong, or that others may write.

    One that was right when this process first read it may be edited meanwhile: then what it said before counts.
    """
    file = settings_file(environ)
    try:
        settings = _read[str(file)] = _read_file(file)
    except UsageError:
        if str(file) not in _read:
            raise
        settings = _read[str(file)]
    return settings


def _read_file(file: Path) -> Settings:
    try:
        status, text = file.stat(), file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Settings.model_construct()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(str(file), f"cannot be read: {error}", "correct it, or remove it") from error
    if status.st_mode & _FOR_ALL or status.st_uid not in (os.geteuid(), 0):
        raise UsageError(str(file), "others may change it, and it names a command", f"chmod 600 {file}")
    try:
        return Settings.model_validate(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise UsageError(str(file), f"is not YAML: {error}", "correct it, or remove it") from error
    except ValidationError as error:
        where, what, fix = _explained(error)
        raise UsageError(f"{file}: {where}", what, fix) from error


def _explained(error: ValidationError) -> tuple[str, str, str]:
    """Where the first mistake is, what it is, and what is known there."""
    first = error.errors()[0]
    where, what = list(first["loc"]), first["msg"]
    fix = "it knows notify.command, notify.webhook, clusters, and file, collect, answer and wait of limits"
    if where[:1] == ["clusters"] and len(where) == 2:
        what, fix = "kind is missing, or is none that is known", "kind: slurm, or kind: kubernetes"
    elif where[:1] == ["clusters"] and len(where) > 2:
        kind = where.pop(2)
        known = (Cluster if kind == "slurm" else Kubernetes).model_fields
        fix = f"a cluster of kind {kind} has {', '.join(known)}"
        if first["type"] == "extra_forbidden":
            what = f"unknown key{nearest(str(where[-1]), known)}"
    return ".".join(map(str, where)), what, fix
