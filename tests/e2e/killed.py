"""The launcher, killed with SIGKILL at an exact moment: `python -m tests.e2e.killed WHEN ARGS...`.

WHEN is `before:NAME:N` or `after:NAME:N`: the N-th call of that method of the nodes' engines, not counting calls for
probes; `before:probe-NAME:N` counts only calls for probes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from launcher.cli.main import main
from launcher.node.docker.engine import DockerEngine
from launcher.node.docker.images import DockerImages
from launcher.node.process.engine import ProcessEngine
from launcher.node.ssh.machine import SshMachine

PLACES = {"connect": (SshMachine, "_transport"), "name_image": (DockerImages, "tag")}
PLACES |= {f"{name}_process": (ProcessEngine, name) for name in ("create", "start", "remove")}


def place(name: str) -> tuple[type, str]:
    """The class and its method."""
    return PLACES.get(name, (DockerEngine, name.removeprefix("probe-")))


def arm(when: str) -> None:
    edge, name, count = when.split(":")
    owner, attribute = place(name)
    local = threading.local()
    probe = DockerEngine.run_probe

    def in_probe(*args: Any, **kwargs: Any) -> Any:
        local.probe = True
        try:
            return probe(*args, **kwargs)
        finally:
            local.probe = False

    DockerEngine.run_probe = in_probe  # type: ignore[method-assign]
    real = getattr(owner, attribute)
    calls, lock = [0], threading.Lock()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if getattr(local, "probe", False) != name.startswith("probe-"):
            return real(*args, **kwargs)
        with lock:
            calls[0] += 1
            mine = calls[0] == int(count)
        if mine and edge == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return real(*args, **kwargs)
        finally:
            if mine and edge == "after":
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, attribute, wrapped)


if __name__ == "__main__":
    arm(sys.argv[1])
    sys.argv = ["launcher", *sys.argv[2:]]
    main()
