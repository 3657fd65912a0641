"""The address plan of a bed."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True)
class Addresses:
    """Fixed addresses in the bed's /24."""

    subnet: ipaddress.IPv4Network

    def node(self, index: int) -> str:
        """The address of node `index`, counted from 1."""
        return str(self.subnet[10 + index])

    @property
    def blackhole(self) -> str:
        """Answers ARP, drops everything else: a connection to it hangs until the client gives up."""
        return str(self.subnet[250])

    @property
    def no_route(self) -> str:
        """An unused address: the kernel reports "no route to host" after about 3 s."""
        return str(self.subnet[251])
