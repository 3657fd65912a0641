"""`launcher exec` and `launcher shell`: a real terminal inside a container, on any node."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import launcher
from launcher.api.shell import open_shell
from launcher.cli import options
from launcher.cli.terminal import Reporter
from launcher.errors import UsageError

_TAIL = "launcher.tail"


class WithTail(TyperCommand):
    """Keeps what comes after `--` apart: it is the user's command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        ctx.meta[_TAIL] = args[place + 1 :]
        rest: list[str] = super().parse_args(ctx, args[:place])
        return rest


_Ports = Annotated[
    list[str] | None,
    typer.Option("-L", metavar="PORT", help="Forward a port of the node to this machine; 9000:8888 to another port."),
]

exec_ = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@exec_.command(cls=WithTail, options_metavar="[OPTIONS] -- COMMAND...")
def _exec(
    ctx: typer.Context,
    run: options.Run = None,
    node: Annotated[str | None, typer.Option(help="In the container on this node; default: the master.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Where this rank runs, with its own variables.")] = None,
    ports: _Ports = None,
    nodes: options.Nodes = None,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Run a command in a running container of the run, with the job's own variables.

    With a terminal where there is one, through pipes otherwise. Exit code: that of the command.
    """
    command: list[str] = ctx.meta[_TAIL]
    if not command:
        raise UsageError("exec", "no command", "launcher exec [RUN] [--node X | --rank N] -- nvidia-smi")
    with options.find(run, nodes, on, ssh_config) as found:
        code = found.exec(command, node, rank=rank, ports=ports or ())
    sys.exit(code)


def shell(
    job: options.JobFile,
    node: Annotated[str | None, typer.Option(help="On this node of the job; default: the first.")] = None,
    ports: _Ports = None,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    on: options.NotOn = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Image, code, mounts, GPUs, variables and secrets are the job's. The container goes when the shell ends.

    Without a terminal the shell reads its commands from stdin. Exit code: that of the shell.
    """
    fix = "in a run that goes on there: launcher exec --on CLUSTER -- bash; else on its login machine: srun --pty bash"
    options.refuse_cluster(on, "a cluster has no containers just for looking", fix)
    loaded = launcher.load(job, set=sets or [], nodes=options.hosts(nodes))
    sys.exit(open_shell(loaded, node, ports=ports or (), log=Reporter().log, ssh_config=ssh_config))
