"""What old runs left on a node: images that we made and nobody uses, output folders of runs that have no container."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.image import leftovers
from launcher.image.leftovers import Leftover
from launcher.model import labels
from launcher.model.plan import is_run_id
from launcher.node.engine import Engine


@dataclass(frozen=True)
class OldOutput:
    """A run's output folder on a node. `size`: bytes of its files; checkpoints are among them."""

    node: str
    path: str
    files: int
    size: int


@dataclass(frozen=True)
class Dirt:
    """What one node holds of runs that are over."""

    engine: Engine
    images: Sequence[Leftover]
    outputs: Sequence[OldOutput]


def find(engine: Engine) -> Dirt:
    """Look, change nothing. A run with a container on the node, running or ended, is left out: `down` is for those."""
    home = posixpath.join(engine.facts().home, ".launcher")
    alive = {state.labels[labels.RUN] for state in engine.list({labels.RUN: None})}
    found: dict[str, list[int]] = {}
    for entry in engine.files.scan(home):
        run = entry.path.partition("/")[0]
        if is_run_id(run) and run not in alive:
            found.setdefault(run, []).append(entry.size)
    outputs = [
        OldOutput(engine.node, posixpath.join(home, run), len(sizes), sum(sizes))
        for run, sizes in sorted(found.items())
    ]
    return Dirt(engine, leftovers.unused(engine), outputs)


def remove(dirt: Dirt) -> None:
    """Remove what was found, and only that."""
    for image in dirt.images:
        leftovers.remove(dirt.engine, image)
    for output in dirt.outputs:
        dirt.engine.files.remove_tree(output.path)
