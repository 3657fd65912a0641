"""Copies a source to nodes; returns the path of the data on each of them."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.filesize import decimal

from launcher.errors import DataFailed, NodesFailed
from launcher.features.data.download import HERE, Downloaded, Variables, download
from launcher.features.data.locations import DataSource, copies, copy_path, resolve_source, root_of, shared
from launcher.features.data.push import Delivered, Endpoint, Sender, push
from launcher.job.settings import read_settings
from launcher.model.facts import NodeFacts
from launcher.model.progress import Log, OnProgress
from launcher.node.connect import LOCAL, connect
from launcher.node.engine import Engine
from launcher.node.machine import LocalMachine
from launcher.node.parallel import run_all
from launcher.records.masking import fsspec_values, hide


@dataclass(frozen=True)
class DataNode:
    """A connected node, and the parameters of a container on it. image: the id of an image that it has."""

    engine: Engine
    facts: NodeFacts
    image: str
    address: str | None = None

    def endpoint(self, root: str) -> Endpoint:
        return Endpoint(self.engine, self.facts, root, self.image, self.address)


@dataclass(frozen=True)
class Distributed:
    """paths: of the data on each node, to be mounted. delivered: the statistics; empty if no node needed a copy."""

    paths: Mapping[str, str]
    delivered: Delivered = field(default_factory=Delivered)
    downloaded: Downloaded = field(default_factory=Downloaded)

    def said(self) -> str:
        """How the data came to the nodes; "" if it was there."""
        received = {node: decimal(size) for node, size in self.delivered.received.items() if size}
        if by := self.downloaded.by:
            size = decimal(self.downloaded.size)
            now = (
                "" if self.downloaded.received == self.downloaded.size else f", {decimal(self.downloaded.received)} now"
            )
            to = f", copied to {len(received)} node{'s' * (len(received) > 1)}" if received else ""
            unchecked = self.downloaded.unchecked
            which = f" for {unchecked:,} files" if unchecked > 1 else ""
            without = f"; the server gave no checksum{which}" if unchecked else ""
            return f"downloaded once by {by} ({size}{now}){to}{without}"
        return "copied " + ", ".join(f"{size} to {node}" for node, size in received.items()) if received else ""


def distribute(
    source: DataSource,
    nodes: Sequence[DataNode],
    ssh_config: str | None,
    log: Log,
    on_progress: OnProgress,
    *,
    rehash: bool = False,
    variables: Variables | None = None,
) -> Distributed:
    """Copy the data to every node that does not have the source. Raises NodesFailed with all nodes that failed.

    rehash: use no known hashes of the source. variables: of the download, if the source is a URL.
    """
    settings, downloaded = read_settings(os.environ), Downloaded()
    if source.url:
        variables = variables or Variables()
        hide([*variables.secrets.values(), *fsspec_values({**os.environ, **variables.env})])
        found = run_all([partial(root_of, node.engine, settings) for node in nodes])
        ends = [node.endpoint(root) for node, root in zip(nodes, found, strict=True)]
        source, downloaded = download(source, ends, variables, log, on_progress)
        if downloaded.by == HERE:
            log(f"the download stays on {HERE} until `launcher data rm` removes it: {source.path}")
    holders = [node for node in nodes if has_source(source, node.engine)]
    with ExitStack() as held:
        if source.host and not holders:
            fleet = held.enter_context(connect([(source.host, source.host)], "docker", ssh_config))
            holder = DataNode(fleet.engines[0], fleet.engines[0].facts(), nodes[0].image)
        elif source.host:
            holder = holders[0]
        if source.host:
            path, folder = resolve_source(holder.engine, source.path)
            endpoint = holder.endpoint(root_of(holder.engine, settings, copies=False))
            machine, single = holder.engine.machine, "" if folder else posixpath.basename(path)
        else:
            path, endpoint, machine = source.path, None, LocalMachine("this machine", "")
            single = "" if Path(path).is_dir() else Path(path).name
        origin = Sender(source, machine, path, single, endpoint, rehash)
        paths = {node.engine.node: path for node in holders}
        targets = [node for node in nodes if node not in holders]
        if not targets:
            return Distributed(paths, Delivered(source.content), downloaded)
        roots = run_all([partial(root_of, node.engine, settings) for node in targets])
        first = shared([node.engine for node in targets], roots)
        pairs = list(zip(targets, roots, strict=True))
        endpoints = [node.endpoint(root) for number, (node, root) in enumerate(pairs) if first[number] == number]
        delivered = push(origin, endpoints, log, on_progress)
    for number, (node, root) in enumerate(pairs):
        if targets[first[number]].engine.node not in delivered.failed:
            paths[node.engine.node] = copy_path(root, delivered.content, single)
    if delivered.failed:
        raise NodesFailed(list(delivered.failed.values()), of=len(nodes))
    return Distributed(paths, delivered, downloaded)


def has_source(source: DataSource, engine: Engine) -> bool:
    """Whether this node has the source; it then uses the data in place. A URL is on none before it is downloaded."""
    if source.url and not source.path:
        return False
    return source.host in (engine.host, engine.node) if source.host else engine.host == LOCAL


def with_image_of_copy(node: DataNode, root: str, content: str) -> DataNode:
    """Return the node with its image, or else the image that made its copy. Raises DataFailed if both are missing."""
    images = [node.image, *(copy.image for copy in copies(node.engine, root) if copy.name == content)]
    for image in filter(None, images):
        if node.engine.images and node.engine.images.inspect(image):
            return DataNode(node.engine, node.facts, image, node.address)
    raise DataFailed(node.engine.node, "the image that made the copy was removed", "choose another: --image IMAGE")
