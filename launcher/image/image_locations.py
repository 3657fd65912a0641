"""Where an image is: in the stores of the nodes' engines and of the caller's own, and whether it is the same image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.errors import ImageShipFailed
from launcher.model.facts import ImageInfo
from launcher.model.progress import Log, OnProgress, no_progress
from launcher.node.engine import Engine
from launcher.node.parallel import on_each

if TYPE_CHECKING:
    from launcher.node.docker.images import DockerImages


@dataclass(frozen=True)
class ImageOnNodes:
    """The image that all nodes have.

    images: by node in the job's order; ids differ between kinds of image stores.
    shipped: bytes sent, by node, only of nodes that lacked the image. why: how this image was chosen.
    """

    reference: str
    images: Mapping[str, ImageInfo]
    built: bool = False
    shipped: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def id(self) -> str:
        """On the first node."""
        return next(iter(self.images.values())).id

    @property
    def ids(self) -> Mapping[str, str]:
        return {node: image.id for node, image in self.images.items()}


@dataclass(frozen=True)
class ImageLocations:
    """The nodes' engines in the job's order and the caller's own Docker, if any; it may be a node too.

    gpus: the job uses some, so that an image is tried on one of them as well.
    """

    nodes: Sequence[Engine]
    local: Engine | None
    log: Log
    on_progress: OnProgress = no_progress
    gpus: bool = True

    def describe(self, *engines: Engine) -> str:
        return ", ".join("this machine" if engine is self.local else engine.node for engine in engines)

    def find(self, name: str) -> dict[Engine, ImageInfo | None]:
        """One `inspect` everywhere at once, a single round trip: the nodes in order, then the caller's engine.

        The caller's image does not count if it is for another architecture than the nodes: that takes another round
        trip if the caller has one and not all nodes have the same.
        """
        engines = [*self.nodes, self.local] if self.local else self.nodes
        found = on_each(engines, lambda engine: image_store(engine).inspect(name))
        theirs = found.get(self.local) if self.local else None
        if self.local and theirs and not all(same_image(found[node], theirs) for node in self.nodes):
            needed = set(on_each(self.nodes, lambda engine: image_store(engine).arch()).values()) - {"", theirs.arch}
            if needed:
                nodes = ", ".join(sorted(needed))
                self.log(f"image {name}: this machine has it for {theirs.arch}, and the nodes are {nodes}")
                found[self.local] = None
        return found


def having(found: Mapping[Engine, ImageInfo | None]) -> list[tuple[Engine, ImageInfo]]:
    """Engines that have the image."""
    return [(engine, info) for engine, info in found.items() if info is not None]


def image_store(engine: Engine) -> DockerImages:
    """Raises ImageShipFailed for plain processes, which have none."""
    if engine.images is None:
        raise ImageShipFailed(engine.node, "has no container engine to hold images", "use runtime: docker nodes")
    return engine.images


def same_image(theirs: ImageInfo | None, info: ImageInfo) -> bool:
    """Whether two stores hold the same image: by id, else by layers and configuration."""
    return theirs is not None and (theirs.id == info.id or (theirs.content == info.content != ""))


def find_same(engine: Engine, info: ImageInfo) -> ImageInfo | None:
    """This very image in an engine's store, under any name or id; None if it is missing."""
    store = image_store(engine)
    found = store.inspect(info.id)
    if same_image(found, info):
        return found
    return next((image for image in store.list({}) if same_image(image, info)), None)
