"""`launcher clean`: list leftovers of old runs on nodes, then remove them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from launcher.api.leftovers import leftovers
from launcher.cli import options, terminal
from launcher.cli.terminal import Reporter
from launcher.errors import NodesFailed, NotConfirmed
from launcher.job.settings import use_valid_settings
from launcher.model import labels
from launcher.model.facts import ImageInfo
from launcher.model.plan import RunId
from launcher.model.sizes import counted, size_text
from launcher.naming import first_of
from launcher.run.end.leftovers import OF_IMAGE, Leftovers, OldCache, OldContainer, OldOutput
from launcher.run.locate import copy_by_hand

_NAMED = 3  # runs in an advice


def clean(
    nodes: options.Nodes = None,
    all_projects: Annotated[
        bool, typer.Option("--all-projects", help="Also output folders and images of runs that other folders started.")
    ] = False,
    unfetched: Annotated[bool, typer.Option("--unfetched", help="Also what has files that were not fetched.")] = False,
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Also what runs left in /dev/shm under names of their own.")
    ] = False,
    models: Annotated[bool, typer.Option("--models", help="Also the models of jobs with `models: true`.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """List leftovers and ask before removing them: unused images that launcher
    built for runs that this folder started, output folders of such runs that have
    no container any more, containers of runs that `down` stopped while the node was
    unreachable, containers and folders of killed commands, and caches of images that
    the node no longer has.

    A run that has ended keeps its containers, and with them its output folders,
    until `down`; so do plain processes. Such runs are counted.

    Output folders and containers with checkpoints or other files that are not in
    runs/ are listed, and kept without --unfetched: launcher fetch RUN --checkpoints.
    So are files that `down` has named in /dev/shm, without --shared-memory.

    By default, all nodes of the runs recorded here are checked. Without a
    terminal and without --yes, leftovers are only listed.

    Example: launcher clean --nodes gpu-a,gpu-b
    """
    use_valid_settings(os.environ, Reporter().warn)
    with leftovers(options.hosts(nodes), ssh_config=ssh_config) as listed:
        every = listed.nodes
        found = list(every if all_projects else map(_of_this_folder, every))
        if json:
            terminal.say_json([_as_json(each) for each in found])
        else:
            lines = [line for each in found for line in _lines(each, models=models)] or ["nothing to remove"]
            terminal.say("\n".join(lines))
            _explain(every, found, kept=not unfetched)
            _explain_ended(found)
            if not shared_memory and any(each.shared for each in found):
                terminal.note("files in /dev/shm are kept, as they may be yours; to remove them: --shared-memory")
        if listed.no_engine:
            terminal.note(f"warning: containers and images were not searched: {listed.no_engine}")
        chosen = found if unfetched else [_fetched(each) for each in found]
        chosen = [_without_used_caches(each, models=models) for each in chosen]
        if not shared_memory:
            chosen = [replace(each, shared=()) if each.shared else each for each in chosen]
        if any(chosen) and not yes and not sys.stdin.isatty():
            terminal.note("nothing was removed; to remove the listed items, use --yes")
        elif any(chosen) and (yes or typer.confirm(_question(found, chosen))):
            try:
                listed.remove(chosen)
            except KeyboardInterrupt:
                what = "interrupted; some of the listed items may have been removed"
                raise NotConfirmed("clean", what, "to see what is left, repeat the command") from None
            terminal.note(_removed(_count(chosen, models=models), _count(found, models=models)))
        elif any(chosen):
            terminal.note("nothing was removed")
        elif yes and any(found):
            terminal.note("nothing was removed: all of these are kept")
        if listed.failed:
            raise NodesFailed(listed.failed, of=listed.asked)


def _count(found: Sequence[Leftovers], *, models: bool) -> int:
    return sum(len(_lines(each, models=models)) for each in found)


def _removed(removed: int, listed: int) -> str:
    if removed == listed:
        return "removed"
    return f"removed {removed} of these {listed}; the others are kept"


def _of_this_folder(found: Leftovers) -> Leftovers:
    outputs = [output for output in found.outputs if output.ours or output.command]
    images = [image for image in found.images if image.id in found.recorded]
    ended = {run: ours for run, ours in found.ended.items() if ours}
    return replace(found, outputs=outputs, images=images, ended=ended)


def _fetched(found: Leftovers) -> Leftovers:
    """Return what may be removed without --unfetched."""
    outputs = [output for output in found.outputs if not output.unfetched]
    return replace(found, outputs=outputs, containers=[each for each in found.containers if not each.kept])


def _without_used_caches(found: Leftovers, *, models: bool) -> Leftovers:
    unused = [each for each in found.caches if not each.kept or (models and each.kept == "models")]
    return replace(found, caches=unused)


def _question(found: Sequence[Leftovers], chosen: Sequence[Leftovers]) -> str:
    return "Remove all of these?" if found == chosen else "Remove these, except what is kept?"


def _explain(every: Sequence[Leftovers], found: Sequence[Leftovers], *, kept: bool) -> None:
    """Name what is not removed: on stderr, as it is no leftover of this folder, or its user may want it."""
    unfetched = [output for each in found for output in each.outputs if output.unfetched]
    runs = [output.run for output in unfetched if output.ours]
    of_shells = [(o.path, each.engine.host) for each in found for o in each.outputs if o.unfetched and o.command]
    runs += [each.run for one in found for each in one.containers if each.kept]
    if (unfetched or runs) and kept:
        fetch = [_for_each(lambda run: f"launcher fetch {run} --checkpoints", [*dict.fromkeys(runs)])] if runs else []
        fetch += [copy_by_hand(host, path) for path, host in of_shells]
        if not all(output.ours or output.command for output in unfetched):
            fetch.append("launcher fetch RUN --checkpoints in the folder where RUN was started")
        fix = f"to download them: {'; '.join(fetch)}; to remove them: --unfetched"
        terminal.note(f"output folders and containers with files that are not in runs/ are kept; {fix}")
    others = [o for each, shown in zip(every, found, strict=True) for o in each.outputs if o not in shown.outputs]
    images = [i for each, shown in zip(every, found, strict=True) for i in each.images if i not in shown.images]
    for kind, sizes in (("output folder", [o.size for o in others]), ("image", [i.size for i in images])):
        if sizes:
            what = f"{len(sizes)} {kind}{'s' * (len(sizes) != 1)} ({size_text(sum(sizes))})"
            kept_ = f"of runs that were not started here {'is' if len(sizes) == 1 else 'are'} kept"
            terminal.note(f"{what} {kept_}; to list them: --all-projects")


def _explain_ended(found: Sequence[Leftovers]) -> None:
    """Say that runs which have ended have to be taken down first: their files are no leftovers until then."""
    ended = {run: ours for each in found for run, ours in each.ended.items()}
    if not ended:
        return
    where = ""
    if not all(ended.values()):
        where = f" --nodes {shlex.quote(','.join(dict.fromkeys(each.engine.host for each in found)))}"
    fix = _for_each(lambda run: f"launcher down {run}{where}", [*ended])
    if len(ended) > _NAMED:  # other runs may go on
        every = "--all-projects" if where else "--all"
        fix += f", or launcher down {every}{where}, which also stops the runs that go on"
    runs, one = counted(len(ended), "run"), len(ended) == 1
    what = f"{runs} that {'has' if one else 'have'} ended {'was' if one else 'were'} not taken down"
    terminal.note(f"{what} and {'is' if one else 'are'} kept: {fix}; then repeat the command")


def _for_each(command: Callable[[RunId], str], runs: Sequence[RunId]) -> str:
    """Return the commands for these runs, to be pasted; of many runs, the command with RUN and the first of them."""
    if len(runs) > _NAMED:
        return f"{command('RUN')} for each of {first_of(runs, _NAMED)}"
    return " && ".join(map(command, runs))


def _as_json(found: Leftovers) -> dict[str, object]:
    return {
        "node": found.engine.node,
        "containers": [container.state.name for container in found.containers],
        "kept": [
            {
                "what": kept.what,
                "why": kept.why,
                "unfetched": [{"path": f.path, "bytes": f.size} for f in kept.unfetched],
            }
            for kept in (container.kept for container in found.containers)
            if kept is not None
        ],
        "images": [
            {"name": _name(image), "bytes": image.size, "used_here": image.id in found.recorded}
            for image in found.images
        ],
        "caches": [
            {"path": each.path, "files": each.files, "bytes": each.size, "age": round(each.age), "kept": each.kept}
            for each in found.caches
        ],
        "ended": [{"run": run, "started_here": ours} for run, ours in found.ended.items()],
        "shared_memory": [{"name": each.name, "bytes": each.size} for each in found.shared],
        "outputs": [
            {
                "run": out.run,
                "variant": out.variant or None,
                "path": out.path,
                "files": out.files,
                "bytes": out.size,
                "started_here": out.ours,
                "command": out.command or None,
                "unfetched": [{"path": file.path, "bytes": file.size} for file in out.unfetched],
            }
            for out in found.outputs
        ],
    }


def _name(image: ImageInfo) -> str:
    return ", ".join(image.tags) or image.id[7:19]


def _lines(found: Leftovers, *, models: bool) -> list[str]:
    node = found.engine.node
    return [
        *(f"{node}: {_container(container)}" for container in found.containers),
        *(f"{node}: image {_name(image)}  {size_text(image.size)}" for image in found.images),
        *(f"{node}: {_output(output)}" for output in found.outputs),
        *(f"{node}: {_cache(each, models=models)}" for each in found.caches),
        *(f"{node}: /dev/shm/{each.name}  {size_text(each.size)}" for each in found.shared),
    ]


def _container(container: OldContainer) -> str:
    if container.kept is None:
        of = {"run": "of a stopped run", "claim": "which is a lock"}
        purpose = container.state.labels.get(labels.PURPOSE, "")
        return f"container {container.state.name} {of.get(purpose, 'of a killed command')}"
    return str(container.kept)


def _cache(cache: OldCache, *, models: bool) -> str:
    days = int(cache.age // 86400)
    age = f"{counted(days, 'day')} old" if days else "of today"
    holds = f"{counted(cache.files, 'file')}, {size_text(cache.size)}, {age}" if cache.files else "empty"
    line = f"{cache.path}  {holds}"
    if cache.kept == "models":
        return line if models else f"{line}; to remove them: --models"
    if cache.kept == OF_IMAGE:
        return f"{line}; kept: {cache.kept}; to remove it while no run uses it: rm -r"
    return f"{line}; kept: {cache.kept}" if cache.kept else line


def _output(output: OldOutput) -> str:
    name = f"{output.path} ({output.variant})" if output.variant else output.path
    line = f"{name}  {counted(output.files, 'file')}, {size_text(output.size)}"
    if output.unfetched:
        line += f"; {output.not_fetched}"
    if output.command:
        return f"{line}; of `launcher {output.command}`"
    return line if output.ours else f"{line}; not started here"
