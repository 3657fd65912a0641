"""What a person sees of a running job: its output on stdout, the launcher's reports and a progress line on stderr."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from launcher.cli import terminal
from launcher.cli.terminal import Reporter, interactive
from launcher.container_scripts.words import TRACEBACK
from launcher.logs.lines import Lines
from launcher.node.parallel import uninterrupted
from launcher.records.measured import TrainingProgress, top1, training_progress
from launcher.run import messages
from launcher.run.outcome import Outcome
from launcher.run.state import RunState

LEAVE = "the run may well go on there, Ctrl-C leaves it"
HOLD = 10.0  # seconds for which a traceback is held back
STATE_EVERY = 1.0  # seconds between two states of a program's progress bar, where they cannot be rewritten
IMPORTING_EVERY, IMPORTING_LONGEST = 30.0, 300.0  # seconds
HOLD_LINES = 2000  # a program that prints more after a traceback goes on
OWN = re.compile(r"(\S+ \| )?launcher: ")  # a line of ours, from a script in a container: wrapped where others are cut


class TracebackBuffer:
    """Holds back lines from a traceback on, until it is known whether the run ends by it.

    If the run fails meanwhile, the first failure is shown before them, which may be another rank's; if it goes on, the
    traceback did not matter.
    """

    def __init__(self) -> None:
        self.failing = False  # a node has failed: what comes now belongs to that
        self._lines: list[str] = []
        self._since = 0.0

    def sift(self, lines: Sequence[str], now: float) -> list[str]:
        """What can be shown at that time (of time.monotonic()), of these lines and of those held back."""
        shown: list[str] = []
        if not self._lines:
            heads = (place for place, line in enumerate(lines) if line.rstrip().endswith(TRACEBACK))
            first = next(heads, len(lines))
            shown, lines = list(lines[:first]), lines[first:]
            self._since = now
        self._lines += lines
        if len(self._lines) > HOLD_LINES or (now - self._since > HOLD and not self.failing):
            shown += self.flush()
        return shown

    def flush(self) -> list[str]:
        """All that were held back."""
        lines, self._lines = self._lines, []
        return lines


class FirstOutput:
    """Says that a program has printed nothing yet: its first import from a cold disk takes minutes and is no hang."""

    def __init__(self) -> None:
        self._since: float | None = None  # of time.monotonic(); None: something was printed
        self._said = 0.0

    def begin(self, now: float) -> None:
        self._since = self._said = now

    def end(self) -> None:
        self._since = None

    def words(self, now: float) -> str:
        """Every IMPORTING_EVERY seconds, up to IMPORTING_LONGEST; otherwise ""."""
        if self._since is None or now - self._said < IMPORTING_EVERY or now - self._since > IMPORTING_LONGEST:
            return ""
        self._said = now
        return f"nothing printed for {now - self._since:.0f} s: still importing? from a cold disk, torch takes minutes"


class Screen(Reporter):
    """Shows the messages of a run.

    Output goes to stdout line by line, without secrets and, unless it is raw, without terminal sequences other than
    colours. While a person follows it on a terminal, a program's lines are cut to its width, and its progress bar is
    shown beside the progress line; a file or a pipe gets lines whole, as do runs/<id>/logs/, and of such a bar one a
    second.
    """

    def __init__(self, mask: Callable[[str], str] = str, *, prefix: bool = False, raw: bool = False) -> None:
        """prefix: begin each line with its node's name, where several are shown. raw: pass all terminal sequences."""
        self.mask = mask
        self._prefix = prefix
        self._raw = raw
        self._states: dict[str, str] = {}  # by node, of a line that its program rewrites
        self._last_state = 0.0  # when one was printed, of time.monotonic()
        self._lines: dict[str, Lines] = {}
        self._progress: TrainingProgress | None = None
        self._live: Live | None = None
        self._held = TracebackBuffer()
        self._first = FirstOutput()
        self._complete = True  # its files could be brought here
        self.unread = False  # nothing reads stdout any more (`| head`)
        self.silent: dict[str, str] = {}  # nodes that do not answer now, and since when

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @contextmanager
    def live(self) -> Iterator[None]:
        """With a progress line at the bottom, where a person is watching."""
        self._first.begin(time.monotonic())
        if interactive():
            self._live = Live(  # the job's output stays on stdout, as a pipe expects
                console=self.err, refresh_per_second=8, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            uninterrupted(self._live.start)  # a Ctrl-C half-way through it would be an error of rich's at the end
        try:
            yield
        finally:
            self._hide()

    def finish(self) -> None:
        """Print what is left and take the progress line away."""
        self._end_lines()
        self._write(self._held.flush())
        self._hide()

    def conclude(self, outcome: Outcome) -> None:
        """The run has ended: print what is left, and how it ended.

        A failure comes before what all ranks printed of it, which only a file or a pipe gets.
        """
        self._end_lines()
        late = self._held.flush()
        if outcome.failure is None:
            self._write(late)
        self._hide()
        print_outcome(self.err, outcome, self.mask, complete=self._complete)
        if outcome.failure is not None and not sys.stdout.isatty():
            self._write(late)

    def _end_lines(self) -> None:
        for node, lines in self._lines.items():
            self._print(node, lines.end())

    def _hide(self) -> None:
        if self._live is not None:
            uninterrupted(self._live.stop)
            self._live = None

    def show(self, message: messages.Message) -> None:
        """Raises BrokenPipeError where nothing reads the output any more."""
        self._show(message)
        if self.unread:
            raise BrokenPipeError

    def _show(self, message: messages.Message) -> None:
        if isinstance(message, messages.Output):
            self._first.end()
            lines = self._lines.setdefault(message.node, Lines())
            self._print(message.node, lines.feed(message.data))
            self._show_state(message.node, lines.state)
            return
        self._write(self._held.sift([], time.monotonic()))
        match message:
            case messages.Progress(fields):
                self._first.end()
                before = () if self._progress is None else (self._progress.first, self._progress.last)
                self._progress = training_progress([*before, {"time": time.time(), **fields}])
                self._refresh()
            case messages.Tick():
                if words := self._first.words(time.monotonic()):
                    self.log(words)
            case messages.NodeEnded(node, state) if state.exit_code != 0:
                self._held.failing = True
                self.log(f"{node} ended with exit code {state.exit_code}")
            case messages.NodeLost(node, reason, moment):
                self.silent[node] = since = messages.clock(moment)
                self.log(f"{node}: no connection since {since}, trying again; {LEAVE} ({reason})")
            case messages.NodeRestarted(node, restarts, why):
                self._write(self._held.flush())  # the run did not end by it
                self.log(f"{node}: started again (restart {restarts}; before: {why})")
            case messages.RankZeroMoved():  # what nodes failed by is over
                self._held.failing = False
                self._write(self._held.flush())
            case messages.NodeBack(node):
                self.silent.pop(node, None)
                self.log(f"{node}: connected again")
            case messages.NotCollected(reason):
                self._complete = False
                self.warn(f"not brought here: {reason}")
            case messages.Warned(reason):
                self.warn(reason)
            case messages.NodeGone(node, reason):
                self.log(f"{node}: given up, as the run has ended without it ({reason})")
            case messages.NodeRemoved(node, folder):
                self._held.failing = True
                lost = "output folder was removed or locked" if folder else "container was removed from outside"
                self.log(f"{node}: its {lost}")
            case messages.NodeWaits(_, reason):
                self.log(reason)
            case messages.NodeStopped(node, by):
                self.log(f"{node}: {by} stops the run in another terminal")

    def _print(self, node: str, lines: list[str]) -> None:
        head = f"{node} | " if self._prefix else ""
        self._write(self._held.sift([head + line for line in lines], time.monotonic()))

    def _show_state(self, node: str, state: str) -> None:
        if state == self._states.get(node, ""):
            return
        self._states[node] = state
        if self._live is not None:
            self._refresh()
        elif state and time.monotonic() - self._last_state >= STATE_EVERY:
            self._last_state = time.monotonic()
            self._print(node, [state])

    def _refresh(self) -> None:
        """The progress line and below it the bars of programs."""
        if self._live is None:
            return
        shown = [] if self._progress is None else [Text("  ".join(self._progress.parts()), style="cyan")]
        shown += [Text.from_ansi(self._clean(state)) for state in self._states.values() if state]
        self._live.update(Text("\n", no_wrap=True, overflow="ellipsis").join(shown))

    def _clean(self, line: str) -> str:
        return self.mask(line if self._raw else terminal.coloured(line))

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        lines = [self._clean(line) for line in lines]
        if self._live is not None:
            uninterrupted(self._live.stop)  # the line below must not be written over
            if sys.stdout.isatty():
                width = os.get_terminal_size(sys.stdout.fileno()).columns
                lines = [line if OWN.match(line) else shorten(line, width) for line in lines]
        try:
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
        except BrokenPipeError:
            self.unread = True
            terminal.discard(sys.stdout)
        if self._live is not None:
            uninterrupted(self._live.start)


def shorten(line: str, width: int) -> str:
    """The line in at most `width` columns, an ellipsis at the end of what does not fit; then without its colours."""
    if len(line) <= width and line.isascii() and line.isprintable():
        return line
    text = Text.from_ansi(line.expandtabs())
    if width <= 0 or text.cell_len <= width:  # 0: a terminal of unknown size
        return line
    text.truncate(width, overflow="ellipsis")
    return text.plain.replace("\n", " ")


def print_outcome(console: Console, outcome: Outcome, mask: Callable[[str], str], *, complete: bool = True) -> None:
    """The first failure: who, its own words without secrets, what it means, what to do. Or that all is well.

    complete: all that it has written is here.
    """
    logs, everything = f"runs/{outcome.run}/logs/", f"logs and curves in runs/{outcome.run}/"
    incomplete = f"not all of its logs and curves are in runs/{outcome.run}/, as the warning says"
    if failure := outcome.failure:
        who = failure.node if failure.rank is None else f"rank {failure.rank} on {failure.node}"
        if failure.words:
            console.print(Text(mask(failure.words)))
        console.print(f"[bold red]failed[/] {escape(who)} {escape(mask(failure.what))}")
        if failure.cure:
            console.print(f"  -> {escape(failure.cure)}")
        victims = [node.node for node in outcome.nodes if node.victim]
        if victims:
            console.print(f"[dim]terminated as a consequence: {escape(', '.join(victims))}[/]")
        console.print(f"[dim]{f'everything that was printed: {logs}' if complete else incomplete}[/]")
    if outcome.stopped_by is not None:
        console.print(f"[bold]stopped[/] {outcome.run} by {escape(outcome.stopped_by)} in another terminal")
    if outcome.state is RunState.DONE:
        accuracy = top1(outcome.last)
        extra = "" if accuracy is None else f", validation top-1 {accuracy:.2f} %"
        lost = [node.node for node in outcome.nodes if node.exit_code != 0]  # with min_nodes
        extra += f" without {escape(', '.join(lost))}" if lost else ""
        console.print(f"[bold green]done[/] {outcome.run}{extra}; {everything if complete else incomplete}")
