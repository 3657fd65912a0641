"""The `launcher` command. A command's module is imported only when it is called, so that --help is fast."""

from __future__ import annotations

import gc
import importlib
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand
from typer.main import get_command

from launcher import __version__
from launcher.cli.commands import Command, Group, with_options
from launcher.errors import LauncherError, NodeUnfit, StoppedByUser
from launcher.features import FEATURES
from launcher.features import load as imported

NOTHING_STARTED = "nothing was started"
# what other tools call it -> our command
OTHER_NAMES = {
    **dict.fromkeys(
        ("run", "start", "launch", "submit", "train", "sbatch", "torchrun", "apply", "resume", "restart"), "up"
    ),
    **dict.fromkeys(("stop", "kill", "cancel", "scancel", "rm", "delete", "remove", "terminate"), "down"),
    **dict.fromkeys(("ps", "top", "stats", "info", "watch", "squeue", "queue"), "status"),
    **dict.fromkeys(("ls", "list", "history", "jobs"), "runs"),
    **dict.fromkeys(("log", "tail", "attach", "follow", "output"), "logs"),
    **dict.fromkeys(("download", "pull", "get", "cp", "copy", "rsync", "sync"), "fetch"),
    **dict.fromkeys(("prune", "gc", "cleanup", "purge"), "clean"),
    **dict.fromkeys(("check", "preflight", "test", "diagnose"), "doctor"),
    **dict.fromkeys(("show", "render", "config", "dry-run", "validate"), "plan"),
    **dict.fromkeys(("ssh", "bash", "login", "sh"), "shell"),
    **dict.fromkeys(("new", "create", "template"), "init"),
    **dict.fromkeys(("build", "push"), "image"),
}
NOTHING_DONE = {"down": "nothing was stopped", "clean": "nothing was removed"}  # by a Ctrl-C before the command began
# name -> (module, attribute, help), in the order of a typical workflow
CORE: dict[str, tuple[str, str, str]] = {
    "init": ("launcher.cli.init", "init", "Create a commented job file."),
    "doctor": ("launcher.cli.doctor", "doctor", "Check every node and suggest fixes."),
    "plan": ("launcher.cli.plan", "plan", "Print a job's containers, variables and commands without starting them."),
    "up": ("launcher.cli.up", "up", "Run a job and follow its output. Ctrl-C detaches."),
    "logs": ("launcher.cli.logs", "logs", "Show the output of a run and follow it until the run ends."),
    "status": ("launcher.cli.status", "status", "Show the state, step, throughput, restarts and exit codes of a run."),
    "runs": ("launcher.cli.runs", "runs", "List runs, the most recent last."),
    "fetch": ("launcher.cli.fetch", "fetch", "Download TensorBoard logs, error files and rank logs."),
    "tensorboard": ("launcher.cli.tensorboard", "tensorboard", "Serve the TensorBoard logs of runs."),
    "export": ("launcher.cli.plan", "export", "Print a job as an sbatch script or as Kubernetes manifests."),
    "shell": ("launcher.cli.exec_shell", "shell", "Open a shell in a new container of a job."),
    "exec": ("launcher.cli.exec_shell", "exec_", "Run a command in a running container of a run."),
    "debug": ("launcher.cli.debug", "debug", "Open the terminal of a rank that waits in breakpoint()."),
    "down": ("launcher.cli.down", "down", "Stop a run and remove its containers from every node."),
    "clean": ("launcher.cli.clean", "clean", "Remove leftovers of old runs from nodes."),
    "image": ("launcher.cli.image", "image", "Build, verify, ship and list images."),
    "schema": ("launcher.cli.plan", "schema", "Print the JSON Schema of the job file."),
}


def _with_features(core: Mapping[str, tuple[str, str, str]]) -> dict[str, tuple[str, str, str]]:
    """Return the commands of the core, each followed by those of the features that belong after it."""
    found = {}
    added = {name: command for feature in FEATURES.values() for name, command in feature.commands.items()}
    for name, command in core.items():
        found[name] = command
        found |= {new: (each.module, each.attribute, each.help) for new, each in added.items() if each.after == name}
    return found


COMMANDS = _with_features(CORE)


