"""Export an image from an engine's store as an archive for `docker load`, with only the layers that a node lacks.

images/pack.py reads the store directly if permissions allow, otherwise in a container of the image with the store
mounted read-only. An engine that loads its archive never opens layers that it has, so they may be missing.
If this fails, `docker save` is used, which supports every store and always writes the complete image.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ImageShipFailed
from launcher.image.image_locations import image_store
from launcher.image.names import asset
from launcher.model.container import Mount, Tool
from launcher.model.facts import ImageInfo
from launcher.node.connect import LOCAL
from launcher.node.engine import Engine
from launcher.node.machine import PIECE, CommandStream

WHOLE = 1 << 62  # chunk size larger than any image
DONE = "launcher: packed"  # last line of images/pack.py on stderr
_STORE = "docker info --format '{{.DockerRootDir}} {{.Driver}} {{.DriverStatus}}'"
_CONTAINERD = Path("/var/lib/containerd")
_CONTENT = "io.containerd.content.v1.content"
_CLASSIC_DRIVERS = ("overlay2", "fuse-overlayfs")


@dataclass(frozen=True)
class Store:
    """Folders under `root` in which an engine may keep its images; pack.py reads only these."""

    root: Path
    folders: tuple[str, ...]

    def direct(self, *arguments: str) -> list[str]:
        """Return the argv of images/pack.py for a user who can read the engine's files. arguments: the image first."""
        return [sys.executable, "-c", asset("pack.py"), str(self.root), *arguments]

    def tool(self, image: str, *arguments: str) -> Tool:
        """Return images/pack.py in a container, with the Python of the image itself."""
        find = 'for p in python3 python; do command -v "$p" >/dev/null && exec "$p" -c "$0" "$@"; done; exit 3'
        # Not recursive: copies of the mounts of running containers would block the removal of these containers
        mounts = tuple(Mount(str(self.root / name), f"/engine/{name}", read_only=True) for name in self.folders)
        script = (find, asset("pack.py"), "/engine", image, *arguments)
        return Tool(image, script, "probe", mounts, recursive=False)

    def open(self, engine: Engine, *arguments: str) -> CommandStream:
        """Start images/pack.py: as this user, who may read the files of an engine of this machine, or else as root.

        arguments: the image first. Raises NodeUnreachable, NodeUnfit.
        """
        if engine.host == LOCAL and self._readable():
            return engine.machine.open(self.direct(*arguments))
        return engine.tool(self.tool(*arguments))

    def _readable(self) -> bool:
        try:
            return all(any((self.root / name).iterdir()) for name in self.folders)
        except OSError:
            return False


def stores(engine: Engine) -> list[Store]:
    """Return the possible locations of the engine's images, most likely first; empty if unknown."""
    root, _, rest = engine.machine.script(_STORE).out.decode(errors="replace").strip().partition(" ")
    driver, _, status = rest.partition(" ")
    if "io.containerd.snapshotter" in status:  # Docker's own containerd, or that of the machine
        return [Store(folder / _CONTENT, ("blobs",)) for folder in (Path(root, "containerd/daemon"), _CONTAINERD)]
    return [Store(Path(root), ("image", driver))] if driver in _CLASSIC_DRIVERS else []


def export(source: Engine, info: ImageInfo, known: int = 0, chunk: int = WHOLE) -> Generator[bytes, None, None]:
    """Yield one archive of an image; its first `known` layers may be missing. Close the generator to stop early.

    An archive of more than `chunk` bytes of layers may end there, as an image of the layers so far, labelled
    names.PARTIAL. Raises ImageShipFailed, also after the first bytes.
    """
    arguments = info.id, str(known), str(chunk)
    for store in stores(source):
        began, printed = False, b""
        with closing(store.open(source, *arguments)) as process:
            while (output := process.receive(1.0)) is not None:
                printed = (printed + output[1])[-PIECE:]
                if output[0]:
                    began = True
                    yield output[0]
        if began and DONE.encode() not in printed:
            why = printed[-600:].decode(errors="replace").strip() or "the output was cut off"
            raise ImageShipFailed(source.node, f"reading the image's layers failed: {why}", "try again")
        if began:  # else the store is not laid out as expected, or the container cannot start
            return
    yield from image_store(source).save(info.id)
