"""Find and remove leftovers of old runs on a node: unused images that the launcher built, caches of images that it no
longer has, output folders without a container, containers of runs that `down` ended while the node was unreachable, and
containers of killed commands."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from launcher.errors import LauncherError
from launcher.image import names
from launcher.image.image_locations import image_store, same_image
from launcher.model import caches, labels
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import TOOL, ContainerState, Phase
from launcher.model.facts import ImageInfo, NodeFacts
from launcher.model.plan import RunId, is_run_id
from launcher.node import image_cache, output_folder
from launcher.node.connect import caller_engine
from launcher.node.engine import Engine
from launcher.node.files import FileEntry
from launcher.node.parallel import run_all_catching
from launcher.node.shared_memory import Shared
from launcher.records.collect import OutputFolder, collect
from launcher.records.store import PURGED, Record
from launcher.records.written import not_fetched, unfetched
from launcher.run.end.stop import LEFT_IN_MEMORY, Kept, kept_container, runs_there
from launcher.run.locate import caller

# $1: such a beginning. Prints the arguments of this node's processes that begin so
_COMMANDS = """
[ -r /proc/self/cmdline ] || exit 1
for command in /proc/[0-9]*/cmdline; do tr '\\0' '\\n' <"$command" 2>/dev/null | grep -x "$1[0-9a-f]*"; done
exit 0
"""


@dataclass(frozen=True)
class OldOutput:
    """A run's output folder on a node. size: bytes of its files, including checkpoints.

    ours: whether this folder started the run; otherwise another one did, or its record is lost. unfetched: files that
    are only there, as far as is known. command: `doctor` or `shell`, of which the folder is; "" for a run.
    """

    run: RunId
    path: str
    files: int
    size: int
    ours: bool
    unfetched: Sequence[FileEntry]
    variant: str = ""  # of its sweep, as tables show it; known of runs that are recorded here
    command: str = ""

    @property
    def not_fetched(self) -> str:
        return not_fetched(self.unfetched)


@dataclass(frozen=True)
class OldContainer:
    """A container without a use. kept: it has files that only it has."""

    state: ContainerState
    kept: Kept | None = None

    @property
    def run(self) -> RunId:
        return self.state.labels.get(labels.RUN, "")


OF_IMAGE = "its image is there"  # of a cache: why it is kept


@dataclass(frozen=True)
class OldCache:
    """A folder that outlives containers (model.caches). age: seconds since the last write of a file; 0 if it has none.

    kept: why it is no leftover; "" if nothing uses it.
    """

    path: str
    files: int
    size: int
    age: float
    kept: str


@dataclass(frozen=True)
class Leftovers:
    """Leftovers of ended runs on one node.

    recorded: IDs of those images that a run of this folder has used; the others may be another project's. shared: what
    runs of this folder left in /dev/shm under names of their own. unread: the error of a run's folder that the user
    cannot read. ended: the user's runs that have ended and whose containers are there, as nobody has taken them down;
    and whether this folder started them.
    """

    engine: Engine
    images: Sequence[ImageInfo]
    outputs: Sequence[OldOutput]
    containers: Sequence[OldContainer] = ()
    recorded: Collection[str] = ()
    shared: Sequence[Shared] = ()
    unread: LauncherError | None = None
    caches: Sequence[OldCache] = ()
    ended: Mapping[RunId, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.images or self.outputs or self.containers or self.shared or self.caches)


def find_leftovers(engines: Sequence[Engine], known: Sequence[Record]) -> list[Leftovers | LauncherError]:
    """Return the leftovers on each node, or its error; not those of runs with a container on one of the nodes, which
    may share a file system, nor of runs that may be running elsewhere: use `down` for these.

    known: the records of this folder; the stopped containers of runs that `down` has ended are included.
    """
    with caller_engine() as here:
        images = run_all_catching([partial(_images, engine) for engine in (*engines, *([here] if here else []))])
    named = [[] if isinstance(each, LauncherError) else each for each in images]
    sources = [image for index, each in enumerate(named) for image in each if image.tags or index == len(engines)]
    down = {record.run: record for record in known if record.taken_down}
    shared = _recorded_in_memory(known)
    examining = [partial(_examine, engine, sources, down, shared.get(engine.host, ())) for engine in engines]
    found = run_all_catching(examining)
    alive = {run for each in found if isinstance(each, _Examined) for run in each.alive}
    going = {run for each in found if isinstance(each, _Examined) for run in each.alive - each.ended}
    complete = not any(isinstance(each, LauncherError) for each in found)
    ours = {record.run: record for record in known if not record.rebuilt}
    used = {name for record in ours.values() for name in record.images()}
    asked = {engine.host for engine in engines} if complete else set()
    for run, record in ours.items():  # on a node that was not asked
        if record.unfinished and not {node.host for node in record.nodes()} <= asked:
            alive.add(run)
    listed: list[Leftovers | LauncherError] = []
    seen: set[str] = set()
    for engine, each in zip(engines, found, strict=True):
        again = engine.host in seen  # `local` can have two engines
        seen.add(engine.host)
        if isinstance(each, _Examined):
            left = _leftovers(each, ours, alive, used, again=again)
            ended = {run: run in ours for run in sorted(each.ended - going) if is_run_id(run)}
            listed.append(replace(left, ended=ended))
        else:
            listed.append(each)
    return listed


def _is_over(state: ContainerState) -> bool:
    """Whether a container is no reason to keep its run's folder: a lock, or of a `doctor --bench` that was killed."""
    purpose = state.labels.get(labels.PURPOSE)
    return purpose == "claim" or (purpose == "bench" and state.phase.ended)


