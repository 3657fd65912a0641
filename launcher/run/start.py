"""Start a run on all nodes or none: create containers, copy code and scripts, start. A failure undoes everything."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from secrets import token_hex

from launcher import container_scripts
from launcher.errors import LauncherError, NodesFailed
from launcher.image.cuda import explained
from launcher.model import labels
from launcher.model.container import Layout, Phase
from launcher.model.plan import NodePlan, Plan
from launcher.node import output_folder
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import run_all, uninterrupted
from launcher.records.snapshot import repack
from launcher.run.claims import claim_all

MEETING_KEY = "LAUNCHER_MEETING_KEY"  # container_scripts/elastic.py removes it from the program's environment


def start(
    plan: Plan,
    fleet: Fleet,
    code: bytes,
    secrets: Mapping[str, str],
    event: Callable[..., None],
    fill: Callable[[Engine, NodePlan], None] | None = None,
) -> None:
    """Start every container of the plan.

    fill: copies an earlier run's checkpoints into a node's new output folder (run.earlier).

    After any error, including Ctrl-C, all containers and files of this run are removed from the nodes. Raises
    NodesFailed with every failed node and its error.
    """
    if plan.min_nodes:  # key that signs the messages between the nodes
        secrets = {**secrets, MEETING_KEY: token_hex(32)}
    ids: dict[str, str] = {}
    # Nodes with the same layout and user share one archive.
    wanted = {(node.container.layout, node.container.user) for node in plan.nodes}
    archives = {key: archive(*key, code, secrets) for key in wanted}

    def create(engine: Engine) -> None:
        planned = plan.on(engine.node)
        spec = planned.container
        output_folder.make(engine.files, spec.output_dir, plan.run)
        if fill is not None:
            fill(engine, planned)
        ids[engine.node] = engine.create(spec)
        files = archives[spec.layout, spec.user]
        run_all([partial(claim_all, engine, plan), partial(engine.put, ids[engine.node], files)])

    def start_one(engine: Engine) -> None:
        with explained(engine, plan.image):
            engine.start(ids[engine.node])

    try:
        uninterrupted(partial(fleet.each, create))
        event("created", nodes=[planned.node for planned in plan.nodes])
        uninterrupted(partial(fleet.each, start_one))
        event("started", nodes=[planned.node for planned in plan.nodes])
    except BaseException as error:
        event("undone", reason=str(error) or type(error).__name__)
        uninterrupted(partial(_undo, plan, fleet, cause=error))
        raise


def archive(layout: Layout, user: str, code: bytes, secrets: Mapping[str, str]) -> bytes:
    """Return the tar that is copied into a container before it starts: names relative to /, owned by the run's user.

    code: a snapshot's archive. secrets: values by name, stored as files of mode 0600 in the container, so that they do
    not appear in command lines, labels, `docker inspect` or images. user: "uid:gid"; "" is root; plain processes
    ignore it.
    """
    uid, gid = map(int, user.split(":")) if user else (0, 0)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:

        def add(path: str, mode: int, data: bytes | None = None) -> None:
            """data: None for a folder."""
            info = tarfile.TarInfo(path.strip("/"))
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.size, info.mode, info.uid, info.gid = len(data or b""), mode, uid, gid
            tar.addfile(info, io.BytesIO(data or b""))

        add(layout.kit, 0o755)
        add(f"{layout.kit}/home", 0o700)
        for name, script in container_scripts.scripts().items():
            add(f"{layout.kit}/{name}", 0o755, script)
        if secrets:
            add(f"{layout.kit}/secrets", 0o700)
        for name, value in secrets.items():
            add(f"{layout.kit}/secrets/{name}", 0o600, value.encode())
        add(layout.code, 0o755)
        for member, content in repack(code, layout.code.strip("/"), uid, gid):
            tar.addfile(member, io.BytesIO(content) if content is not None else None)
    return buffer.getvalue()


def _undo(plan: Plan, fleet: Fleet, cause: BaseException) -> None:
    """Remove everything that was created. Raises NodesFailed, including the cause, if removal fails on a node."""

    def remove(engine: Engine) -> None:
        for state in engine.to_stop(engine.list({labels.RUN: plan.run})):
            if not state.phase.ended and state.phase is not Phase.CREATED:
                engine.stop(state.id, grace=0)
            engine.remove(state.id)

    try:
        fleet.each(remove)
        fleet.each(
            lambda engine: output_folder.remove(engine.files, plan.on(engine.node).container.output_dir, plan.run)
        )
    except LauncherError as left:
        raise NodesFailed([*([cause] if isinstance(cause, LauncherError) else []), left]) from cause
