"""Name and folders of a bed, read once from the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

BASE_SUITE = "bookworm"
BASE_IMAGE = f"debian:{BASE_SUITE}-slim"
CONTAINER_PYTHON = "python3.11"  # Debian 12's; the mounted virtual environment must be of the same version
NODE_SUITE = os.environ.get("LAUNCHER_BED_NODE_SUITE", BASE_SUITE)  # whose sshd and Docker the nodes have
NODE_IMAGE = "launcher-bed-node" if NODE_SUITE == BASE_SUITE else f"launcher-bed-node-{NODE_SUITE}"
TRAIN_IMAGE = "launcher-bed-train"
VENV_IN_NODE = "/opt/venv"
SITE_PACKAGES_IN_NODE = f"{VENV_IN_NODE}/lib/{CONTAINER_PYTHON}/site-packages"
TRAINER = "trainer"  # the ssh user: not root, may use docker
NO_DOCKER = "nodocker"  # an ssh user who may not use docker


class BedUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, not a defect
    """The bed cannot run on this machine; the message is one line that a skipped test can print."""


@dataclass(frozen=True)
class Settings:
    """One bed: `name` prefixes its containers and names its network, so that two beds can coexist."""

    name: str
    cache: Path  # the base image's tarball, the engine's log; survives `down`
    state: Path  # keys, known_hosts, ssh config
    venv: Path  # mounted read-only at /opt/venv in every node

    @classmethod
    def from_environment(cls, venv: Path | None = None) -> Settings:
        """LAUNCHER_BED_NAME, LAUNCHER_BED_CACHE, LAUNCHER_BED_DIR; `venv` defaults to the running interpreter's."""
        name = os.environ.get("LAUNCHER_BED_NAME", "launcher-bed")
        cache = Path(os.environ.get("LAUNCHER_BED_CACHE", Path.home() / ".cache" / "launcher-bed"))
        state = Path(os.environ.get("LAUNCHER_BED_DIR", cache / name))
        return cls(name, cache.absolute(), state.absolute(), (venv or Path(sys.prefix)).resolve())

    @property
    def site_packages(self) -> Path:
        """The folder from which training containers import torch."""
        return self.venv / "lib" / CONTAINER_PYTHON / "site-packages"

    def container(self, index: int) -> str:
        """The node's container on this machine's engine; `index` counts from 1."""
        return f"{self.name}-node{index}"
