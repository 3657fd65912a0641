"""`launcher status`: show the current state of a run's nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.api.history import NOT_STARTED, RunRow, sweep_row, unstarted
from launcher.cli import options, terminal
from launcher.cli.terminal import Reporter
from launcher.errors import NodesFailed, RunUnknown
from launcher.job.scalars import duration
from launcher.model.facts import NodeFacts
from launcher.model.plan import shortened
from launcher.run.status import NodeStatus, RunStatus, Utilization

REFRESH = 2.0
NARROW = 12  # minimum columns of "last line"; if narrower, it is omitted, then other columns from the right
MOST = 200  # rows
# Columns of a node's name, `user@host.example.org:22` may be one, and of a variant: `code=1a2b3c4d (main) lr=0.1`
LONGEST = {"node": 24, "nodes": 24, "variant": 40}


def status(
    run: options.RunOrSweep = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run ends.")] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Show the current state of each node. A node that does not respond is shown as
    unreachable (exit code 3). With --nodes, a run that has ended there is `ended
    here` if it has other nodes: they were not asked.

    Of a sweep, each variant is shown. With --nodes and no run, also show who uses
    the GPUs of these nodes.

    Example: launcher status --watch
    """
    console = terminal.console(soft_wrap=False)
    machines, reasons = _machines(nodes, ssh_config) if run is None and on is None else ([], [])
    every, rows, unmasked = list[RunStatus](), list[RunRow](), list[str]()
    log = cache(Reporter().log)  # each note once, for any number of variants
    named = options.named(run, nodes, on, ssh_config, log)
    for one in named.runs:
        try:
            with options.find(one, nodes, on, ssh_config, log) as found:
                seen = _watch(found.status, console) if watch and not json else found.status()
        except (RunUnknown, NodesFailed) as error:
            if not machines and (named.group is None or not isinstance(error, RunUnknown)):
                raise
            continue
        every.append(seen)
        unmasked += [found.unmasked] if any(node.last for node in seen.nodes) else []
        rows.append(RunRow(seen.run, seen.state, None, (), group=found.group))
        if not json and not watch and named.group is None:
            console.print(render(seen, console.width))
    if not every and named.group is not None:
        raise options.nothing_of_sweep(named.group, nodes, on)
    if named.group is not None and nodes is None and on is None and (left := unstarted(named.group, rows)):
        names = [row.group.shown for row in left if row.group]
        every += [RunStatus("", NOT_STARTED, None, (), None, variant=name) for name in names]
        terminal.note(sweep_row(named.group, rows).left)
    if named.group is not None and not json and not watch:
        console.print(render_sweep(every, console.width))
    if json:
        reports = [seen.to_dict() for seen in every]
        terminal.say_json(reports if named.group is not None else dict(*reports) | _gpus_of(machines))
    elif machines:
        from launcher.cli import gpus

        terminal.table_console().print(gpus.table(machines))
    for warning in dict.fromkeys(filter(None, unmasked)):
        Reporter().warn(warning)
    reasons += [node.reason for seen in every for node in seen.nodes if node.reason is not None]
    for reason in dict.fromkeys(reasons):
        terminal.note(reason)
    if reasons:
        raise typer.Exit(3)


def _machines(nodes: str | None, ssh_config: Path | None) -> tuple[list[NodeFacts], list[str]]:
    """Return the nodes that have GPUs, and the errors of unreachable nodes. Warns of unusable GPUs."""
    if (hosts := options.hosts(nodes)) is None:
        return [], []
    from launcher.api.machines import machines
    from launcher.planning.gpu_faults import fault

    found, errors = machines(hosts, ssh_config=ssh_config)
    for node, problem in ((node, fault(node)) for node in found):
        if problem is not None:
            Reporter().warn(f"{node.name}: {problem.what}; {problem.fix}")
    return [node for node in found if node.gpus], [str(error) for error in errors]


def _gpus_of(nodes: Sequence[NodeFacts]) -> dict[str, Any]:
    if not nodes:
        return {}
    from launcher.cli import gpus

    return {"gpus": gpus.rows(nodes)}


