"""An image read out of an engine's store as one archive for `docker load`: only the layers that a node lacks.

images/pack.py reads the store itself, here and on a node: directly if we may, otherwise in a container of the image
that sees the store read-only. An engine that loads its archive never opens layers that it has, so they may be missing.
Where that does not work `docker save` is used, which knows every store and always gives the whole image.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ImageShipFailed
from launcher.image.image_locations import image_store
from launcher.image.names import asset
from launcher.model import labels
from launcher.model.facts import ImageInfo
from launcher.node.connect import LOCAL
from launcher.node.engine import Engine
from launcher.node.machine import PIECE

WHOLE = 1 << 62  # a chunk that no image fills
DONE = "launcher: packed"  # what images/pack.py writes to stderr last
_STORE = "docker info --format '{{.DockerRootDir}} {{.Driver}} {{.DriverStatus}}'"
_CONTAINERD = Path("/var/lib/containerd")
_CONTENT = "io.containerd.content.v1.content"
_CLASSIC_DRIVERS = ("overlay2", "fuse-overlayfs")


@dataclass(frozen=True)
class Store:
    """Folders in which an engine may keep its images: all that pack.py reads are these below `root`."""

    root: Path
    folders: tuple[str, ...]

    def direct(self, *arguments: str) -> list[str]:
        """images/pack.py by a user who may read the engine's files."""
        return [sys.executable, "-c", asset("pack.py"), str(self.root), *arguments]

    def container(self, options: Sequence[str], image: str, *arguments: str) -> list[str]:
        """images/pack.py by a user who may use the engine: with the Python of that very image."""
        argv = ["docker", *options, "--user", "0:0", "--userns", "host", "--security-opt", "label=disable"]
        for name in self.folders:
            # Not recursive: mounts of running containers lie below, whose copies would keep them from being removed
            source = f"type=bind,src={self.root / name},dst=/engine/{name},readonly,bind-nonrecursive=true"
            argv += ["--mount", source]
        find = 'for p in python3 python; do command -v "$p" >/dev/null && exec "$p" -c "$0" "$@"; done; exit 3'
        argv += ["--label", f"{labels.PURPOSE}=probe", "--entrypoint", "sh", image, "-c", find]
        return [*argv, asset("pack.py"), "/engine", image, *arguments]


def stores(engine: Engine) -> list[Store]:
    """Where its images may be, best guess first; empty where it is not known."""
    root, _, rest = engine.sh(_STORE).decode(errors="replace").strip().partition(" ")
    driver, _, status = rest.partition(" ")
    if "io.containerd.snapshotter" in status:  # of its own containerd, or of the machine's
        return [Store(folder / _CONTENT, ("blobs",)) for folder in (Path(root, "containerd/daemon"), _CONTAINERD)]
    return [Store(Path(root), ("image", driver))] if driver in _CLASSIC_DRIVERS else []


def export(source: Engine, info: ImageInfo, known: int = 0, chunk: int = WHOLE) -> Generator[bytes, None, None]:
    """One archive of an image; the first `known` of its layers may be missing. Close it to end the reading early.

    If it has more than `chunk` bytes of layers it may end there, as an image of the layers so far, labelled
    names.PARTIAL. Raises ImageShipFailed, also in the middle.
    """
    arguments = info.id, str(known), str(chunk)
    options = ["run", "--rm", "--init", "--log-driver", "none", "--network", "none", "--read-only"]
    for store in stores(source):
        readable = source.host == LOCAL and _readable(store)
        argv = store.direct(*arguments) if readable else store.container(options, *arguments)
        began, words = False, b""
        with closing(source.machine.open(argv)) as process:
            while (output := process.receive(1.0)) is not None:
                words = (words + output[1])[-PIECE:]
                if output[0]:
                    began = True
                    yield output[0]
        if began and DONE.encode() not in words:
            why = words[-600:].decode(errors="replace").strip() or "it broke off"
            raise ImageShipFailed(source.node, f"reading the image's layers failed: {why}", "try again")
        if began:  # else the store is not laid out as expected, or the container cannot start
            return
    yield from image_store(source).save(info.id)


def _readable(store: Store) -> bool:
    try:
        return all(any((store.root / name).iterdir()) for name in store.folders)
    except OSError:
        return False
