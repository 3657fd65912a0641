"""`launcher fetch` and `launcher tensorboard`: the run's files here, and its curves in a browser."""

from __future__ import annotations

import importlib.util
import json as json_
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from launcher.cli import options
from launcher.errors import LauncherError, NodesFailed, UsageError
from launcher.records import store
from launcher.records.collect import collect
from launcher.records.store import Record
from launcher.run.locate import Attached, attach

REFRESH = 5.0


def fetch(
    run: options.Run = None,
    dest: Annotated[Path | None, typer.Argument(help="A folder; default runs/<run id>.", show_default=False)] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Checkpoints too.")] = False,
    nodes: options.Nodes = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """TensorBoard logs, metrics, error files and rank logs of every node. Only what is new travels."""
    with attach(run, options.hosts(nodes), ssh_config) as attached:
        target = dest or attached.record.paths.root
        target.mkdir(parents=True, exist_ok=True)
        moved = bring(attached, target, checkpoints=checkpoints)
    if json:
        typer.echo(json_.dumps({"run": attached.record.run, "folder": str(target), "bytes": moved}))
    else:
        typer.echo(f"{attached.record.run}: {moved:,} bytes are new in {target}/")
    if attached.unreachable:
        raise NodesFailed(list(attached.unreachable.values()))


def bring(attached: Attached, target: Path, *, checkpoints: bool = False) -> int:
    """Bytes that were new on the nodes that answer."""
    return sum(
        collect(attached.engines[node.name].files, node.output, target, checkpoints=checkpoints)
        for node in attached.nodes
    )


def tensorboard(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN...]", help="Default: the latest run.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 6006,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    nodes: options.Nodes = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Brings the curves here, serves them, and keeps those of a running job up to date, until Ctrl-C."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("tensorboard", "is not installed for this Python", "pip install tensorboard")
    names: list[str | None] = list(runs) if runs else [None]
    console = Console(highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="launcher-tensorboard-")))
        done = threading.Event()
        stack.callback(done.set)
        for name in names:
            record = _serve_run(name, options.hosts(nodes), ssh_config, stack, done, console)
            record.paths.tensorboard.mkdir(exist_ok=True)
            (folder / record.run).symlink_to(record.paths.tensorboard.resolve())
        _serve(folder, host, port, console)


def _serve_run(
    name: str | None,
    hosts: list[str] | None,
    ssh_config: Path | None,
    stack: ExitStack,
    done: threading.Event,
    console: Console,
) -> Record:
    """Bring a run's curves here, go on doing so while it is not known to have ended."""
    if hosts is None and store.find(name).result() is not None and any(store.find(name).paths.tensorboard.rglob("*")):
        return store.find(name)  # complete: no node needs to be asked
    try:
        attached = stack.enter_context(attach(name, hosts, ssh_config))
        bring(attached, attached.record.paths.root)
    except NodesFailed as error:
        if hosts is not None:
            raise
        console.print(f"[yellow]warning[/] showing what is here already: {escape(str(error))}")
        return store.find(name)
    threading.Thread(target=_keep_bringing, args=(attached, done), daemon=True).start()
    return attached.record


def _keep_bringing(attached: Attached, done: threading.Event) -> None:
    while not done.wait(REFRESH):
        try:
            bring(attached, attached.record.paths.root)
        except LauncherError as error:
            attached.record.event("curves not brought", reason=str(error))  # tried again in a moment


def _serve(folder: Path, host: str, port: int, console: Console) -> None:
    """TensorBoard as a program of its own, until it ends or Ctrl-C."""
    chosen = port if port and _free(host, port) else _any_free(host)
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", host, "--port", str(chosen)]
    argv += ["--reload_interval", "5", "--reload_multifile", "true"]
    console.print(f"TensorBoard: http://{host}:{chosen}/   Ctrl-C ends it")
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if server.wait() != 0:
            raise UsageError(
                "tensorboard", f"ended with exit code {server.returncode}", shutil.which("tensorboard") or ""
            )
    except KeyboardInterrupt:
        server.terminate()
        server.wait()


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _any_free(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
