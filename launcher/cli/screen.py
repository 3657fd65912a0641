"""What a person sees of a running job: the master's lines on stdout, news and one progress line on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from launcher.cli.held import Held
from launcher.cli.news import News
from launcher.cli.options import interactive
from launcher.logs.lines import Lines, Masker
from launcher.run.diagnose import Failure
from launcher.run.finish import Outcome
from launcher.run.messages import Message, NodeBack, NodeEnded, NodeGone, NodeLost, NodeRestarted, Output, Progress
from launcher.run.state import RunState

if TYPE_CHECKING:  # rich is loaded where it is first needed, which in a start is after the containers run
    from rich.console import Console
    from rich.live import Live


class Screen(News):
    """Shows messages of a watch. Output goes to stdout line by line, unchanged but for masked secrets."""

    def __init__(self, masker: Masker | None = None, *, prefix: bool = False) -> None:
        """prefix: begin each line with its node's name, where several are shown."""
        self.mask = masker or Masker()
        self._prefix = prefix
        self._lines: dict[str, Lines] = {}
        self._progress = ProgressLine()
        self._live: Live | None = None
        self._held = Held()

    def __enter__(self) -> Screen:
        return self

    @contextmanager
    def live(self) -> Iterator[None]:
        """With a progress line at the bottom, where a person is watching."""
        if interactive():
            from rich.live import Live
            from rich.text import Text

            self._live = Live(
                Text(""),
                console=self.err,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,  # the job's output stays on stdout, as a pipe expects
                redirect_stderr=False,
            )
            self._live.start()
        try:
            yield
        finally:
            self._hide()

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Print what is left and take the progress line away."""
        self._end_lines()
        self._write(self._held.let_go())
        self._hide()

    def conclude(self, outcome: Outcome) -> None:
        """The run has ended: print what is left, and how it ended.

        A failure comes before what all ranks said of it, which a terminal is spared; a file or a pipe gets every line.
        """
        self._end_lines()
        late = self._held.let_go()
        if outcome.failure is None:
            self._write(late)
        self._hide()
        print_outcome(self.err, outcome, self.mask)
        if outcome.failure is not None and not sys.stdout.isatty():
            self._write(late)

    def _end_lines(self) -> None:
        for node, lines in self._lines.items():
            self._print(node, lines.end())

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, message: Message) -> None:
        if isinstance(message, Output):
            lines = self._lines.setdefault(message.node, Lines())
            self._print(message.node, lines.feed(message.data))
            return
        self._write(self._held.sift([], time.monotonic()))
        if isinstance(message, Progress):
            self._progress.update(message.fields, time.time())
            if self._live is not None:
                from rich.text import Text

                self._live.update(Text(self._progress.render(), style="cyan"))
        elif isinstance(message, NodeEnded):
            if message.state.exit_code != 0:
                self._held.failing = True
                self.say(f"{message.node} ended with exit code {message.state.exit_code}")
        elif isinstance(message, NodeLost):
            self.say(f"{message.node}: no connection, trying again; the run goes on there ({message.reason})")
        elif isinstance(message, NodeRestarted):
            self._write(self._held.let_go())  # the run did not end by it
            self.say(f"{message.node}: started again (restart {message.restarts}; before: {message.why})")
        elif isinstance(message, NodeBack):
            self.say(f"{message.node}: connected again")
        elif isinstance(message, NodeGone):
            self.say(f"{message.node}: given up ({message.reason})")

    def _print(self, node: str, lines: list[str]) -> None:
        head = f"{node} | " if self._prefix else ""
        self._write(self._held.sift([head + line for line in lines], time.monotonic()))

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        text = "".join(f"{self.mask(line)}\n" for line in lines)
        if self._live is not None:
            self._live.stop()  # the line below must not be written over
        sys.stdout.write(text)
        sys.stdout.flush()
        if self._live is not None:
            self._live.start()


class ProgressLine:
    """`epoch 2/6  step 1200/15018  910 images/s  ETA 1:02:11` from the lines of metrics.jsonl."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}
        self._first: tuple[float, float] | None = None  # (time, step) of the first line seen
        self._eta: float | None = None

    def update(self, fields: Mapping[str, Any], now: float) -> None:
        if "step" not in fields:
            return
        self._last = fields
        step, steps = _number(fields.get("step")), _number(fields.get("steps"))
        at = _number(fields.get("time")) or now
        if step is None or steps is None:
            return
        if self._first is None or step < self._first[1]:
            self._first = (at, step)
            return
        took, done = at - self._first[0], step - self._first[1]
        if took > 0 and done > 0:
            self._eta = took / done * max(0.0, steps - step)

    def render(self) -> str:
        last = self._last
        if not last:
            return ""
        parts = []
        if "epoch" in last:
            parts.append(f"epoch {last['epoch']}" + (f"/{last['epochs']}" if "epochs" in last else ""))
        parts.append(f"step {last['step']}" + (f"/{last['steps']}" if "steps" in last else ""))
        speed = _number(last.get("images_per_s"))
        if speed is not None:
            parts.append(f"{speed:,.0f} images/s")
        if self._eta is not None:
            parts.append(f"ETA {duration(self._eta)}")
        return "  ".join(parts)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def duration(seconds: float) -> str:
    """`1:02:11`, `2:11`."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def print_failure(console: Console, failure: Failure, mask: Callable[[str], str]) -> None:
    """The first failure: who, its own words without secrets, what it means, what to do."""
    from rich.markup import escape
    from rich.text import Text

    who = failure.node if failure.rank is None else f"rank {failure.rank} on {failure.node}"
    if failure.words:
        console.print(Text(mask(failure.words)))
    console.print(f"[bold red]failed[/] {escape(who)} {escape(mask(failure.what))}")
    if failure.cure:
        console.print(f"  -> {escape(failure.cure)}")


def top1(epoch: Mapping[str, Any]) -> float | None:
    """Validation accuracy in percent, from an epoch's line of metrics.jsonl; None where it has none."""
    val = epoch.get("val")
    return _number(val.get("top1")) if isinstance(val, Mapping) else None


def print_outcome(console: Console, outcome: Outcome, mask: Callable[[str], str]) -> None:
    from rich.markup import escape

    if outcome.failure is not None:
        print_failure(console, outcome.failure, mask)
        victims = [str(node["node"]) for node in outcome.nodes if node["victim"]]
        if victims:
            console.print(f"[dim]ended because of it, not to blame: {escape(', '.join(victims))}[/]")
        console.print(f"[dim]everything that was printed: runs/{outcome.run}/logs/[/]")
    if outcome.state is RunState.DONE:
        accuracy = top1(outcome.last)
        extra = "" if accuracy is None else f", validation top-1 {accuracy:.2f} %"
        console.print(f"[bold green]done[/] {outcome.run}{extra}; logs and curves in runs/{outcome.run}/")
