"""Start a run on all nodes or none: create containers, copy scripts, unpack the code, start. A failure undoes it."""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from secrets import token_hex

from launcher import container_scripts
from launcher.errors import ContainerGone, LauncherError, NodesFailed, OutputKept
from launcher.image.cuda import explaining_refused_cuda
from launcher.model import labels
from launcher.model.container import CODE, ContainerSpec, Mount, Phase
from launcher.model.plan import Plan
from launcher.node import image_cache, output_folder
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import run_all, run_all_catching, uninterrupted
from launcher.records.written import not_fetched, written_to
from launcher.run.begin.claims import claim_all

MEETING_KEY = "LAUNCHER_MEETING_KEY"  # elastic/container_scripts/elastic.py removes it from the program's environment


def start_containers(
    plan: Plan,
    fleet: Fleet,
    archive: bytes,
    secrets: Mapping[str, str],
    event: Callable[..., None],
    fill: Callable[[], None] | None = None,
) -> None:
    """Start every container of the plan.

    archive: of the code. fill: copies an earlier run's files into the output folders of all nodes (run.begin.earlier).

    After any error, including Ctrl-C, all containers and files of this run are removed from the nodes, but for what a
    program that had begun has written. Raises NodesFailed with every failed node and its error.
    """
    if plan.min_nodes:  # key that signs the messages between the nodes
        secrets = {**secrets, MEETING_KEY: token_hex(32)}
    ids: dict[str, str] = {}
    # Nodes with the same layout and user share one archive.
    kits = {
        (folder, user, remapped, beside): kit(folder, user, secrets, remapped=remapped, beside=beside)
        for folder, user, remapped, beside in {_kit_of(node.container) for node in plan.nodes}
    }

    def create(engine: Engine) -> None:
        planned = plan.node_plan(engine.node)
        spec = planned.container
        output_folder.make(engine.files, spec.output_dir, plan.run, spec.workdir, spec.labels[labels.PURPOSE])
        for cache in spec.caches:
            image_cache.make(engine.files, cache.source)

        def create_one() -> None:
            ids[engine.node] = engine.create(spec)

        def unpack() -> None:
            output_folder.unpack(engine.files, spec.workdir, archive, list(_mounted_in_code(spec)))

        run_all([create_one, unpack])  # before `put`, for which an engine mounts everything
        files = kits[_kit_of(spec)]
        run_all([partial(claim_all, engine, plan), partial(engine.put, ids[engine.node], files)])

    def start_one(engine: Engine) -> None:
        with explaining_refused_cuda(engine, plan.image):
            engine.start(ids[engine.node])

    begun = False
    try:  # a Ctrl-C is raised after the step in which it came: no container is created while others are removed
        uninterrupted(partial(fleet.each, create))
        event("created", nodes=[planned.node for planned in plan.nodes])
        if fill is not None:
            uninterrupted(fill)
        begun = True
        uninterrupted(partial(fleet.each, start_one))
        event("started", nodes=[planned.node for planned in plan.nodes])
    except BaseException as error:
        event("undone", reason=str(error) or type(error).__name__)
        sent = archive if begun else None
        uninterrupted(partial(undo, plan, fleet, cause=error, sent=sent, inherits=fill is not None))
        raise


def _kit_of(spec: ContainerSpec) -> tuple[str, str, bool, str]:
    """Return what the kit of a node depends on: `folder`, `user`, `remapped` and `beside` of `kit`."""
    beside = posixpath.dirname(CODE) if spec.layout.code == CODE else ""  # else it is a folder of the node
    return spec.layout.kit, spec.user, spec.userns == "host", beside


def _mounted_in_code(spec: ContainerSpec) -> Iterator[tuple[str, str]]:
    """Yield source and path of each mount below the working directory, the path relative to it."""
    inside = f"{spec.layout.code}/"
    for mount in (*spec.mounts, Mount(spec.output_dir, spec.layout.output)):
        if mount.target.startswith(inside):
            yield mount.source, mount.target.removeprefix(inside)


def kit(folder: str, user: str, secrets: Mapping[str, str], *, remapped: bool, beside: str = "") -> bytes:
    """Return the tar that is copied into a container before it starts: names relative to /, owned by the run's user.

    folder: the path of the kit. secrets: values by name, stored as files of mode 0600 in the container, so that they do
    not appear in command lines, labels, `docker inspect` or images. user: "uid:gid"; "" is root; plain processes
    ignore it. remapped: an engine with userns-remap changes the owner to a uid that no process of this container has,
    so everybody in it needs access; on the node, only root can enter the engine's folder. beside: the folder of the
    container that has the code, in which a program may write too: to ../data.
    """
    uid, gid = map(int, user.split(":")) if user else (0, 0)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:

        def add(path: str, mode: int, data: bytes | None = None) -> None:
            """data: None for a folder."""
            info = tarfile.TarInfo(path.strip("/"))
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            mode |= (mode & 0o700) >> 3 | (mode & 0o700) >> 6 if remapped else 0
            info.size, info.mode, info.uid, info.gid = len(data or b""), mode, uid, gid
            tar.addfile(info, io.BytesIO(data or b""))

        if beside:
            add(beside, 0o755)
        add(folder, 0o755)
        add(f"{folder}/home", 0o700)
        for name, script in container_scripts.scripts().items():
            add(f"{folder}/{name}", 0o755, script)
        if secrets:
            add(f"{folder}/secrets", 0o700)
        for name, value in secrets.items():
            add(f"{folder}/secrets/{name}", 0o600, value.encode())
    return buffer.getvalue()


def undo(plan: Plan, fleet: Fleet, cause: BaseException, sent: bytes | None = None, *, inherits: bool = False) -> None:
    """Remove all that was created of a run. Raises NodesFailed, including the cause, if anything is left on a node.

    sent: the code that was, if programs may have begun; an output folder to which they have written is kept. inherits:
    an earlier run's files were copied into it.
    """

    def remove(engine: Engine) -> None:
        for state in engine.to_stop(engine.list({labels.RUN: plan.run})):
            if not state.phase.ended and state.phase is not Phase.CREATED:
                with suppress(ContainerGone):  # another process has removed it
                    engine.stop(state.id, grace=0)
            engine.remove(state.id)

    def remove_folder(engine: Engine) -> None:
        folder = plan.node_plan(engine.node).container.output_dir
        found = engine.files.scan(folder) if sent is not None else ()
        if sent is not None and (left := written_to(found, [n.node for n in plan.nodes], sent, inherits=inherits)):
            what = f"the program had begun, so {folder} is kept: {not_fetched(left)}"
            raise OutputKept(f"node {engine.node}", what, f"to download it: launcher fetch {plan.run} --checkpoints")
        output_folder.remove(engine.files, folder, plan.run)

    removed = run_all_catching([partial(remove, engine) for engine in fleet.engines])
    pairs = [*zip(fleet.engines, removed, strict=True)]
    in_use = {engine.host for engine, outcome in pairs if isinstance(outcome, LauncherError)}
    rest = [partial(remove_folder, engine) for engine in fleet.engines if engine.host not in in_use]
    left = [each for each in (*removed, *run_all_catching(rest)) if isinstance(each, LauncherError)]
    if left:
        raise NodesFailed([*([cause] if isinstance(cause, LauncherError) else []), *left]) from cause
