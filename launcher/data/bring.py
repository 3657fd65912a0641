"""From a source and nodes to the path that the data has on each of them."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launcher.data.places import Source, as_mounted, copies, real_source, root_of, shared
from launcher.data.push import Delivered, Origin, Place, push
from launcher.errors import DataFailed, NodesFailed
from launcher.job.settings import read_settings
from launcher.model.facts import NodeFacts
from launcher.model.progress import Log, OnProgress
from launcher.node.connect import LOCAL, connect
from launcher.node.engine import Engine
from launcher.node.machine import LocalMachine
from launcher.node.parallel import run_all


@dataclass(frozen=True)
class Node:
    """A connected node, and what a container on it is made of. image: an id that it has."""

    engine: Engine
    facts: NodeFacts
    image: str
    address: str | None = None

    def place(self, root: str) -> Place:
        return Place(self.engine.machine, self.facts, root, self.image, self.address)


@dataclass(frozen=True)
class Brought:
    """paths: of the data on each node, as it is to be mounted. delivered: None where nothing had to be looked at."""

    paths: Mapping[str, str]
    delivered: Delivered = field(default_factory=Delivered)


def bring(source: Source, nodes: Sequence[Node], ssh_config: str | None, log: Log, on_progress: OnProgress) -> Brought:
    """The same data on every node. Raises NodesFailed with every node that did not get it; the others have it then."""
    settings = read_settings(os.environ)
    home = [node for node in nodes if is_home(source, node.engine)]
    with ExitStack() as held:
        if source.host and not home:
            fleet = held.enter_context(connect([(source.host, source.host)], "docker", ssh_config))
            begin = Node(fleet.engines[0], fleet.engines[0].facts(), nodes[0].image)
        elif source.host:
            begin = home[0]
        if source.host:
            path, folder = real_source(begin.engine, source.path)
            place = begin.place(root_of(begin.engine, settings, copies=False))
            machine, single = begin.engine.machine, "" if folder else posixpath.basename(path)
        else:
            path, place, machine = source.path, None, LocalMachine("this machine", "")
            single = "" if Path(path).is_dir() else Path(path).name
        origin = Origin(source, machine, path, single, place)
        paths = {node.engine.node: path for node in home}
        targets = [node for node in nodes if node not in home]
        if not targets:
            return Brought(paths)
        roots = run_all([partial(root_of, node.engine, settings) for node in targets])
        first = shared([node.engine for node in targets], roots)
        pairs = list(zip(targets, roots, strict=True))
        places = [node.place(root) for number, (node, root) in enumerate(pairs) if first[number] == number]
        delivered = push(origin, places, log, on_progress)
    for number, (node, root) in enumerate(pairs):
        if targets[first[number]].engine.node not in delivered.failed:
            paths[node.engine.node] = as_mounted(root, delivered.content, single)
    if delivered.failed:
        raise NodesFailed(list(delivered.failed.values()), of=len(nodes))
    return Brought(paths, delivered)


def is_home(source: Source, engine: Engine) -> bool:
    """Whether this node has the source, so that the data is used in place."""
    return source.host in (engine.host, engine.node) if source.host else engine.host == LOCAL


def copy_of(node: Node, root: str, content: str) -> Node:
    """The node with the image that its copy was made with. Raises DataFailed where it has none of them any more."""
    images = [node.image, *(copy.image for copy in copies(node.engine, root) if copy.name == content)]
    for image in filter(None, images):
        if node.engine.images and node.engine.images.inspect(image):
            return Node(node.engine, node.facts, image, node.address)
    raise DataFailed(node.engine.node, "the image that the copy was made with is gone", "name one: --image IMAGE")
