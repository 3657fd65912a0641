"""Images without a run: build, send, test and list them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from os import PathLike
from pathlib import Path
from typing import Protocol

from launcher.errors import ImageUnfit, UsageError
from launcher.image.builder import IN_CONTEXT, add_code
from launcher.image.distribution import publish, registry_repository
from launcher.image.ensure import ensure
from launcher.image.image_locations import ImageLocations, ImageOnNodes, image_store
from launcher.image.lock import lock_path
from launcher.image.names import OCI_BASE_NAME, RECIPE
from launcher.image.repair import ImageVerdict, probe_image
from launcher.job.files import check_code
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.model.facts import ImageInfo
from launcher.model.progress import Log
from launcher.node.connect import Fleet, caller_engine, connect
from launcher.node.engine import Engine
from launcher.node.ssh.config import chosen_config
from launcher.records.exported import exported
from launcher.records.snapshot import list_code, pack, repack
from launcher.records.trainer import decoder_source
from launcher.run.begin.gpus import uses_gpus


class Work(Protocol):
    """Takes the reports of a long step."""

    def log(self, text: str) -> None:
        """Take a line, which may be a StatusLine."""

    def progress(self, node: str, sent: int, total: int) -> None:
        """Take the number of bytes sent to a node, and the estimated total."""


Begin = Callable[[], AbstractContextManager[Work]]  # called at the start of each long step


def build_image(
    file: Path,
    begin: Begin,
    done: Callable[[ImageOnNodes | str], None],
    *,
    set: Sequence[str] = (),  # noqa: A002 - the name of the command-line option
    with_code: bool = False,
    push: str | None = None,
    log: Log = print,
    ssh_config: str | PathLike[str] | None = None,
) -> None:
    """Build the image of a job file with this machine's engine, else on the first node.

    with_code: add the code as a layer. push: the registry to push it to. done: called with the image, then with a line
    for the image with code, and with the reference that was pushed. Raises LauncherError.
    """
    job = load_job(file, list(set))
    to = None if push is None else registry_repository(push, job.name)
    with ExitStack() as stack:
        if with_code:  # before minutes of building
            check_code(job, Path.cwd())
            listing = list_code(job, Path.cwd(), log, exported=stack.enter_context(exported(job, Path.cwd())))
        local = stack.enter_context(caller_engine())
        engine = local or stack.enter_context(_first_node(job, ssh_config)).engines[0]
        found = _ensure(job, file, [engine], local, begin)
        done(found)
        made = found.images[engine.node]
        if with_code:
            code = pack(listing, log)
            members = repack(code.archive, IN_CONTEXT, 0, 0)
            with begin() as work:
                name, made = add_code(engine, made, job.name, code.digest, members, work.log)
            done(f"{name} {made.id}")
        if to is not None:
            done(publish(engine, made, to))


def ship_image(
    file: Path,
    begin: Begin,
    *,
    set: Sequence[str] = (),  # noqa: A002 - the name of the command-line option
    nodes: Sequence[str] | None = None,
    ssh_config: str | PathLike[str] | None = None,
) -> ImageOnNodes:
    """Send the image of a job file to every node; it is built first if needed. Raises LauncherError."""
    job = load_job(file, list(set), nodes)
    with connect(job.hosts(), ssh_config=chosen_config(ssh_config)) as fleet, caller_engine() as local:
        return _ensure(job, file, fleet.engines, local, begin)


def verify_image(
    tag: str, begin: Begin, *, node: str | None = None, ssh_config: str | PathLike[str] | None = None
) -> ImageVerdict:
    """Test an image, or that of a job file, on this machine or a node. Raises UsageError, ImageUnfit, NodesFailed."""
    engine: Engine | None
    with ExitStack() as stack:
        if node is not None:
            engine = stack.enter_context(connect([(node, node)], ssh_config=chosen_config(ssh_config))).engines[0]
        elif not (engine := stack.enter_context(caller_engine())):
            fix = "use a node that has one: --node gpu-a"
            raise UsageError("launcher image", "this machine has no Docker engine", fix)
        is_job = tag.endswith((".yaml", ".yml")) and Path(tag).exists()
        name = _ensure(load_job(tag), Path(tag), [engine], engine, begin).reference if is_job else tag
        info = image_store(engine).inspect(name)
        if info is None:
            raise ImageUnfit(name, f"is not on {engine.node}", "to build a job's image, run: launcher image build JOB")
        base = info.labels.get(OCI_BASE_NAME, "")
        found = image_store(engine).inspect(base) if base else None
        with begin() as work:
            before = probe_image(engine, found, base, work.log) if found else None
            return ImageVerdict(name, probe_image(engine, info, name, work.log), before)


def built_images() -> Sequence[ImageInfo]:
    """Return the images that launcher built with this machine's engine."""
    with caller_engine() as engine:
        return image_store(engine).list({RECIPE: None}) if engine else ()


def _first_node(job: Job, ssh_config: str | PathLike[str] | None) -> AbstractContextManager[Fleet]:
    """Raises JobInvalid if the job has only a number of nodes, which a cluster chooses."""
    return connect(job.hosts()[:1], ssh_config=chosen_config(ssh_config))


def _ensure(job: Job, file: Path, nodes: Sequence[Engine], local: Engine | None, begin: Begin) -> ImageOnNodes:
    if job.image is None:
        raise UsageError(f"job {job.name}", "has no image: runtime process uses the Python of the machine", "")
    with begin() as work:
        locations = ImageLocations(nodes, local, work.log, work.progress, uses_gpus(job))
        roi, mounted = decoder_source(job), bool(job.mounts)
        return ensure(job.image, locations, job=job.name, mounted=mounted, roi=roi, lock_file=lock_path(file))