class LazyGroup(Group):
    """Lists commands from the table above; imports a command only to run it or to show its help."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stub with the help text, for the list of commands."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][2], callback=lambda: None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the real command, for a call; in shell completion, None for an unknown one."""
        if not ctx.resilient_parsing and args[0] not in COMMANDS:
            ctx.fail(f"No such command '{args[0]}'. {_instead(args[0])}")
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name) if name else None, rest

    def make_context(self, *args: Any, **options: Any) -> Any:
        return _stopped_by_ctrl_c(lambda: super(LazyGroup, self).make_context(*args, **options), _nothing_done())

    def invoke(self, ctx: Any) -> Any:
        """A Ctrl-C inside the command's function is handled there (see `load`); before it, nothing was started."""
        return _stopped_by_ctrl_c(lambda: super(LazyGroup, self).invoke(ctx), _nothing_done())


def _instead(word: str) -> str:
    """Return what the user may mean by a word that is no command."""
    if word.endswith((".yaml", ".yml")):
        return f"To start a job: launcher up {shlex.quote(word)}"
    if word.endswith(".py"):
        return f"To start a program: a job file with `run: {{script: {word}}}` (launcher init), then launcher up JOB"
    name = OTHER_NAMES.get(word) or next(iter(get_close_matches(word, COMMANDS, n=1)), "")
    return f"Did you mean '{name}'? {COMMANDS[name][2]}" if name else "The commands: launcher -h"


def _stopped_by_ctrl_c(step: Callable[[], Any], known: str = "") -> Any:
    """Make Ctrl-C exit with the same code at any time; typer would exit with 130. known: text of the message."""
    try:
        return step()
    except KeyboardInterrupt as stop:
        _print_stopped(str(stop) or known)
        raise typer.Exit(StoppedByUser.exit_code) from None


def _nothing_done() -> str:
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    return NOTHING_DONE.get(command, NOTHING_STARTED)


def _print_stopped(known: str) -> None:
    print("; ".join(filter(None, ("launcher: stopped", known))), file=sys.stderr)


def load(name: str) -> Any:
    """Import a command's module and return the command."""
    module, attribute, text = COMMANDS[name]
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        command = get_command(target)
    else:
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        options = [each.options[name] for each in FEATURES.values() if name in each.options]
        target = with_options(target, [(imported(option), option.after) for option in options])
        single.command(name, cls=Command, help=text + "\n\n" + (target.__doc__ or ""))(target)
        command = get_command(single)
    command.name = name
    for each in getattr(command, "commands", {name: command}).values():  # of a group, such as `image build`
        each.callback = _begun(each.callback)
    return command


def _begun(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a command with what the start of each does: see __main__, and Ctrl-C."""

    def call(*args: Any, **options: Any) -> Any:
        gc.freeze()
        gc.enable()
        return _stopped_by_ctrl_c(lambda: function(*args, **options))

    return call


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _launcher(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
    debug: bool = typer.Option(False, "--debug", help="Print the traceback of unexpected errors."),
) -> None:
    """Run PyTorch training in containers on machines that have only sshd and
    Docker: one file, one command.
    """


def main() -> None:
    """Run the command line. An error prints a message and sets the exit code, never a traceback."""
    try:
        app()
    except LauncherError as error:
        _end(error)
    except Exception as error:
        if "KeyboardInterrupt" in str(error):  # raised inside Rust: pydantic converts it to its own error
            _print_stopped(_nothing_done())
            sys.exit(StoppedByUser.exit_code)
        if "--debug" in takewhile(lambda argument: argument.startswith("-"), sys.argv[1:]):
            raise
        _end(_unexpected(error))


def _end(error: LauncherError) -> NoReturn:
    from launcher.cli.terminal import show_error  # not imported for --help

    show_error(str(error))
    sys.exit(error.exit_code)


def _unexpected(error: Exception) -> LauncherError:
    """Return the error for a failed file access on this machine, or for a bug in the launcher."""
    if isinstance(error, OSError) and error.strerror:
        from launcher.faults import disk

        if disk.is_full(error):
            found = disk.full(f"the disk of {error.filename}" if error.filename else "a disk", error)
            return NodeUnfit("this machine", found.what, "free some space there")
        where = f": {error.filename}" if error.filename else ""
        return NodeUnfit("this machine", f"{error.strerror}{where}", "check the permissions")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = f"unexpected {type(error).__name__}: {str(error)[:500]} ({Path(frame.filename).name}:{frame.lineno})"
    fix = "this is a bug in the launcher: report it with the version and the output of `launcher --debug COMMAND ...`"
    return LauncherError(f"launcher {__version__}", what, fix)
