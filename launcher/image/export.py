"""An image read out of an engine's store, as an archive for `docker load`: layer by layer if possible, otherwise whole.

`docker save` of an engine's classic store first writes the whole image to disk. On the caller's own machine we read the
layers themselves instead (images/pack.py): directly if we may, otherwise through a container of the image that sees the
store read-only. Where neither works `docker save` is used, which knows every store.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ImageShipFailed
from launcher.image.image_locations import image_store
from launcher.image.names import asset
from launcher.model import labels
from launcher.model.facts import ImageInfo
from launcher.node.engine import Engine

PIECE = 1 << 20
WHOLE = 1 << 62  # a chunk that no image fills
CLI_TIMEOUT = 20.0
STORE_COMMAND = ["docker", "info", "--format", "{{.DockerRootDir}}\n{{.Driver}}"]
LOCAL = "local"  # Engine.host of the caller's own machine


@dataclass(frozen=True)
class Store:
    """Where an engine keeps its images in the classic way, and by which driver."""

    root: Path
    driver: str


def export(source: Engine, info: ImageInfo, known: int = 0, chunk: int = WHOLE) -> Generator[bytes, None, None]:
    """The archive of an image; the first `known` of its layers may be missing. Close it to end the reading early.

    It may come as several archives, each of `chunk` bytes or a little more, the lower layers first: all but the last
    are images, labelled names.PARTIAL, of the layers so far. Raises ImageShipFailed, also in the middle.
    """
    store, began = classic_store() if source.host == LOCAL else None, False
    if store is not None:
        readable = os.access(store.root / "image" / store.driver / "layerdb", os.R_OK | os.X_OK)
        read = read_directly if readable else read_in_container
        for piece in read(info.id, store, known, chunk):
            began = True
            yield piece
    if not began:
        yield from image_store(source).save(info.id)


def read_directly(image: str, store: Store, known: int, chunk: int = WHOLE) -> Generator[bytes, None, None]:
    """As a user who may read the engine's files. Nothing at all if they are not laid out as expected."""
    argv = [sys.executable, "-c", asset("pack.py"), str(store.root), image, str(known), str(chunk)]
    with _running(argv, subprocess.PIPE) as process:
        assert process.stdout is not None
        yield from _pieces(process.stdout.fileno(), process)


def read_in_container(image: str, store: Store, known: int, chunk: int = WHOLE) -> Generator[bytes, None, None]:
    """As a user who may use the engine, through a container of that very image. Nothing if that fails."""
    with tempfile.TemporaryDirectory(prefix="launcher-pack-") as folder:
        pipe = Path(folder) / "pipe"
        os.mkfifo(pipe)
        argv = container_argv(image, store, str(pipe), known, chunk)
        # Not blocking: the container may never start. Closed before it is waited for: so that its writing ends.
        with (
            _running(argv, subprocess.DEVNULL) as process,
            os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as reader,
        ):
            while not select.select([reader], [], [], 0.1)[0]:
                if process.poll() is not None:
                    return
            os.set_blocking(reader.fileno(), True)
            yield from _pieces(reader.fileno(), process)


def container_argv(image: str, store: Store, pipe: str, known: int, chunk: int) -> list[str]:
    """A container of the image itself that sees the engine's store read-only, and a pipe, and nothing else."""
    argv = ["docker", "run", "--rm", "--init", "--log-driver", "none", "--network", "none", "--read-only"]
    argv += ["--mount", f"type=bind,src={pipe},dst=/pipe", *seeing(store), image]
    return [*argv, *packing(image, str(known), str(chunk), "/pipe")]


def seeing(store: Store) -> list[str]:
    """Options of `docker run` for a container that sees the engine's store read-only."""
    argv = ["--user", "0:0", "--userns", "host", "--security-opt", "label=disable"]
    for name in ("image", store.driver):
        # Not recursive: mounts of running containers lie below, and a copy of them would keep them from being removed.
        source = f"type=bind,src={store.root / name},dst=/engine/{name},readonly,bind-nonrecursive=true"
        argv += ["--mount", source]
    return [*argv, "--label", f"{labels.PURPOSE}=probe", "--entrypoint", "sh"]


def packing(image: str, *arguments: str) -> list[str]:
    """What such a container runs: images/pack.py, with the image's own Python."""
    find = 'for p in python3 python; do command -v "$p" >/dev/null && exec "$p" -c "$0" "$@"; done; exit 3'
    return ["-c", find, asset("pack.py"), "/engine", image, *arguments]


def classic_store() -> Store | None:
    """The store of this machine's engine; None if it is of another kind."""
    try:
        done = subprocess.run(STORE_COMMAND, capture_output=True, text=True, timeout=CLI_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_store(done.stdout) if done.returncode == 0 else None


def parse_store(output: str) -> Store | None:
    """The classic store in the output of STORE_COMMAND; None for another kind."""
    root, _, driver = output.strip().partition("\n")
    return Store(Path(root), driver) if driver in ("overlay2", "fuse-overlayfs") and root else None


@contextmanager
def _running(argv: list[str], stdout: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended when this has."""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def _pieces(descriptor: int, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Everything that is written there. Raises ImageShipFailed if the process fails after writing some of it."""
    began = False
    while piece := os.read(descriptor, PIECE):
        began = True
        yield piece
    code = process.wait()
    if code != 0 and began:
        words = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
        raise ImageShipFailed("this machine", f"reading the image's layers failed: {words or code}", "try again")