@dataclass(frozen=True)
class _Examined:
    """What a node has. alive: runs with a container. ended: those of the user whose containers have ended and which
    nobody has taken down. folders: the files of the marked output folders, by run. commands: as
    OldOutput.command, of each of them.
    """

    engine: Engine
    root: str
    images: Sequence[ImageInfo]
    containers: Sequence[OldContainer]
    alive: Set[RunId]
    ended: Set[RunId]
    folders: Mapping[RunId, Sequence[FileEntry]]
    commands: Mapping[RunId, str]
    shared: Sequence[Shared]
    unread: LauncherError | None
    caches: Sequence[OldCache]


def _images(engine: Engine) -> Sequence[ImageInfo]:
    return engine.images.list({}) if engine.images else ()


def _examine(
    engine: Engine, sources: Sequence[ImageInfo], taken_down: Mapping[RunId, Record], shared: Collection[Shared]
) -> _Examined:
    """shared: what runs left in its shared memory, by their records."""
    machine = engine.facts()
    root = posixpath.join(machine.home, OUTPUT_ROOT)
    listed = engine.list({labels.RUN: None})
    alive = {state.labels.get(labels.RUN, "") for state in listed if not _is_over(state)}
    own = [state for state in listed if state.labels.get(labels.UID) == str(engine.uid())]
    idle = [state for state in own if state.phase.ended or state.phase is Phase.CREATED]
    # doctor --bench and shell remove their containers, unless these commands were killed.
    of_runs = [state for state in own if state.labels.get(labels.PURPOSE) == "run"]
    going = {state.labels.get(labels.RUN) for state in of_runs if not state.phase.ended}
    kept = {state.labels.get(labels.RUN, "") for state in of_runs} - going - {*taken_down}
    short = [state for state in own if state.phase.ended and state.labels.get(labels.PURPOSE) in ("bench", "shell")]
    ended = {*taken_down, *(state.labels.get(labels.RUN) for state in short)}
    back = [_old(engine, state, taken_down) for state in idle if state.labels.get(labels.RUN) in ended]
    back += _abandoned(engine)
    found: dict[RunId, list[FileEntry]] = {}
    marked = set()
    unread: list[LauncherError] = []
    for entry in engine.files.scan(root, unread.append):
        run, _, name = entry.path.partition("/")
        found.setdefault(run, []).append(replace(entry, path=name))
        if name == output_folder.MARKER and is_run_id(run):
            marked.add(run)
    folders = {run: found[run] for run in sorted(marked)}
    commands = {run: output_folder.command(file.path for file in files) for run, files in folders.items()}
    images = unused_images(engine, sources)
    left = _in_memory(engine, shared)
    caches_ = _caches(engine, machine, root, found.get(caches.FOLDER, ()))
    error = unread[0] if unread else None
    return _Examined(engine, root, images, back, alive, kept, folders, commands, left, error, caches_)


def _caches(engine: Engine, machine: NodeFacts, root: str, files: Sequence[FileEntry]) -> list[OldCache]:
    """files: of the folder of all caches. A cache of an image that this machine no longer has is of no use.

    An empty one is a leftover or none at all.
    """
    by_name: dict[str, list[FileEntry]] = {name: [] for name in image_cache.names(engine.files, root)}
    for file in files:
        by_name.setdefault(file.path.partition("/")[0], []).append(file)
    existing = None if engine.images is None else {image.id for image in engine.images.list({})}
    used = {container.image for container in engine.list({})}
    images = {caches.short(image.rpartition(":")[2]) for image in (existing or set()) | used}
    found, now = [], time.time() + machine.clock_offset
    for name, own in sorted(by_name.items()):
        if parts := caches.NAME.fullmatch(name):
            kept = (
                "models"
                if name == caches.MODELS
                else "of another machine"
                if parts["machine"] != caches.short(machine.machine)
                else OF_IMAGE
                if existing is None or parts["image"] in images
                else ""
            )
            if kept not in ("", "models") and not own:
                continue
            age = max(0.0, now - max((file.mtime for file in own), default=now))
            path = posixpath.join(root, caches.FOLDER, name)
            found.append(OldCache(path, len(own), sum(file.size for file in own), age, kept))
    return found


