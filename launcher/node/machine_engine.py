"""What an engine of any runtime does through its machine alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.errors import NodeUnfit
from launcher.model.facts import Reach
from launcher.node import facts, shm_cleanup
from launcher.node.files import Files
from launcher.node.machine import Machine, run_script

UID = 'echo "@@uid $(id -u)"'  # marked: a login shell may print lines of its own


class MachineEngine:
    """The part of Engine that knows no containers."""

    def __init__(self, node: str, host: str, machine: Machine) -> None:
        self.node = node
        self.host = host
        self.machine = machine
        self.files = Files(machine)
        self._uid: int | None = None  # once it is known

    def uid(self) -> int:
        if self._uid is None:
            found = re.search(rb"@@uid ([0-9]{1,10})\n", self.sh(UID))
            if found is None:
                raise NodeUnfit(self.node, "its shell does not tell the uid of its user", "look at its login shell")
            self._uid = int(found.group(1))
        return self._uid

    def look(self) -> facts.Look:
        """Raises NodeUnfit, NodeUnreachable."""
        seen = facts.look(self.machine, self.host)
        self._uid = seen.node.uid
        return seen

    def sweep_shared_memory(self, since: float) -> Sequence[str]:
        return shm_cleanup.sweep(self.machine, since)

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        return self.machine.reach(address, port, timeout, expect)

    def sh(self, script: str, *arguments: str, timeout: float | None = None) -> bytes:
        return run_script(self.machine, script, *arguments, timeout=timeout).out

    def host_key(self) -> str | None:
        return self.machine.host_key()

    def most_sessions(self) -> int | None:
        return self.machine.most_sessions()
