"""`launcher image build | verify | ship | list`: the image alone."""

from __future__ import annotations

import json as json_
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launcher.cli import options
from launcher.cli.bars import bars
from launcher.errors import ImageUnfit, UsageError
from launcher.image.ensure import ensure
from launcher.image.faults import Report
from launcher.image.image_locations import ImageOnNodes, image_store
from launcher.image.lock import path_beside
from launcher.image.names import OCI_BASE_NAME, RECIPE
from launcher.image.probe import full_report
from launcher.image.repair import Verdict
from launcher.image.versions import Release, release, releases
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.node.connect import caller_engine, connect
from launcher.node.engine import Engine, ImageInfo

image = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Build, verify, ship and list images.")


@image.command()
def build(
    job: options.JobFile,
    sets: options.Sets = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Build the job's image: on this machine's engine, without one on the first node."""
    loaded = _with_image(load_job(job, sets or []))
    with ExitStack() as stack:
        local = stack.enter_context(caller_engine())
        nodes = (
            [local] if local else [stack.enter_context(connect(_hosts(loaded)[:1], ssh_config=ssh_config)).engines[0]]
        )
        _report(_ensured(loaded, job, nodes, local))


@image.command()
def ship(
    job: options.JobFile,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Send the job's image to every node, built if it must be: only layers that a node lacks are sent."""
    loaded = _with_image(load_job(job, sets or [], options.hosts(nodes)))
    with connect(_hosts(loaded), ssh_config=ssh_config) as fleet, caller_engine() as local:
        _report(_ensured(loaded, job, fleet.engines, local))


@image.command(name="verify")
def verify_(
    tag: Annotated[str, typer.Argument(metavar="JOB|TAG", help="A job file, or an image.")],
    node: Annotated[str | None, typer.Option(help="Use this node's engine instead of this machine's.")] = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Try it in a container: imports, torchvision's operators, VGG16. Exit code 4, with the cause, if one fails."""
    with ExitStack() as stack:
        if node is not None:
            engine = stack.enter_context(connect([(node, node)], ssh_config=ssh_config)).engines[0]
        else:
            engine = _needed(stack.enter_context(caller_engine()))
        name = _named(tag, engine)
        info = image_store(engine).inspect(name)
        if info is None:
            raise ImageUnfit(name, f"is not on {engine.node}", "launcher image build JOB builds a job's image")
        verdict = Verdict(name, full_report(engine, info, name), _before(engine, info))
    if json:
        typer.echo(json_.dumps({"image": name, "rows": verdict.rows(), "faults": verdict.faults()}, indent=2))
    else:
        Console(highlight=False).print(table_of(verdict))
    verdict.check()


@image.command(name="list")
def list_(
    tag: Annotated[
        str | None, typer.Option(help="One of NVIDIA's releases: 19.06, 25.03-py3.", show_default=False)
    ] = None,
    json: options.Json = False,
) -> None:
    """NVIDIA's PyTorch releases with what is known of them, and the images that launcher built on this machine."""
    if tag is not None and release(tag) is None:
        raise UsageError("--tag", f"{tag}: no such release is documented", "any tag can be used: the image is probed")
    rows: Sequence[Release] = [found] if tag is not None and (found := release(tag)) else releases()
    if json:
        typer.echo(json_.dumps([_row(row) for row in rows], indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("release", "torch", "torchvision", "CUDA", "Python", "driver", "known mismatch"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.tag, row.torch, row.torchvision, row.cuda, row.python, row.driver, row.mismatch)
    console = Console(highlight=False)
    console.print(table)
    for built in _built_here() if tag is None else ():
        console.print(f"built here: {escape(', '.join(built.tags) or built.id[:19])}  {built.size >> 20} MiB")


def table_of(verdict: Verdict) -> Table:
    """Before | after if there is something to compare with."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=verdict.image, title_justify="left")
    compared = verdict.before is not None
    for column in ("", "before", "after") if compared else ("", "now"):
        table.add_column(column, overflow="fold")
    for what, before, after in verdict.rows():
        table.add_row(*map(escape, (what, before, after) if compared else (what, after)))
    return table


def _ensured(job: Job, file: Path, nodes: Sequence[Engine], local: Engine | None) -> ImageOnNodes:
    assert job.image is not None
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    with bars() as on_progress:
        return ensure(
            job.image,
            nodes,
            local,
            lambda text: err.print(f"[dim]launcher:[/] {escape(text)}"),
            job=job.name,
            mounted=bool(job.mounts),
            on_progress=on_progress,
            lock_file=path_beside(file),
        )


def _report(done: ImageOnNodes) -> None:
    if done.why:
        typer.echo(done.why)
    for node, sent in done.shipped.items():
        typer.echo(f"{node}: {sent:,} bytes")
    typer.echo(f"{done.reference} {done.id}")


def _with_image(job: Job) -> Job:
    if job.image is None:
        raise UsageError(f"job {job.name}", "has no image: runtime process uses this machine's Python", "")
    return job


def _hosts(job: Job) -> list[tuple[str, str]]:
    return [(entry.name, entry.host) for entry in job.nodes]


def _needed(engine: Engine | None) -> Engine:
    if engine is None:
        raise UsageError("launcher image", "this machine has no Docker engine", "name a node that has: --node gpu-a")
    return engine


def _named(tag: str, engine: Engine) -> str:
    """The image of a job file, or the tag itself."""
    if not tag.endswith((".yaml", ".yml")) or not Path(tag).exists():
        return tag
    return _ensured(_with_image(load_job(tag)), Path(tag), [engine], engine).reference


def _before(engine: Engine, info: ImageInfo) -> Report | None:
    base = info.labels.get(OCI_BASE_NAME, "")
    found = image_store(engine).inspect(base) if base else None
    return full_report(engine, found, base) if found else None


def _built_here() -> list[ImageInfo]:
    with caller_engine() as engine:
        return list(image_store(engine).list({RECIPE: None})) if engine else []


def _row(row: Release) -> dict[str, str]:
    return {**vars(row), "mismatch": row.mismatch}
