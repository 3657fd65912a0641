"""`launcher exec` and `launcher shell`: a real terminal inside a container, on any node."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from launcher.cli import options
from launcher.cli.terminal import Reporter
from launcher.errors import UsageError
from launcher.job.files import check_files, code_folder, read_secrets
from launcher.job.loader import load_job
from launcher.node.connect import connect
from launcher.records.snapshot import snapshot
from launcher.run import exec_shell as in_container
from launcher.run.locate import attach

_TAIL = "launcher.tail"


class WithTail(TyperCommand):
    """Keeps what comes after `--` apart: it is the user's command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        ctx.meta[_TAIL] = args[place + 1 :]
        rest: list[str] = super().parse_args(ctx, args[:place])
        return rest


exec_ = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@exec_.command(cls=WithTail, options_metavar="[OPTIONS] -- COMMAND...")
def _exec(
    ctx: typer.Context,
    run: options.Run = None,
    node: Annotated[str | None, typer.Option(help="In the container on this node; default: the master.")] = None,
    nodes: options.Nodes = None,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Run a command in a running container of the run, with the job's own variables.

    With a terminal where there is one, through pipes otherwise. Exit code: that of the command.
    """
    command: list[str] = ctx.meta[_TAIL]
    if not command:
        raise UsageError("exec", "no command", "launcher exec [RUN] [--node X] -- nvidia-smi")
    with attach(run, options.hosts(nodes, on), ssh_config, Reporter().log) as attached:
        attached.require_any()
        chosen = attached.nodes[0] if node is None else attached.node(node)
        if node is None and chosen.rank:
            attached.require_all()
        code = in_container.execute(attached.engines[chosen.name], chosen, attached.states.get(chosen.name), command)
    sys.exit(code)


def shell(
    job: options.JobFile,
    node: Annotated[str | None, typer.Option(help="On this node of the job; default: the first.")] = None,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    on: options.NotOn = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Image, code, mounts, GPUs, variables and secrets are the job's. The container goes when the shell ends.

    Without a terminal the shell reads its commands from stdin. Exit code: that of the shell.
    """
    cure = "in a run that goes on there: launcher exec --on CLUSTER -- bash; else on its login machine: srun --pty bash"
    options.refuse_cluster(on, "a cluster has no containers just for looking", cure)
    loaded = load_job(job, sets or [], options.hosts(nodes))
    entry = next((each for each in loaded.machines if node in (None, each.name, each.host)), None)
    if entry is None:
        raise UsageError("--node", f"{node}: the job's nodes are {', '.join(each.name for each in loaded.machines)}")
    check_files(loaded, Path.cwd(), os.environ)
    secrets = read_secrets(loaded, Path.cwd(), os.environ)
    code = snapshot(code_folder(loaded, Path.cwd()))
    with connect([(entry.name, entry.host)], loaded.runtime, ssh_config) as fleet:
        status = in_container.shell(loaded, entry, fleet, code, secrets, Reporter().log)
    sys.exit(status)
