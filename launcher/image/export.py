"""An image read out of an engine's store, as archives for `docker load`: layer by layer if possible, otherwise whole.

`docker save` of an engine's classic store first writes the whole image to disk. On the caller's own machine we read the
layers themselves instead (images/pack.py): directly if we may, otherwise through a container of the image that sees the
store read-only. Where neither works `docker save` is used, which knows every store.

An engine that loads an archive never opens layers that it has, so they may be missing. Engines from 25 on name a layer
`blobs/sha256/<diff id>`; earlier ones `<v1 id>/layer.tar`, where the v1 id of every layer but the last follows from the
diff ids alone (moby 20.10, image/v1/imagev1.go CreateID, image/tarexport/save.go saveImage). A layer under any other
name is sent: more bytes, never a wrong image.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from launcher.errors import ImageShipFailed
from launcher.image.image_locations import image_store
from launcher.image.names import asset
from launcher.model import labels
from launcher.model.facts import ImageInfo
from launcher.node.connect import LOCAL
from launcher.node.engine import Engine

PIECE = 1 << 20
WHOLE = 1 << 62  # a chunk that no image fills
STORE = "docker info --format '{{.DockerRootDir}} {{.Driver}}'"

# The v1 configuration of a layer that is not the last one: Go's zero container.Config, in the order of its fields.
_V1_CONFIG = (
    '{"container_config":{"Hostname":"","Domainname":"","User":"","AttachStdin":false,"AttachStdout":false,'
    '"AttachStderr":false,"Tty":false,"OpenStdin":false,"StdinOnce":false,"Env":null,"Cmd":null,"Image":"",'
    '"Volumes":null,"WorkingDir":"","Entrypoint":null,"OnBuild":null,"Labels":null},'
    '"created":"1970-01-01T00:00:00Z","layer_id":%s%s}'
)


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
    store, began = classic_store(source) if source.host == LOCAL else None, False
    if store is not None:
        readable = os.access(store.root / "image" / store.driver / "layerdb", os.R_OK | os.X_OK)
        argv = direct_argv if readable else container_argv
        for piece in run_pack(argv(info.id, store, known, chunk)):
            began = True
            yield piece
    if not began:
        yield from image_store(source).save(info.id)


def direct_argv(image: str, store: Store, known: int, chunk: int = WHOLE) -> list[str]:
    """images/pack.py by a user who may read the engine's files."""
    return [sys.executable, "-c", asset("pack.py"), str(store.root), image, str(known), str(chunk)]


def container_argv(image: str, store: Store, known: int, chunk: int = WHOLE) -> list[str]:
    """images/pack.py by a user who may use the engine: in a container of that very image."""
    options = ["run", "--rm", "--init", "--log-driver", "none", "--network", "none", "--read-only"]
    return pack_container(options, image, store, str(known), str(chunk))


def pack_container(options: Sequence[str], image: str, store: Store, *arguments: str) -> list[str]:
    """A container that sees the engine's store read-only and runs images/pack.py with the image's own Python."""
    argv = ["docker", *options, "--user", "0:0", "--userns", "host", "--security-opt", "label=disable"]
    for name in ("image", store.driver):
        # Not recursive: mounts of running containers lie below, and a copy of them would keep them from being removed.
        source = f"type=bind,src={store.root / name},dst=/engine/{name},readonly,bind-nonrecursive=true"
        argv += ["--mount", source]
    find = 'for p in python3 python; do command -v "$p" >/dev/null && exec "$p" -c "$0" "$@"; done; exit 3'
    argv += ["--label", f"{labels.PURPOSE}=probe", "--entrypoint", "sh", image, "-c", find]
    return [*argv, asset("pack.py"), "/engine", image, *arguments]


def run_pack(argv: Sequence[str]) -> Generator[bytes, None, None]:
    """What images/pack.py writes: nothing if the store is not laid out as expected, or the container cannot start.

    The process ends with this. Raises ImageShipFailed if it fails after writing some of it.
    """
    began, pipe = False, subprocess.PIPE
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            while piece := process.stdout.read(PIECE):
                began = True
                yield piece
            words = process.stderr.read().decode(errors="replace").strip()
        except BaseException:
            process.terminate()
            raise
    if began and process.returncode != 0:
        what = f"reading the image's layers failed: {words or process.returncode}"
        raise ImageShipFailed("this machine", what, "try again")


def classic_store(engine: Engine) -> Store | None:
    """None if it is of another kind."""
    root, _, driver = engine.sh(STORE).decode(errors="replace").strip().rpartition(" ")
    return Store(Path(root), driver) if driver in ("overlay2", "fuse-overlayfs") and root else None


def layer_names(layers: Sequence[str], known: int) -> frozenset[str]:
    """Members of the archive that a store with the first `known` of these layers (diff ids) does not need.

    A layer that is repeated further up stays: older engines write it once and link to it.
    """
    names = set[str]()
    for layer, v1 in zip(layers[:known], [*v1_ids(layers[:-1]), ""], strict=False):
        if layer not in layers[known:]:
            names |= {f"{v1}/layer.tar", f"blobs/sha256/{layer.partition(':')[2]}"}
    return frozenset(names)


def v1_ids(layers: Sequence[str]) -> list[str]:
    """Folder names that engines before 25 give to these layers, none of which is an image's last one."""
    chain, parent, ids = "", "", []
    for layer in layers:
        chain = layer if not chain else "sha256:" + hashlib.sha256(f"{chain} {layer}".encode()).hexdigest()
        with_parent = f',"parent":{json.dumps(parent)}' if parent else ""
        config = _V1_CONFIG % (json.dumps(chain), with_parent)
        parent = "sha256:" + hashlib.sha256(config.encode()).hexdigest()
        ids.append(parent.partition(":")[2])
    return ids


def common(layers: Sequence[str], others: Iterable[Sequence[str]]) -> int:
    """How many of `layers`, from the base up, one of the other images shares."""
    pairs = (takewhile(lambda pair: pair[0] == pair[1], zip(layers, other, strict=False)) for other in others)
    return max((len(list(same)) for same in pairs), default=0)
