"""Images that we made and nobody uses any more: what `launcher clean` may remove, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from launcher.image import labels
from launcher.image.export import PARTIAL
from launcher.image.reference import OURS
from launcher.image.stores import store
from launcher.node.engine import Engine, ImageInfo


@dataclass(frozen=True)
class Leftover:
    """An image on one node. `size`: of all its layers, also those that other images share."""

    node: str
    image: ImageInfo

    @property
    def name(self) -> str:
        return ", ".join(self.image.tags) or self.image.id[7:19]


def unused(engine: Engine, keep: Collection[str] = ()) -> Sequence[Leftover]:
    """What we made on this engine, and parts of images that never became whole, that nobody uses.

    That is: no container on it is of that image, and `keep` does not have its id. An image that somebody gave a name of
    his own is his.
    """
    if engine.images is None:
        return ()
    images = store(engine)
    made = [*images.list({labels.MADE: None}), *images.list({PARTIAL: None})]
    used = {container.image for container in engine.list({})} if made else set()
    return tuple(
        Leftover(engine.node, image)
        for image in made
        if image.id not in used and image.id not in keep and all(tag.startswith(OURS) for tag in image.tags)
    )


def remove(engine: Engine, leftover: Leftover) -> None:
    """Take its names away, and with the last one the image; a layer that another image needs stays."""
    images = store(engine)
    for name in leftover.image.tags or (leftover.image.id,):
        images.remove(name)
