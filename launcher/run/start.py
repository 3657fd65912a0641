"""All or nothing: create everywhere, put code and scripts in, start; any failure undoes everything."""

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

MEETING_KEY = "LAUNCHER_MEETING_KEY"  # container_scripts/elastic.py takes it out of the program's environment


def start(
    plan: Plan,
    fleet: Fleet,
    code: bytes,
    secrets: Mapping[str, str],
    event: Callable[..., None],
    fill: Callable[[Engine, NodePlan], None] | None = None,
) -> None:
    """Start every container of the plan.

    fill: puts an earlier run's checkpoints into a node's new output folder (run.earlier).

    Whatever goes wrong, a Ctrl-C too, nothing of this run is left on any node when this raises; NodesFailed names
    every node that failed with its reason.
    """
    if plan.min_nodes:  # what the nodes tell each other is signed
        secrets = {**secrets, MEETING_KEY: token_hex(32)}
    ids: dict[str, str] = {}
    # Nodes with the same folders and user get the very same bytes.
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
    """What every container gets before it starts: a tar with names relative to /, owned by the run's user.

    code: a snapshot's archive. secrets: values by name; files of mode 0600 inside the container, in no command line,
    label, `docker inspect` or image. user: "uid:gid"; "" is root, and ignored for plain processes.
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
    """Remove all that was created. Raises NodesFailed, the cause in it, where a node failed to."""

    def remove(engine: Engine) -> None:
        for state in engine.apart(engine.list({labels.RUN: plan.run})):
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
