"""Interactive shell in a container with the settings of a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from launcher.api.jobs import JobLike, load
from launcher.errors import UsageError
from launcher.job.files import check_files, read_secrets
from launcher.model.forward import parse_forward
from launcher.model.progress import Log
from launcher.node.connect import connect
from launcher.node.ssh.config import chosen_config
from launcher.records.exported import exported
from launcher.records.masking import hide
from launcher.records.snapshot import list_code, pack
from launcher.run.shell import shell


def open_shell(
    job: JobLike,
    node: str | None = None,
    *,
    ports: Sequence[str] = (),
    log: Log = print,
    ssh_config: str | PathLike[str] | None = None,
) -> int:
    """Open a shell in a new container with the job's image, code, mounts, GPUs, variables and secrets.

    Return its exit code. node: name or host; default: the first node. ports: as for Run.exec. The container is removed
    when the shell exits.
    """
    forwards = [parse_forward(text) for text in ports]
    loaded = load(job)
    entry = next((each for each in loaded.machines if node in (None, each.name, each.host)), None)
    if entry is None:
        raise UsageError("--node", f"{node}: the job's nodes are {', '.join(each.name for each in loaded.machines)}")
    with exported(loaded, Path.cwd()) as found:
        check_files(loaded, Path.cwd(), os.environ, found.folder if found else None)
        secrets = read_secrets(loaded, Path.cwd(), os.environ)
        hide(secrets.values())
        code = pack(list_code(loaded, Path.cwd(), log, exported=found), log)
    with connect(
        [pair for pair in loaded.hosts() if pair[0] == entry.name], loaded.runtime, chosen_config(ssh_config)
    ) as fleet:
        return shell(loaded, entry, fleet, code, secrets, forwards, log)
