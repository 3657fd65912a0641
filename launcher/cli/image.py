"""`launcher image build | verify | ship | list`: manage images, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from launcher.api.images import build_image, built_images, ship_image, verify_image
from launcher.cli import options, terminal
from launcher.cli.commands import Command, Group
from launcher.cli.long_work import LongWork
from launcher.cli.terminal import Reporter
from launcher.errors import UsageError
from launcher.image.versions import Release, release, releases

if TYPE_CHECKING:
    from launcher.image.image_locations import ImageOnNodes
    from launcher.image.repair import ImageVerdict

image = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Build, verify, ship and list images.",
)


@image.command(cls=Command, short_help="Build the job's image.")
def build(
    job: options.JobFile,
    sets: options.Sets = None,
    with_code: Annotated[
        bool, typer.Option("--with-code", help="Add the code as a layer at /workspace/code, for Kubernetes.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="REGISTRY", help="Push the image to REGISTRY/JOB and print its digest."),
    ] = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Build the job's image with the local Docker engine, or on the first node if
    this machine has none.

    Example: launcher image build job.yaml
    """
    build_image(
        job,
        LongWork,
        _report,
        set=sets or [],
        with_code=with_code,
        push=push,
        log=Reporter().log,
        ssh_config=ssh_config,
    )


@image.command(cls=Command, short_help="Send the job's image to every node.")
def ship(
    job: options.JobFile,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    on: options.NotOn = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Send the job's image to every node. It is built first if needed; only missing
    layers are sent.

    Example: launcher image ship job.yaml
    """
    fix = "push it with: launcher image build JOB --push REGISTRY; then set image.ref to the reference that it prints"
    options.refuse_cluster(on, "a cluster imports images from a registry with its own tool", fix)
    _report(ship_image(job, LongWork, set=sets or [], nodes=options.hosts(nodes), ssh_config=ssh_config))


@image.command(cls=Command, name="verify", short_help="Test an image in a container.")
def verify_(
    tag: Annotated[str, typer.Argument(metavar="JOB|TAG", help="A job file or an image.")],
    node: Annotated[str | None, typer.Option(help="Use this node's Docker engine instead of the local one.")] = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Test an image in a container: imports, torchvision operators, VGG16. Exit
    code 4, with the cause, on failure.

    Example: launcher image verify job.yaml --node gpu-a
    """
    verdict = verify_image(tag, LongWork, node=node, ssh_config=ssh_config)
    if json:
        terminal.say_json({"image": verdict.image, "rows": verdict.rows(), "faults": verdict.faults()})
    else:
        terminal.table_console().print(table_of(verdict))
    verdict.check()


@image.command(cls=Command, name="list", short_help="List NVIDIA's releases and images built here.")
def list_(
    tag: Annotated[str | None, typer.Option(help="Show only this NVIDIA release: 19.06, 25.03-py3.")] = None,
    json: options.Json = False,
) -> None:
    """List NVIDIA's PyTorch releases with their versions and known faults, and
    images that launcher built here.

    Example: launcher image list --tag 25.03
    """
    found = release(tag) if tag is not None else None
    if tag is not None and found is None:
        raise UsageError("--tag", f"{tag} is not a documented release", "a job may use any tag: its image is probed")
    rows: Sequence[Release] = [found] if found else releases()
    if json:
        terminal.say_json([{**vars(row), "mismatch": row.mismatch} for row in rows])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("release", "torch", "torchvision", "CUDA", "Python", "driver", "known mismatch"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.tag, row.torch, row.torchvision, row.cuda, row.python, row.driver, row.mismatch)
    console = terminal.table_console()
    console.print(table)
    if tag is not None:
        return
    for built in built_images():
        console.print(f"built here: {escape(', '.join(built.tags) or built.id[:19])}  {built.size >> 20} MiB")


def table_of(verdict: ImageVerdict) -> Table:
    """Return the verdict as a table, with columns before and after if the base image was tested too."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=verdict.image, title_justify="left")
    compared = verdict.before is not None
    for column in ("", "before", "after") if compared else ("", "now"):
        table.add_column(column, overflow="fold")
    for what, before, after in verdict.rows():
        table.add_row(*map(escape, (what, before, after) if compared else (what, after)))
    return table


def _report(done: ImageOnNodes | str) -> None:
    if isinstance(done, str):
        terminal.say(done)
        return
    if done.why:
        terminal.say(done.why)
    for node, sent in done.shipped.items():
        terminal.say(f"{node}: {sent:,} bytes")
    terminal.say(f"{done.reference} {done.id}")