def _in_memory(engine: Engine, known: Collection[Shared]) -> Sequence[Shared]:
    """Return what runs left in shared memory, by their records, and is unchanged and unused since."""
    left = [each for each in engine.shared_memory(0.0) if each in known] if known else []
    return [] if left and runs_there(engine) else left


def _recorded_in_memory(records: Iterable[Record]) -> Mapping[str, set[Shared]]:
    """Return what runs left in shared memory, by host."""
    found: dict[str, set[Shared]] = {}
    for record in records:
        for line in record.events(LEFT_IN_MEMORY):
            with suppress(LookupError, TypeError, ValueError):  # a file that anybody may have written
                files = {Shared(str(f["name"]), int(f["size"]), int(f["changed"])) for f in line["files"]}
                found.setdefault(str(line["host"]), set()).update(files)
    return found


def _old(engine: Engine, state: ContainerState, taken_down: Mapping[RunId, Record]) -> OldContainer:
    record = taken_down.get(state.labels.get(labels.RUN, ""))
    is_run = record is not None and state.labels.get(labels.PURPOSE) == "run" and labels.readable(state.labels)
    return OldContainer(state, kept_container(engine, state, record) if record and is_run else None)


def _abandoned(engine: Engine) -> list[OldContainer]:
    """Return this user's containers that belong to no run, and to no command: it was killed.

    A probe is started by a request. A tool is the child of a docker command on the node.
    """
    own = [state for state in engine.list({labels.PURPOSE: None}) if state.labels.get(labels.UID) == str(engine.uid())]
    helpers = [state for state in own if labels.RUN not in state.labels]
    if not helpers:
        return []
    done = engine.machine.script(_COMMANDS, TOOL)
    used = set(done.out.decode(errors="replace").split())
    return [
        OldContainer(state)
        for state in helpers
        if (
            done.code == 0 and state.name not in used
            if state.name.startswith(TOOL)
            else state.phase is not Phase.RUNNING
        )
    ]


def _leftovers(
    found: _Examined, ours: Mapping[RunId, Record], alive: Collection[RunId], used: set[str], *, again: bool
) -> Leftovers:
    """used: names and IDs of the images of our runs. again: the machine's output folders have been listed."""
    outputs = []
    for run, files in found.folders.items() if not again else ():
        if run not in alive:
            record, command = ours.get(run), found.commands[run]
            missing = [] if command == "doctor" else unfetched(files, record)
            group = record.group if record else None
            path, size = posixpath.join(found.root, run), sum(file.size for file in files)
            variant = group.shown if group else ""
            outputs.append(OldOutput(run, path, len(files), size, record is not None, missing, variant, command))
    shared = found.shared if not again else ()
    recorded = {
        image.id for image in found.images if {image.id, image.labels.get(names.PARTIAL, ""), *image.tags} & used
    }
    cached = found.caches if not again else ()
    return Leftovers(found.engine, found.images, outputs, found.containers, recorded, shared, found.unread, cached)


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


def remove_leftovers(leftovers: Leftovers, known: Sequence[Record] = ()) -> None:
    """Remove exactly these leftovers. Layers that other images need are kept. known: as for `find_leftovers`.

    Of a run that `down` has ended while its node was away, files are collected. Raises the error of that at the end.
    """
    recorded = {record.run: record for record in known}
    uncollected = _collect(leftovers, recorded)
    for container in leftovers.containers:
        if container.state.phase is Phase.RUNNING:
            leftovers.engine.signal(container.state.id, "KILL")
        leftovers.engine.remove(container.state.id)
    for image in leftovers.images:
        for name in image.tags or (image.id,):
            image_store(leftovers.engine).remove(name)
    if leftovers.shared:
        leftovers.engine.remove_shared_memory([each.name for each in leftovers.shared])
    for cache in leftovers.caches:
        image_cache.remove(leftovers.engine.files, cache.path)
    for output in leftovers.outputs:
        output_folder.remove(leftovers.engine.files, output.path, output.run)
        if output.run in recorded:
            recorded[output.run].event(PURGED, host=leftovers.engine.host, by=caller(), command="clean")
    if uncollected is not None:
        raise uncollected


def _collect(leftovers: Leftovers, recorded: Mapping[RunId, Record]) -> LauncherError | None:
    """Collect the logs and curves of containers that are removed; return the error if that failed for one of them."""
    error: LauncherError | None = None
    for container in leftovers.containers:
        record, state = recorded.get(container.run), container.state
        ran = state.phase is not Phase.CREATED and state.labels.get(labels.PURPOSE) == "run"
        if record is None or not ran or not labels.readable(state.labels):
            continue
        run = labels.read(state.labels)
        folder = OutputFolder(leftovers.engine.files, run.output, (run.node,))
        (result,) = collect([folder], record.paths.root, mask=record.mask, code=record.sent_code)
        error = result if isinstance(result, LauncherError) else error
    return error
