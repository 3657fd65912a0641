"""An engine's image store, and whether it has a certain image: in stores of different kinds that has different ids."""

from __future__ import annotations

from launcher.errors import ImageShipFailed
from launcher.node.engine import Engine, ImageInfo, Images


def store(engine: Engine) -> Images:
    """The image store of an engine that has one. Raises ImageShipFailed for plain processes."""
    if engine.images is None:
        raise ImageShipFailed(engine.node, "has no container engine to hold images", "use runtime: docker nodes")
    return engine.images


def same(theirs: ImageInfo | None, info: ImageInfo) -> bool:
    """Whether two stores hold the same image: by id, else by layers and configuration."""
    if theirs is None:
        return False
    return theirs.id == info.id or (theirs.content == info.content != "")


def locate(engine: Engine, info: ImageInfo) -> ImageInfo | None:
    """This image as the engine's store has it, whatever it is called there; None where it is not."""
    images = store(engine)
    found = images.inspect(info.id)
    if same(found, info):
        return found
    return next((image for image in images.list({}) if same(image, info)), None)
