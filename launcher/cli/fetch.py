"""`launcher fetch`: download the files of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from launcher.api.history import Named
from launcher.cli import options, terminal
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, RunUnknown
from launcher.model.plan import RunId

if TYPE_CHECKING:
    from launcher.run.end.fetch import Fetched


@dataclass(frozen=True)
class Chosen:
    """The only run to fetch, with all that its program wrote. said, fields: what to say of that, and add to --json."""

    run: RunId
    said: Callable[[Fetched], str]
    fields: Callable[[Fetched], Mapping[str, object]]


# Called with a function that fetches the curves of the runs and returns their folders in runs/. Returns None if its
# options were not given. Raises LauncherError.
Option: TypeAlias = Callable[[Callable[[], Sequence[Path]]], Chosen | None]


def fetch(
    run: options.RunOrSweep = None,
    dest: Annotated[
        Path | None,
        typer.Argument(help="Destination folder (default: runs/<run id>); a folder per run of a sweep is made in it."),
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also download checkpoints and what the program wrote elsewhere.")
    ] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
    *,
    added: Sequence[Option] = (),
) -> None:
    """Files of every node are downloaded, metrics included. Only new data is
    transferred. If the run has ended, how is recorded.

    Example: launcher fetch imagenet --checkpoints
    """
    log, warn = cache(Reporter().log), cache(Reporter().warn)  # each note once, for any number of variants
    named = options.named(run, nodes, on, ssh_config, log)
    chosen = next(filter(None, (option(partial(_folders, named, nodes, on, ssh_config)) for option in added)), None)
    if chosen is not None:
        named, checkpoints = Named([chosen.run]), True
    done, failed = list[dict[str, object]](), list[LauncherError]()
    for one in named.runs:
        try:
            with options.find(one, nodes, on, ssh_config, log) as found:
                target = dest / found.id if dest is not None and named.group is not None else dest
                fetched = found.fetch(target, checkpoints=checkpoints)
                written = None if checkpoints else found.written()
        except RunUnknown:
            if named.group is None:
                raise
            continue  # a variant that has nothing on these nodes
        failed += fetched.failed
        shown = {"run": found.id, "folder": str(fetched.shown), "bytes": fetched.bytes, "deleted": fetched.gone}
        done.append(shown | dict(chosen.fields(fetched)) if chosen is not None and json else shown)
        for problem in fetched.problems:
            warn(problem)
        if not json:
            variant = f" ({found.group.shown})" if found.group else ""
            what = f"downloaded {fetched.bytes:,} bytes to {fetched.shown}/"
            terminal.say(f"{found.id}{variant}: {'; '.join(fetched.gone) or what}")
            for command in fetched.trackers():
                terminal.say(f"  experiment tracker: {command}")
            if written is not None:
                Reporter().log(found.mask(str(written)))
            if chosen is not None:
                terminal.say(found.mask(chosen.said(fetched)))
    if not done:
        raise options.nothing_of_sweep(named.group, nodes, on)
    if json:
        terminal.say_json(done if named.group is not None else done[0])
    if failed:
        raise NodesFailed(failed)


def _folders(named: Named, nodes: str | None, on: str | None, ssh_config: Path | None) -> list[Path]:
    """Return the folders of the runs, with the curves that those which have not ended have now."""
    found = []
    for one in named.runs:
        with options.find(one, nodes, on, ssh_config) as run:
            if run.outcome is None:
                run.fetch()
            found.append(run.folder)
    return found
