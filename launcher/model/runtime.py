"""What the runtimes of a job differ in. Above `launcher.node`, code asks for these, not for a runtime's name.

A third runtime is a row here, an engine below `launcher.node`, and a value of the key `runtime`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """A runtime: how a node runs the programs of a job."""

    name: str
    has_images: bool  # programs are in an image, which is put on each node; else the node has them
    isolates: bool  # a program sees its own paths, user and devices, and of the node only what is mounted
    has_limits: bool  # the engine sets ulimits, namespaces and devices
    one_machine: bool  # all nodes of a run are this machine, each with its own port


TRAITS = {
    "docker": Traits("docker", has_images=True, isolates=True, has_limits=True, one_machine=False),
    "process": Traits("process", has_images=False, isolates=False, has_limits=False, one_machine=True),
}
