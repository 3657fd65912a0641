"""`launcher tensorboard`: serve the TensorBoard logs of runs and keep them up to date."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

from launcher import Run
from launcher.api.history import Named
from launcher.cli import completion, options, terminal
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, RunUnknown, UsageError
from launcher.node.parallel import in_background, uninterrupted
from launcher.run.locate import Note

REFRESH = 5.0  # seconds between two searches for new data, by the launcher and by TensorBoard
START_LIMIT = 60.0  # seconds for TensorBoard to respond: it imports a lot, and a cold disk is slow
STOP_LIMIT = 5.0


def tensorboard(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|SWEEP...",
            autocompletion=completion.runs,
            help="Runs and sweeps to show (default: the latest).",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 6006,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    nodes: options.Nodes = None,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Download the logs, serve them until Ctrl-C, and keep those of running jobs up
    to date.

    Example: launcher tensorboard imagenet
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("tensorboard", "is not installed for this Python", "pip install tensorboard")
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # exit without an error, as on Ctrl-C
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="launcher-tensorboard-")))
        curves = folder / "runs"
        curves.mkdir()
        done = threading.Event()
        stack.callback(done.set)
        names: Sequence[str | None] = runs or [None]
        found = [options.named(name, nodes, on, ssh_config) for name in names]
        warn = cache(Reporter().warn)  # each note once, for any number of variants
        served = [run for named in found for run in _serve_named(named, nodes, on, ssh_config, stack, done, warn)]
        for name, run in legend(served).items():
            board = run.folder / "tensorboard"
            board.mkdir(exist_ok=True)
            (curves / name).symlink_to(board.resolve())
        _serve(curves, host, port, folder / "server.log")


def legend(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs, each once, by their names in TensorBoard: a run's ID, after its variant in a sweep. A name is
    that of a folder.
    """
    return {(f"{_as_file(run.group.shown)} {run.id}" if run.group else run.id): run for run in runs}


def _as_file(variant: str) -> str:
    return variant.replace("/", "_").lstrip(".")


def _serve_named(
    named: Named,
    nodes: str | None,
    on: str | None,
    ssh_config: Path | None,
    stack: ExitStack,
    done: threading.Event,
    warn: Note,
) -> Iterator[Run]:
    found = False
    for name in named.runs:
        try:
            yield _serve_run(name, nodes, on, ssh_config, stack, done, warn)
            found = True
        except RunUnknown:
            if named.group is None:
                raise  # else a variant that has nothing on these nodes
    if not found:
        raise options.nothing_of_sweep(named.group, nodes, on)


def _serve_run(
    name: str | None,
    nodes: str | None,
    on: str | None,
    ssh_config: Path | None,
    stack: ExitStack,
    done: threading.Event,
    warn: Note,
) -> Run:
    """Fetch the TensorBoard logs of a run, repeatedly unless the run is known to have ended."""
    run = stack.enter_context(options.find(name, nodes, on, ssh_config))
    if nodes is None and on is None and run.outcome is not None and any((run.folder / "tensorboard").rglob("*")):
        return run  # complete
    fetched = run.fetch()
    for problem in fetched.problems:
        warn(problem)
    if fetched.failed and (nodes or on):
        raise NodesFailed(fetched.failed)
    if fetched.failed:
        warn(f"showing only the data that was downloaded before: {NodesFailed(fetched.failed)}")
    else:
        in_background(partial(_keep_fetching, run, done))
    return run


def _keep_fetching(run: Run, done: threading.Event) -> None:
    while not done.wait(REFRESH):
        with suppress(LauncherError):  # retried after REFRESH
            run.fetch()


def _serve(curves: Path, host: str, port: int, log: Path) -> None:
    """Run TensorBoard as a subprocess until it exits or Ctrl-C; it never outlives this call."""
    chosen = _free_port(host, port)
    if port and chosen != port:
        Reporter().warn(f"port {port} of this machine is in use: TensorBoard listens on {chosen}")
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(curves), "--host", host, "--port", str(chosen)]
    argv += ["--reload_interval", f"{REFRESH:.0f}", "--reload_multifile", "true"]
    with ExitStack() as stack:
        server = uninterrupted(lambda: stack.enter_context(_server(argv, log)))
        if _answers(server, host, chosen):
            terminal.say(f"TensorBoard: http://{host}:{chosen}/ (press Ctrl-C to quit)")
            server.wait()
        lines = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise UsageError(
            "tensorboard",
            f"exited with code {server.poll()}: {' | '.join(lines) or 'no output'}",
            f"to reproduce: {sys.executable} -m tensorboard.main --logdir runs",
        )


@contextmanager
def _server(argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as errors:
        server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(server: subprocess.Popen[bytes], host: str, port: int) -> bool:
    """Wait until the server accepts connections; False if it exits or the time limit passes."""
    for _ in range(int(START_LIMIT / 0.1)):
        with suppress(subprocess.TimeoutExpired):
            server.wait(0.1)
            return False
        with suppress(OSError), socket.create_connection((host, port), 1.0):
            return True
    return False


def _free_port(host: str, wanted: int) -> int:
    """Return `wanted` if it is free, else any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise UsageError(
        "--host", f"{host} is not an address of this machine", "use 127.0.0.1, or 0.0.0.0 for all addresses"
    )
