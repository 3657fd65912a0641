"""Display of a sweep over a pool of machines: a table of its variants, or a line for each change in a pipe."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.api.until_started import until_started
from launcher.cli.follow import SECOND_CTRL_C, without_ctrl_c
from launcher.cli.long_work import LongWork
from launcher.cli.status import STYLES
from launcher.cli.terminal import Reporter, interactive, table_console
from launcher.errors import StoppedByUser
from launcher.features.sweeps.alone import alone
from launcher.features.sweeps.summary import summary
from launcher.features.sweeps.sweep import Sweep, SweepState, Variant
from launcher.job.models import Job
from launcher.job.scalars import duration
from launcher.model.plan import is_run_id
from launcher.model.sizes import counted
from launcher.node.parallel import uninterrupted

_AROUND = 4  # lines of the screen besides the rows of the table


def run_sweep(job: Job, *, resume: str | None, most: int | None, ssh_config: Path | None) -> int:
    """Run the variants that have no result. Return the worst exit code."""
    with ExitStack() as held:
        if resume is not None and is_run_id(resume):  # before it follows what runs; another text is refused
            held.enter_context(alone(resume))
        with LongWork() as work, until_started():
            sweep = Sweep(job, resume=resume, most=most, log=work.log, progress=work.progress, ssh_config=ssh_config)
        if resume is None:
            held.enter_context(alone(sweep.group))
        return _run(sweep, job)


def _run(sweep: Sweep, job: Job) -> int:
    screen = SweepScreen()
    sweep.log = screen.log
    machines = counted(len({node.host for node in job.nodes}), "machine")  # a pool may name one several times
    screen.log(f"{sweep.group}: {counted(len(sweep.variants()), 'variant')} on {machines}")
    try:
        with screen.live():
            code = sweep.run(screen.show)
    except KeyboardInterrupt:
        return _leave_or_stop(sweep, screen)
    screen.conclude(sweep.group, sweep.variants(), sweep.resume)
    return code


def _leave_or_stop(sweep: Sweep, screen: SweepScreen) -> int:
    """After the first Ctrl-C: detach from running variants; stop them on a second one."""
    try:
        variants = sweep.settled()
        running = [variant for variant in variants if variant.state in (SweepState.STARTING, SweepState.RUNNING)]
        waiting = [variant.name for variant in variants if variant.state is SweepState.WAITING]
        if running:
            screen.log(f"still running: {', '.join(f'{v.name} on {_nodes(v)}' for v in running)}")
        if waiting:
            screen.log(f"not started: {', '.join(waiting)}")
        screen.log(f"To resume: {sweep.resume}")
        if running:
            screen.log(f"To stop the running variants, press Ctrl-C again within {SECOND_CTRL_C:.0f} s")
        until = time.monotonic() + SECOND_CTRL_C
        uninterrupted(sweep.leave)
        time.sleep(max(0.0, until - time.monotonic()) if running else 0)
    except KeyboardInterrupt:
        with without_ctrl_c():
            sweep.leave()
            screen.log("stopping the running variants; the programs may save checkpoints first")
            sweep.stop()
        screen.log("stopped; only the output folders remain on the nodes")
        return StoppedByUser.exit_code
    return 0


class SweepScreen(Reporter):
    """Shows the variants of a sweep, and messages above them."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._last: dict[str, Variant] = {}

    def conclude(self, group: str, variants: Sequence[Variant], resume: str) -> None:
        """Print the end of a sweep. resume: the command that runs the variants without a result."""
        self.log(f"{group}: {_counts(variants)}")
        console = table_console(stderr=True)
        for part in summary(group, variants, resume, console.width):
            console.print(part, soft_wrap=isinstance(part, Text))

    @contextmanager
    def live(self) -> Iterator[None]:
        if interactive():
            self._live = Live(console=self.err, refresh_per_second=4)
            uninterrupted(self._live.start)
        try:
            yield
        finally:
            if self._live is not None:
                uninterrupted(self._live.stop)
                self._live = None

    def show(self, variants: Sequence[Variant]) -> None:
        if self._live is not None:
            self._live.update(Group(*_table(variants, self.err.height), Text(_counts(variants), style="dim")))
            return
        for variant in variants:
            before = self._last.get(variant.name)
            if (before is None or before.state is not variant.state) and (line := _line(variant)):
                self.log(line)
            self._last[variant.name] = variant


def _table(variants: Sequence[Variant], height: int) -> list[Table]:
    """Return a table of all variants; if they do not fit, of those that are running or have failed."""
    shown = list(variants)
    if len(shown) + _AROUND > height:
        shown = [v for v in variants if v.state in (SweepState.STARTING, SweepState.RUNNING, SweepState.FAILED)][
            : height - _AROUND
        ]
    rows = []
    for variant in shown:
        now = variant.progress
        step = "" if now is None else f"{now.last.get('step')}/{now.last.get('steps')}"
        left = duration(now.eta) if now is not None and now.eta and not variant.state.ended else ""
        accuracy = "" if variant.top1 is None else f"{variant.top1:.2f}"
        state = Text(variant.shown_state, style=STYLES.get(variant.state.value, ""))
        rows.append((Text(variant.name), Text(_nodes(variant)), state, Text(step), Text(accuracy), Text(left)))
    heads = ("variant", "nodes", "state", "step", "top-1", "left")
    kept = [index for index in range(len(heads)) if any(row[index].plain for row in rows)]
    table = Table(*(heads[index] for index in kept), box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return [table] if shown else []


def _line(variant: Variant) -> str:
    """Return the line for a pipe; "" for a state that is not reported."""
    match variant.state:
        case SweepState.RUNNING:
            return f"{variant.name}: running on {_nodes(variant)}: launcher logs {variant.run}"
        case SweepState.DONE:
            return f"{variant.name}: {variant.shown_state}" + (
                "" if variant.top1 is None else f", top-1 {variant.top1:.2f} %"
            )
        case SweepState.FAILED:
            logs = f": launcher logs {variant.run}" if variant.run else ""
            return f"{variant.name}: failed, {variant.why}{logs}"
        case SweepState.STOPPED:
            return f"{variant.name}: stopped"
        case _:
            return ""


def _nodes(variant: Variant) -> str:
    return ", ".join(variant.nodes)


def _counts(variants: Sequence[Variant]) -> str:
    found = Counter(variant.state for variant in variants)
    return ", ".join(f"{found[state]} {state.value}" for state in SweepState if found[state])
