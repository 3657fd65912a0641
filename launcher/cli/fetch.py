"""`launcher fetch`: the run's files here. `launcher tensorboard`: its curves in a browser, kept up to date."""

from __future__ import annotations

import importlib.util
import json as json_
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, NoRoomHere, UsageError
from launcher.node.parallel import in_background
from launcher.records import store
from launcher.records.collect import Collected, collect, output_folders
from launcher.records.store import Record
from launcher.run.attempts import collected, newest
from launcher.run.locate import Attached, attach

REFRESH = 5.0  # seconds between two searches for new curves, ours and TensorBoard's
START_LIMIT = 60.0  # seconds until TensorBoard answers: it imports a lot, and a cold disk is slow
STOP_LIMIT = 5.0


def fetch(
    run: options.Run = None,
    dest: Annotated[Path | None, typer.Argument(help="A folder; default runs/<run id>.")] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Checkpoints too.")] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """TensorBoard logs, metrics, error files and rank logs of every node. Only what is new travels."""
    with attach(run, options.hosts(nodes, on), ssh_config, Reporter().log) as attached:
        target = dest or attached.record.paths.root
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        moved = fetch_files(attached, target, Reporter().warn, checkpoints=checkpoints)
    if json:
        typer.echo(json_.dumps({"run": attached.record.run, "folder": str(target), "bytes": moved}))
    else:
        typer.echo(f"{attached.record.run}: {moved:,} bytes are new in {target}/")
    attached.require_all()


def fetch_files(
    attached: Attached, target: Path, warn: Callable[[str], None] = lambda _: None, *, checkpoints: bool = False
) -> int:
    """Bytes that were new on the nodes that answer. warn: called with each file of a node that could not be read.

    Raises NodesFailed where nothing of one could be collected, or this machine's disk is full.
    """
    if unmasked := attached.record.unmasked:
        warn(unmasked)
    folders = output_folders(attached.engines, attached.nodes)
    if checkpoints and attached.record.min_nodes:  # those of the nodes that took part to the end come first
        collect(folders, target, mask=attached.record.mask)
        world = newest(collected(target, attached.nodes))
        folders.sort(key=lambda folder: world is None or folder.node not in world.members)
    results = collect(folders, target, mask=attached.record.mask, checkpoints=checkpoints)
    done = [result for result in results if isinstance(result, Collected)]
    failures = [result for result in results if isinstance(result, LauncherError)]
    for problem in (problem for one in done for problem in one.problems):
        if isinstance(problem, NoRoomHere):
            failures.append(problem)
        else:
            warn(str(problem))
    if failures:
        raise NodesFailed(failures)
    return sum(one.moved for one in done)


def tensorboard(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN...]", help="Default: the latest run.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 6006,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    nodes: options.Nodes = None,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Brings the curves here, serves them, and keeps those of a running job up to date, until Ctrl-C."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("tensorboard", "is not installed for this Python", "pip install tensorboard")
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends without an error, as by Ctrl-C
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="launcher-tensorboard-")))
        curves = folder / "runs"
        curves.mkdir()
        done = threading.Event()
        stack.callback(done.set)
        names: Sequence[str | None] = runs or [None]
        for name in names:
            record = _serve_run(name, options.hosts(nodes, on), ssh_config, stack, done)
            record.paths.tensorboard.mkdir(exist_ok=True)
            (curves / record.run).symlink_to(record.paths.tensorboard.resolve())
        _serve(curves, host, port, folder / "server.log")


def _serve_run(
    name: str | None, hosts: list[str] | None, ssh_config: Path | None, stack: ExitStack, done: threading.Event
) -> Record:
    """Fetch a run's curves, and keep doing so while it is not known to have ended."""
    if hosts is None:
        record = store.find(name)
        if record.result() is not None and any(record.paths.tensorboard.rglob("*")):
            return record  # complete
    try:
        attached = stack.enter_context(attach(name, hosts, ssh_config, Reporter().log))
        fetch_files(attached, attached.record.paths.root)
    except NodesFailed as error:
        if hosts is not None:
            raise
        Reporter().warn(f"showing what is here already: {error}")
        return store.find(name)
    in_background(partial(_keep_fetching, attached, done))
    return attached.record


def _keep_fetching(attached: Attached, done: threading.Event) -> None:
    while not done.wait(REFRESH):
        try:
            fetch_files(attached, attached.record.paths.root)
        except LauncherError as error:
            attached.record.event("curves not fetched", reason=str(error))  # tried again in a moment


def _serve(curves: Path, host: str, port: int, log: Path) -> None:
    """TensorBoard as a process of its own, until it ends or we are interrupted; it never outlives this call."""
    chosen = _free_port(host, port)
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(curves), "--host", host, "--port", str(chosen)]
    argv += ["--reload_interval", f"{REFRESH:.0f}", "--reload_multifile", "true"]
    with log.open("wb") as errors:
        server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        if _answers(server, host, chosen):
            typer.echo(f"TensorBoard: http://{host}:{chosen}/   Ctrl-C ends it")
            server.wait()
        words = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise UsageError(
            "tensorboard",
            f"ended with exit code {server.poll()}: {' | '.join(words) or 'it printed nothing'}",
            f"try it: {sys.executable} -m tensorboard.main --logdir runs",
        )
    finally:
        server.terminate()
        try:
            server.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(server: subprocess.Popen[bytes], host: str, port: int) -> bool:
    """Wait until the server takes connections; False where it ended or never does."""
    for _ in range(int(START_LIMIT / 0.1)):
        with suppress(subprocess.TimeoutExpired):
            server.wait(0.1)
            return False
        with suppress(OSError), socket.create_connection((host, port), 1.0):
            return True
    return False


def _free_port(host: str, wanted: int) -> int:
    """`wanted` if it is free, else any."""
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise UsageError("--host", f"{host} is not an address of this machine", "127.0.0.1, or 0.0.0.0 for all")
