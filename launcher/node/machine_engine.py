"""What an engine of any runtime does through its machine alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.errors import EngineFailed, NodeUnfit
from launcher.model.facts import Reach
from launcher.node import facts, shm_cleanup
from launcher.node.files import Files
from launcher.node.machine import Done, Machine, run_script


class MachineEngine:
    """The part of Engine that knows no containers."""

    def __init__(self, node: str, host: str, machine: Machine) -> None:
        self.node = node
        self.host = host
        self.machine = machine
        self.files = Files(machine)

    def sweep_shared_memory(self, since: float) -> Sequence[str]:
        done = run_script(self.machine, shm_cleanup.SCRIPT, str(math.floor(since)))
        if done.code:
            raise EngineFailed(self.node, f"could not look through /dev/shm: {done.complaint}")
        return shm_cleanup.removed(done.out)

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        return self.machine.reach(address, port, timeout, expect)

    def sh(self, script: str, *arguments: str, timeout: float = 60) -> bytes:
        return run_script(self.machine, script, *arguments, timeout=timeout).out

    def host_key(self) -> str | None:
        return self.machine.host_key()

    def ssh_port(self) -> int | None:
        return self.machine.ssh_port()

    def _look(self) -> tuple[facts.Look, Done]:
        """Raises NodeUnfit when the script did not run to its end."""
        done = run_script(self.machine, facts.script())
        seen = facts.parse(done.out)
        if not seen.complete or seen.uid < 0 or not seen.home:
            what = f"its shell does not run our script (exit code {done.code}): {done.complaint[-300:]}"
            test = f"`echo 'echo works' | ssh {self.host} sh -s` must print works"
            raise NodeUnfit(self.node, what, test if self.machine.host_key() else "is HOME set?")
        return seen, done
