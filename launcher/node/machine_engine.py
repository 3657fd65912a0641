"""What an engine of any runtime does through its machine alone."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.model.facts import Reach
from launcher.node import shm_cleanup
from launcher.node.files import Files
from launcher.node.machine import Machine, run_script


class MachineEngine:
    """The part of Engine that knows no containers."""

    def __init__(self, node: str, host: str, machine: Machine) -> None:
        self.node = node
        self.host = host
        self.machine = machine
        self.files = Files(machine)

    def sweep_shared_memory(self, since: float) -> Sequence[str]:
        return shm_cleanup.sweep(self.machine, since)

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        return self.machine.reach(address, port, timeout, expect)

    def sh(self, script: str, *arguments: str, timeout: float = 60) -> bytes:
        return run_script(self.machine, script, *arguments, timeout=timeout).out

    def host_key(self) -> str | None:
        return self.machine.host_key()

    def most_sessions(self) -> int | None:
        return self.machine.most_sessions()
