"""Find and remove leftovers of old runs on a node: unused images that the launcher built, output folders without a
container, containers of runs that `down` ended while the node was unreachable, and containers of killed commands."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from launcher.errors import LauncherError
from launcher.image import names
from launcher.image.image_locations import image_store, same_image
from launcher.model import labels
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import ContainerState, Phase
from launcher.model.facts import ImageInfo
from launcher.model.plan import RunId, is_run_id
from launcher.node import output_folder
from launcher.node.engine import Engine


@dataclass(frozen=True)
class OldOutput:
    """A run's output folder on a node. size: bytes of its files, including checkpoints."""

    run: RunId
    path: str
    files: int
    size: int


@dataclass(frozen=True)
class Leftovers:
    """Leftovers of ended runs on one node. unread: the error of a run's folder that the user cannot read."""

    engine: Engine
    images: Sequence[ImageInfo]
    outputs: Sequence[OldOutput]
    containers: Sequence[ContainerState] = ()
    unread: LauncherError | None = None

    def __bool__(self) -> bool:
        return bool(self.images or self.outputs or self.containers)


def find_leftovers(engine: Engine, sources: Sequence[ImageInfo] = (), taken_down: Collection[RunId] = ()) -> Leftovers:
    """Return the leftovers on a node, except those of runs with a container: use `down` for these.

    sources: see unused_images. taken_down: runs that `down` has ended; their stopped containers are included.
    """
    root = posixpath.join(engine.facts().home, OUTPUT_ROOT)
    listed = engine.list({labels.RUN: None})
    alive = {state.labels.get(labels.RUN) for state in listed}
    own = [state for state in listed if state.labels.get(labels.UID) == str(engine.uid())]
    idle = [state for state in own if state.phase.ended or state.phase is Phase.CREATED]
    # doctor --bench and shell remove their containers, unless these commands were killed.
    short = [state for state in own if state.phase.ended and state.labels.get(labels.PURPOSE) in ("bench", "shell")]
    ended = {*taken_down, *(state.labels.get(labels.RUN) for state in short)}
    back = [state for state in idle if state.labels.get(labels.RUN) in ended]
    found: dict[str, list[int]] = {}
    marked = set()
    unread: list[LauncherError] = []
    for entry in engine.files.scan(root, unread.append):
        run, _, name = entry.path.partition("/")
        found.setdefault(run, []).append(entry.size)
        if name == output_folder.MARKER and is_run_id(run) and run not in alive:
            marked.add(run)
    outputs = [OldOutput(run, posixpath.join(root, run), len(found[run]), sum(found[run])) for run in sorted(marked)]
    return Leftovers(engine, unused_images(engine, sources), outputs, back, unread[0] if unread else None)


def unused_images(engine: Engine, sources: Sequence[ImageInfo] = ()) -> list[ImageInfo]:
    """Return unused images that the launcher built, and remains of interrupted pushes.

    Images that the user tagged are kept. sources: images of the caller's engine and tagged images of all nodes; an
    untagged copy of such an image is a leftover of a launcher that was killed before it could tag the copy.
    """
    if engine.images is None:
        return []
    built = [*engine.images.list({names.RECIPE: None}), *engine.images.list({names.PARTIAL: None})]
    if sources:
        nameless = [image for image in engine.images.list({}) if not image.tags and not image.repo_digests]
        built += [image for image in nameless if any(same_image(image, source) for source in sources)]
        built = list({image.id: image for image in built}.values())
    used = {container.image for container in engine.list({})} if built else set()
    return [image for image in built if image.id not in used and all(tag.startswith(names.OURS) for tag in image.tags)]


def remove_leftovers(leftovers: Leftovers) -> None:
    """Remove exactly these leftovers. Layers that other images need are kept."""
    for container in leftovers.containers:
        leftovers.engine.remove(container.id)
    for image in leftovers.images:
        for name in image.tags or (image.id,):
            image_store(leftovers.engine).remove(name)
    for output in leftovers.outputs:
        output_folder.remove(leftovers.engine.files, output.path, output.run)
