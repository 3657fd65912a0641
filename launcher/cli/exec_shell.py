"""`launcher exec` and `launcher shell`: a command or an interactive shell in a container on any node."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

import launcher
from launcher.api.shell import open_shell
from launcher.cli import options
from launcher.cli.commands import Command
from launcher.cli.terminal import Reporter
from launcher.errors import UsageError

_TAIL = "launcher.tail"


class WithTail(Command):
    """Separates the arguments after `--`, which are the user's command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        index = args.index("--") if "--" in args else len(args)
        ctx.meta[_TAIL] = args[index + 1 :]
        rest: list[str] = super().parse_args(ctx, args[:index])
        return rest


_Ports = Annotated[
    list[str] | None,
    typer.Option("-L", metavar="PORT", help="Forward a local port to this port of the node, or LOCAL:REMOTE."),
]

exec_ = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@exec_.command(cls=WithTail, options_metavar="[OPTIONS] -- COMMAND...")
def _exec(
    ctx: typer.Context,
    run: options.Run = None,
    node: Annotated[str | None, typer.Option(help="Use the container on this node (default: the master).")] = None,
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Use the container and the variables of this rank.")
    ] = None,
    ports: _Ports = None,
    nodes: options.Nodes = None,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Run a command in a running container of a run, with the job's environment
    variables.

    The command gets a terminal if the launcher has one, and pipes otherwise.
    Exit code: that of the command.

    Example: launcher exec imagenet --rank 3 -- nvidia-smi
    """
    command: list[str] = ctx.meta[_TAIL]
    if not command:
        raise UsageError("exec", "no command", "launcher exec [RUN] [--node X | --rank N] -- nvidia-smi")
    with options.find(run, nodes, on, ssh_config) as found:
        code = found.exec(command, node, rank=rank, ports=ports or ())
    sys.exit(code)


def shell(
    job: options.JobFile,
    node: Annotated[str | None, typer.Option(help="Use this node of the job (default: the first).")] = None,
    ports: _Ports = None,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    on: options.NotOn = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """The container has the job's image, code, mounts, GPUs, environment variables
    and secrets. It is removed when the shell exits.

    Without a terminal, the shell reads commands from stdin. Exit code: that of
    the shell.

    Example: launcher shell job.yaml --node gpu-b -L 8888
    """
    fix = "in a running job: launcher exec --on CLUSTER -- bash; otherwise, on the login node: srun --pty bash"
    options.refuse_cluster(on, "launcher shell does not support clusters", fix)
    loaded = launcher.load(job, set=sets or [], nodes=options.hosts(nodes))
    sys.exit(open_shell(loaded, node, ports=ports or (), log=Reporter().log, ssh_config=ssh_config))
