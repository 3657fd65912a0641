"""Find an image in the stores of the nodes' engines and of the caller's own, and compare images."""

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

    images: by node in the job's order; IDs differ between kinds of image stores.
    shipped: bytes sent, by node, for nodes that lacked the image. why: the reason for the choice of this image.
    """

    reference: str
    images: Mapping[str, ImageInfo]
    built: bool = False
    shipped: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def id(self) -> str:
        """ID of the image on the first node."""
        return next(iter(self.images.values())).id

    @property
    def ids(self) -> Mapping[str, str]:
        return {node: image.id for node, image in self.images.items()}


@dataclass(frozen=True)
class ImageLocations:
    """The nodes' engines in the job's order and the caller's own Docker, if any, which may also be a node.

    gpus: the job uses GPUs, so images are also checked on a GPU.
    """

    nodes: Sequence[Engine]
    local: Engine | None
    log: Log
    on_progress: OnProgress = no_progress
    gpus: bool = True
    misfits: dict[str, str] = field(default_factory=dict)  # why this machine's image of a name is not used

    def describe(self, *engines: Engine) -> str:
        return ", ".join("this machine" if engine is self.local else engine.node for engine in engines)

    def find(self, name: str) -> dict[Engine, ImageInfo | None]:
        """Inspect the image on all engines concurrently, in one round trip: nodes in order, then the caller's engine.

        The caller's image is ignored if it is for another architecture than the nodes. This check takes another round
        trip if the caller has an image and not all nodes have the same.
        """
        engines = [*self.nodes, self.local] if self.local else self.nodes
        found = on_each(engines, lambda engine: image_store(engine).inspect(name))
        theirs = found.get(self.local) if self.local else None
        if self.local and theirs and not all(same_image(found[node], theirs) for node in self.nodes):
            needed = set(on_each(self.nodes, lambda engine: image_store(engine).arch()).values()) - {"", theirs.arch}
            if needed:
                nodes = ", ".join(sorted(needed))
                self.misfits[name] = f"this machine has it for {theirs.arch}, but the nodes need {nodes}"
                self.log(f"image {name}: {self.misfits[name]}")
                found[self.local] = None
        return found


def having(found: Mapping[Engine, ImageInfo | None]) -> list[tuple[Engine, ImageInfo]]:
    """Return the engines that have the image."""
    return [(engine, info) for engine, info in found.items() if info is not None]


def image_store(engine: Engine) -> DockerImages:
    """Return the engine's image store. Raises ImageShipFailed for plain processes, which have none."""
    if engine.images is None:
        raise ImageShipFailed(engine.node, "has no container engine to store images", "set `runtime: docker`")
    return engine.images


def same_image(theirs: ImageInfo | None, info: ImageInfo) -> bool:
    """Whether two stores hold the same image: by id, else by layers and configuration."""
    return theirs is not None and (theirs.id == info.id or (theirs.content == info.content != ""))


def find_same(engine: Engine, info: ImageInfo) -> ImageInfo | None:
    """Return exactly this image from an engine's store, under any name or ID, or None."""
    store = image_store(engine)
    found = store.inspect(info.id)
    if same_image(found, info):
        return found
    return next((image for image in store.list({}) if same_image(image, info)), None)
