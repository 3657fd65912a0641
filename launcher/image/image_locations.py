"""Where an image is: in the stores of the nodes' engines and of the caller's own, and whether it is the same image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from launcher.errors import ImageShipFailed
from launcher.model.facts import ImageInfo
from launcher.node.engine import Engine
from launcher.node.parallel import run_all

if TYPE_CHECKING:
    from launcher.node.docker.images import DockerImages

Log = Callable[[str], None]


@dataclass(frozen=True)
class Progress:
    """How far an image is on its way to one node, in bytes. total: an estimate of the layers that the node lacks."""

    node: str
    sent: int
    total: int
    done: bool = False


OnProgress = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """For callers that show nothing."""


@dataclass(frozen=True)
class ImageOnNodes:
    """The image that all nodes have.

    id: on the first node; ids: by node, they differ between kinds of image stores.
    shipped: bytes sent, by node, only of nodes that lacked the image. why: how this image was chosen.
    """

    reference: str
    id: str
    ids: Mapping[str, str] = field(default_factory=dict)
    built: bool = False
    shipped: Mapping[str, int] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class FoundImages:
    """What an `inspect` of one name showed, by node and on the caller's own engine."""

    nodes: tuple[ImageInfo | None, ...]
    local: ImageInfo | None


@dataclass(frozen=True)
class ImageLocations:
    """The nodes' engines in the job's order and the caller's own Docker, if any; it may be a node too."""

    nodes: Sequence[Engine]
    local: Engine | None
    log: Log
    on_progress: OnProgress = no_progress

    def describe(self, *engines: Engine) -> str:
        return ", ".join("this machine" if engine is self.local else engine.node for engine in engines)

    def find(self, name: str) -> FoundImages:
        """One `inspect` everywhere at once: a single round trip."""
        engines = list(self.nodes)
        if self.local is not None and self.local not in engines:
            engines.append(self.local)
        infos = run_all([partial(image_store(engine).inspect, name) for engine in engines])
        local = None if self.local is None else infos[engines.index(self.local)]
        return FoundImages(tuple(infos[: len(self.nodes)]), local)

    def sources(self, found: FoundImages) -> list[tuple[Engine, ImageInfo]]:
        """Engines that have the image, the caller's first, then the nodes in their order."""
        local = [] if self.local is None or found.local is None else [(self.local, found.local)]
        return local + [(e, i) for e, i in zip(self.nodes, found.nodes, strict=True) if i is not None]


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