def _watch(ask: Callable[[], RunStatus], console: Console) -> RunStatus:
    """Refresh until the run ends or Ctrl-C. Return the last status."""
    seen = ask()
    with Live(render(seen, console.width), console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while not seen.ended:
            time.sleep(REFRESH)
            seen = ask()
            live.update(render(seen, console.width), refresh=True)
    return seen


def render(seen: RunStatus, width: int) -> RenderableType:
    """Return the run and its progress, then a line per node; empty columns are omitted.

    If the terminal is too narrow, the last line of the log is cut first, then columns are dropped from the right.
    """
    failure = (seen.result or {}).get("failure")
    shown, left_out = _some(seen.nodes, failure.get("node") if isinstance(failure, dict) else None)
    table = _table([_cells(node, ended=seen.ended) for node in shown], width)
    head = Text(f"{seen.run}  ", style="bold")
    if seen.variant:
        head += Text(f"{seen.variant}  ", style="bold cyan")
    head += Text(seen.state, style=STYLES.get(seen.state, ""))
    if by := seen.stopped_by or seen.ended_by:
        head += Text(f" by {by}")
    if seen.started_by:
        head += Text(f"  {'started ' if by else ''}by {seen.started_by}", style="dim")
    why = [
        Text(f"{node.node}: restart {number} after {reason}", style="yellow")
        for node in shown
        for number, reason in enumerate(node.restarted, 1)
    ]
    progress = [] if seen.progress is None else [Text("  ".join(seen.progress.parts()), style="cyan")]
    if seen.progress is not None and seen.progress.slow:
        progress.append(Text(seen.progress.slow, style="yellow"))
    if apart := (seen.result or {}).get("apart"):
        progress.append(Text(str(apart), style="yellow"))
    if seen.gradients:
        progress.append(Text(seen.gradients, style="dim"))
    if seen.world is not None:
        progress.insert(0, Text(seen.world.text))
    rest = [Text(left_out, style="dim")] if left_out else []
    if seen.not_started:
        rest.append(Text(f"was not started: {seen.not_started}", style="yellow"))
    waits = [Text(text, style="yellow") for node in shown for text in _at_breakpoints(seen, node)]
    waits += [Text(text, style="yellow") for text in dict.fromkeys(node.waits for node in shown if node.waits)]
    return Group(head, *waits, *progress, table, *rest, *why)


def render_sweep(variants: Sequence[RunStatus], width: int) -> RenderableType:
    """Return a line per variant, and below what some of them wait for or have met; `status RUN` shows its nodes."""
    lines = [Text(f"{each.variant}: {text}", style="yellow") for each in variants for text in _said_of(each)]
    by = dict.fromkeys(each.started_by for each in variants if each.started_by)
    who = [Text(f"started by {', '.join(by)}", style="dim")] if by else []
    return Group(_table([_variant_cells(each) for each in variants], width), *lines, *who)


def _said_of(seen: RunStatus) -> Iterator[str]:
    if seen.not_started:
        yield f"was not started: {seen.not_started}"
    if seen.stopped_by:
        yield f"stopped by {seen.stopped_by}"
    if failure := (seen.result or {}).get("failure"):
        yield f"failed: {failure.get('node')}: {failure.get('what')}"
    for node in seen.nodes:
        yield from _at_breakpoints(seen, node)
        yield from (f"{node.node}: restart {number} after {why}" for number, why in enumerate(node.restarted, 1))
    yield from dict.fromkeys(node.waits for node in seen.nodes if node.waits)
    if seen.progress is not None and seen.progress.slow:
        yield seen.progress.slow
    if apart := (seen.result or {}).get("apart"):
        yield str(apart)


def _at_breakpoints(seen: RunStatus, node: NodeStatus) -> Iterator[str]:
    yield from (f"{one.text}: launcher debug {seen.run}" if one.waits else one.text for one in node.debug)


def _table(rows: Sequence[Mapping[str, str]], width: int) -> Table:
    """Return a table without empty columns, and without the last columns if the terminal is too narrow."""
    needed = {
        name: max(cell_len(name), *(cell_len(row[name]) for row in rows))
        for name in (rows[0] if rows else ())
        if name in ALWAYS or any(row[name] for row in rows)
    }
    room = width
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, wanted in needed.items():
        columns = min(wanted, LONGEST.get(name, width))
        if name not in ALWAYS and room < (min(columns, NARROW) if name == "last line" else columns):
            continue
        table.add_column(name, no_wrap=True, overflow="ellipsis", width=max(1, min(columns, room)))
        room -= columns + 2
    for row in rows:
        # without its middle: variants may differ at either end
        cells = {name: Text(shortened(text, LONGEST.get(name, len(text)))) for name, text in row.items()}
        cells["state"].stylize(STYLES.get(row["state"].partition(" ")[0], ""))
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    return table


def _some(nodes: Sequence[NodeStatus], failed: str | None) -> tuple[Sequence[NodeStatus], str]:
    """Return up to MOST nodes, those in rare states first, and a summary of the rest. failed: one to be shown."""
    if len(nodes) <= MOST:
        return nodes, ""
    kinds = [(node.state, node.exit_code, node.oom_killed, node.restarts) for node in nodes]
    often = Counter(kinds)

    def order(index: int) -> tuple[bool, int, float, int]:
        node = nodes[index]
        lasted = (node.age or 0.0) if node.exit_code else 0.0  # the first that ended may be the reason
        return node.node != failed, often[kinds[index]], lasted, index

    chosen = {*sorted(range(len(nodes)), key=order)[:MOST]}
    rest = Counter(node.state for index, node in enumerate(nodes) if index not in chosen)
    summary = ", ".join(f"{count} {state}" for state, count in rest.items())
    return [nodes[index] for index in sorted(chosen)], f"and {summary}; to show all: launcher status --json"


ALWAYS = ("state", "node", "ranks", "restarts", "variant", "run")
STYLES = {"running": "green", "done": "green", "failed": "red", "unreachable": "red", "stopped": "yellow"}


def _cells(node: NodeStatus, *, ended: bool) -> dict[str, str]:
    """Return the cells by column, the least important column last."""
    first, last = node.ranks or ("", "")
    return {
        "state": node.state,
        "node": node.node,
        "ranks": str(first) if first == last else f"{first}-{last}",
        "restarts": str(node.restarts),
        "exit": ("" if node.exit_code is None else str(node.exit_code)) + (" OOM" if node.oom_killed else ""),
        "time" if ended else "age": "" if node.age is None else duration(node.age),
        "GPUs": _gpus(node),
        "memory": _memory(node.use),
        "last line": "".join(char if char.isprintable() else " " for char in node.last),
    }


def _variant_cells(seen: RunStatus) -> dict[str, str]:
    """Return the cells of a run of a sweep, the least important column last."""
    failed = [node for node in seen.nodes if node.exit_code]
    line = next((node.last for node in (*failed, *seen.nodes) if node.last), "")
    last = seen.progress.last if seen.progress is not None else {}
    return {
        "variant": seen.variant,
        "state": f"{seen.state} by {seen.ended_by}" if seen.ended_by else seen.state,
        "run": seen.run,
        "nodes": ", ".join(node.node for node in seen.nodes),
        "exit": next((str(node.exit_code) + " OOM" * node.oom_killed for node in failed), ""),
        "step": "/".join(str(last[key]) for key in ("step", "steps") if isinstance(last.get(key), int)),
        "time": duration(max(ages)) if (ages := [node.age for node in seen.nodes if node.age is not None]) else "",
        "last line": "".join(char if char.isprintable() else " " for char in line),
    }


def _gpus(node: NodeStatus) -> str:
    """Return the use of the GPUs, as in `8: 91-98 %, 14.2/16 GiB`, `1: 96 %, 61/122 GiB shared`."""
    count, use = len(node.gpus), node.use
    seen = () if use is None else use.gpus
    busy = sorted(gpu.busy for gpu in seen if gpu.busy is not None)
    used, total = max(((gpu.memory, gpu.memory_total or 0) for gpu in seen if gpu.memory is not None), default=(0, 0))
    memory = f"{used / 1024:.1f}/{total / 1024:.0f} GiB" if total else ""
    if use is not None and use.memory_total and seen and all(gpu.memory_total is None for gpu in seen):
        memory = f"{use.memory / 2**30:.0f}/{use.memory_total / 2**30:.0f} GiB shared"
    if not busy or not memory:
        return str(count) if count else ""
    share = str(busy[0]) if busy[0] == busy[-1] else f"{busy[0]}-{busy[-1]}"
    return f"{count}: {share} %, {memory}"


def _memory(seen: Utilization | None) -> str:
    return f"{seen.memory / 2**30:.1f}/{seen.memory_total / 2**30:.0f} GiB" if seen and seen.memory_total else ""
