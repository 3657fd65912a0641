"""Display of a running job: its output on stdout, the launcher's messages and a progress line on stderr."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from launcher.cli import terminal
from launcher.cli.terminal import Reporter, interactive
from launcher.container_scripts.words import TRACEBACK, last_traceback, lost_peer
from launcher.logs.lines import Lines
from launcher.model.plan import RunId
from launcher.node.parallel import uninterrupted
from launcher.records.masking import printed
from launcher.records.measured import TrainingProgress, top1, training_progress
from launcher.records.paths import RUNS, RunPaths
from launcher.records.wanted import EVENTS
from launcher.run.membership import TOGETHER
from launcher.run.result import Outcome
from launcher.run.state import RunState
from launcher.run.watch import messages

if TYPE_CHECKING:
    from launcher.records.written import Written

DETACH = "It may still be running there; press Ctrl-C to detach."
HOLD = 10.0  # seconds for which a traceback is held back
STATE_EVERY = 1.0  # seconds between two states of a program's progress bar, if they cannot be rewritten
IMPORTING_EVERY, IMPORTING_LONGEST = 30.0, 300.0  # seconds
WIDEST = 1 << 14  # characters of a line that are considered for a terminal
HOLD_CHARACTERS = 1 << 24
HOLD_LINES = 2000  # a program that prints more after a traceback is still running
ADDRESS = re.compile(r"^\S+ port \d+: ")
OWN = re.compile(r"(\S+ \| )?launcher: ")  # a message of the launcher's scripts in a container: wrapped, not cut


class TracebackBuffer:
    """Holds back output from a traceback on, until it is known whether the run fails because of it.

    If the run fails, the first failure, which may be another rank's, is shown first. If it continues, the traceback
    did not matter.
    """

    def __init__(self) -> None:
        self.failing = False  # a node has failed: further output belongs to the failure
        self._lines: list[str] = []
        self._since = 0.0

    def sift(self, lines: Sequence[str], now: float) -> list[str]:
        """Return the lines to show now, of those held back and these. now: time.monotonic()."""
        shown: list[str] = []
        if not self._lines:
            heads = (index for index, line in enumerate(lines) if line.rstrip().endswith(TRACEBACK))
            first = next(heads, len(lines))
            shown, lines = list(lines[:first]), lines[first:]
            self._since = now
        self._lines += lines
        if (
            len(self._lines) > HOLD_LINES
            or sum(map(len, self._lines)) > HOLD_CHARACTERS
            or (now - self._since > HOLD and not self.failing)
        ):
            shown += self.flush()
        return shown

    def flush(self) -> list[str]:
        """Return all lines that were held back."""
        lines, self._lines = self._lines, []
        return lines


class FirstOutput:
    """Reports that a program has printed nothing yet, which is no hang: it may still import torch from a cold disk."""

    def __init__(self) -> None:
        self._since: float | None = None  # of time.monotonic(); None: something was printed
        self._said = 0.0
        self.queued = False  # a cluster has not started the program, which prints nothing then

    def begin(self, now: float) -> None:
        self._since = self._said = now

    def end(self) -> None:
        self._since, self.queued = None, False

    def wait(self, now: float, *, queued: bool) -> None:
        """queued: whether the program still has not been started. Afterwards it may take as long as any other."""
        if queued:
            self.end()
        elif self.queued:
            self.begin(now)
        self.queued = queued

    def message(self, now: float) -> str:
        """Return a message every IMPORTING_EVERY seconds, up to IMPORTING_LONGEST; otherwise ""."""
        if self._since is None or now - self._said < IMPORTING_EVERY or now - self._since > IMPORTING_LONGEST:
            return ""
        self._said = now
        return f"no output for {now - self._since:.0f} s"


class Screen(Reporter):
    """Shows the messages of a run.

    Output goes to stdout line by line, without secrets and, unless it is raw, without terminal escape sequences other
    than colours. On a terminal, lines are cut to its width, and a program's progress bar is shown below the progress
    line. A file or a pipe gets complete lines, as runs/<id>/logs/ does, and one state of such a bar per second.
    """

    def __init__(self, mask: Callable[[str], str] = str, *, prefix: bool = False, raw: bool = False) -> None:
        """prefix: start each line with its node's name, for several nodes. raw: pass all terminal escape sequences."""
        self.mask = mask
        self._prefix = prefix
        self._raw = raw
        self._states: dict[str, str] = {}  # by node: the line that its program rewrites
        self._last_state = 0.0  # when a state was last printed (time.monotonic())
        self._lines: dict[str, Lines] = {}
        self._progress: TrainingProgress | None = None
        self._live: Live | None = None
        self._held = TracebackBuffer()
        self.first = FirstOutput()
        self._given_up: list[str] = []  # unreachable nodes that the run ended without
        self._recent = deque[str](maxlen=HOLD_LINES)  # output that was shown
        self._complete = True  # its files could be downloaded
        self.unread = False  # the reader of stdout has exited (`| head`)
        self.silent: dict[str, str] = {}  # nodes that do not respond now, and since when

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show a progress line at the bottom of a terminal."""
        self.first.begin(time.monotonic())
        if interactive():
            self._live = Live(  # the job's output stays on stdout, as a pipe expects
                console=self.err, refresh_per_second=8, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            uninterrupted(self._live.start)  # a Ctrl-C in the middle of it would cause an error in rich at exit
        try:
            yield
        finally:
            self._hide()

    def finish(self) -> None:
        """Print the remaining output and remove the progress line."""
        self._end_lines()
        self._write(self._held.flush())
        self._hide()

    def conclude(self, outcome: Outcome, written: Written | None = None) -> None:
        """Print the remaining output and the outcome of a run that has ended.

        The outcome comes last. The output of all ranks about a failure, before it, is only for a file or a pipe.
        """
        self._end_lines()
        late = self._held.flush()
        if outcome.failure is None or not sys.stdout.isatty():
            self._write(late)
        self._hide()
        if written is not None:
            self.log(self.mask(str(written)))
        words = outcome.failure.words.splitlines() if outcome.failure else []
        seen = _one_file_for_both() and any(line.endswith(words[-1]) for line in self._recent if words)
        named = [outcome.failure.node] if outcome.failure else []
        for node in self._given_up:
            if node not in named and outcome.state is not RunState.DONE:
                self.log(f"{node}: did not come back before the run ended")
        print_outcome(self.err, outcome, self.mask, complete=self._complete, words=not seen)

    def _end_lines(self) -> None:
        for node, lines in self._lines.items():
            self._print(node, lines.end())

    def _hide(self) -> None:
        if self._live is not None:
            uninterrupted(self._live.stop)
            self._live = None

    def show(self, message: messages.Message) -> None:
        """Show a message. Raises BrokenPipeError if the reader of stdout has exited."""
        self._show(message)
        if self.unread:
            raise BrokenPipeError

    def _show(self, message: messages.Message) -> None:
        if isinstance(message, messages.Output):
            self.first.end()
            lines = self._lines.setdefault(message.node, Lines())
            self._print(message.node, lines.feed(message.data))
            self._show_state(message.node, lines.state)
            return
        self._write(self._held.sift([], time.monotonic()))
        match message:
            case messages.Progress(fields):
                self.first.end()
                before = () if self._progress is None else (self._progress.first, self._progress.last)
                self._progress = training_progress([*before, {"time": time.time(), **fields}])
                self._refresh()
            case messages.Tick():
                self._tick()
            case messages.NodeEnded(node, state) if state.exit_code != 0:
                self._held.failing = True
                unknown = "ended without a record of its exit code"
                self.log(f"{node} {unknown if state.exit_code is None else f'exited with code {state.exit_code}'}")
            case messages.NodeAway(node, reason, moment):
                self.silent[node] = since = messages.clock(moment)
                reason = ADDRESS.sub("", reason)  # the node has a name
                self.log(f"{node}: no connection since {since}, reconnecting ({reason}). {DETACH}")
            case messages.NodeRestarted(node, restarts, why):
                self._write(self._held.flush())  # the run survived the failure
                self.log(f"{node}: restarted (restart {restarts}, after: {why})")
            case messages.RankZeroMoved():  # the run has survived the failures so far
                self._held.failing = False
                self._write(_without_lost_peer(self._held.flush()))
            case messages.NodeBack(node):
                self.silent.pop(node, None)
                self.log(f"{node}: connected again")
            case messages.Gradients(text) | messages.RankAtBreakpoint(text):
                self.log(text)
            case messages.NotCollected(reason):
                self._complete = False
                self.warn(f"not downloaded: {reason}")
            case messages.Warned(reason):
                self.warn(reason)
            case messages.NodeGivenUp(node):
                self._given_up.append(node)
            case messages.NodeRemoved(node, folder):
                self._held.failing = True
                lost = "output folder was removed or locked" if folder else "container was removed by another process"
                self.log(f"{node}: its {lost}")
            case messages.NodeWaits():
                self._show_wait(message)
            case messages.NodeStopped(node, by):
                self.log(f"{node}: {by} is stopping the run from another terminal")

    def _tick(self) -> None:
        if text := self.first.message(time.monotonic()):
            self.log(text)

    def _show_wait(self, message: messages.NodeWaits) -> None:
        self.first.wait(time.monotonic(), queued=message.queued)
        if message.reason:
            self.log(message.reason)

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
        """Redraw the progress line and, below it, the progress bars of programs."""
        if self._live is None:
            return
        shown = [] if self._progress is None else [Text("  ".join(self._progress.parts()), style="cyan")]
        shown += [Text.from_ansi(self._clean(state[:WIDEST])) for state in self._states.values() if state]
        self._live.update(Text("\n", no_wrap=True, overflow="ellipsis").join(shown))

    def _clean(self, line: str) -> str:
        return printed(self.mask(line if self._raw else terminal.coloured(line)))

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        width = 0
        if self._live is not None:
            uninterrupted(self._live.stop)  # otherwise the progress line would be overwritten
            width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
        try:
            for line in lines:
                self._write_line(line, width)
            sys.stdout.flush()
        except BrokenPipeError:
            self.unread = True
            terminal.discard(sys.stdout)
        except OSError as error:  # a full disk
            terminal.discard(sys.stdout)
            self.warn(f"stdout cannot be written ({error.strerror}): going on without it; runs/ has the output")
        if self._live is not None:
            uninterrupted(self._live.start)

    def _write_line(self, line: str, width: int) -> None:
        """width: of the terminal; 0: the whole line is printed."""
        line = self._clean(line[:WIDEST] if width else line)
        self._recent.append(line[-WIDEST:])
        sys.stdout.write(f"{line if not width or OWN.match(line) else shorten(line, width)}\n")


def _without_lost_peer(lines: list[str]) -> list[str]:
    """Return the lines without a traceback, with which they start, of a rank that lost another one."""
    end = next((index for index, line in enumerate(lines) if OWN.match(line)), len(lines))
    return lines[end:] if lost_peer(last_traceback("\n".join(lines[:end]))) else lines


def _one_file_for_both() -> bool:
    """Return whether stdout and stderr are written to the same file (`> log 2>&1`)."""
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError):  # no file at all
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


def shorten(line: str, width: int) -> str:
    """Return the line in at most `width` columns. A line that is cut ends with an ellipsis and loses its colours."""
    if len(line) <= width and line.isascii() and line.isprintable():
        return line
    text = Text.from_ansi(line.expandtabs())
    text.plain = text.plain.replace("\n", " ")
    if width <= 0 or text.cell_len <= width:  # 0: a terminal of unknown size
        return line
    text.truncate(width, overflow="ellipsis")
    return text.plain


def print_outcome(
    console: Console, outcome: Outcome, mask: Callable[[str], str], *, complete: bool = True, words: bool = True
) -> None:
    """Print the first failure (its error text without secrets, then node or rank, cause and fix), or the success.

    complete: all files of the run were downloaded. words: also print the error text.
    """
    logs, everything = f"runs/{outcome.run}/logs/", f"{_downloaded(outcome.run)} in runs/{outcome.run}/"
    incomplete = f"runs/{outcome.run}/ lacks some logs or curves, see the warning"
    if failure := outcome.failure:
        who = failure.node if failure.rank is None else f"rank {failure.rank} on {failure.node}"
        if words and failure.words not in failure.what:
            console.print(Text(mask(failure.words)))
        victims = [node.node for node in outcome.nodes if node.victim]
        if victims:
            console.print(f"[dim]terminated as a consequence: {escape(', '.join(victims))}[/]")
        console.print(f"[dim]{f'full output: {logs}' if complete else incomplete}[/]")
        verdict = "failed[/]" if outcome.state is RunState.FAILED else f"{outcome.state.value}[/] {outcome.run}:"
        before = "had failed before: " if outcome.state is RunState.STOPPED else ""
        console.print(f"[bold red]{verdict} {escape(who)} {before}{escape(mask(failure.what))}")
        if failure.cure:
            console.print(f"  -> {escape(failure.cure)}")
        if outcome.resume:
            console.print(f"  -> continue from {escape(outcome.resume)}")
    if outcome.stopped_by is not None:
        console.print(f"[bold]stopped[/] {outcome.run} by {escape(outcome.stopped_by)} from another terminal")
    if outcome.state is RunState.DONE:
        accuracy = top1(outcome.last)
        extra = "" if accuracy is None else f", validation top-1 {accuracy:.2f} %"
        extra = f", ended by its {outcome.ended_by}{extra}" if outcome.ended_by else extra
        lost = [node.node for node in outcome.nodes if node.exit_code != 0]  # with min_nodes
        lost = [] if outcome.ended_by else lost
        extra += f" without {escape(', '.join(lost))}" if lost else ""
        if outcome.apart:
            console.print(f"[yellow]{escape(outcome.apart)}[/]")
            console.print(f"  -> {TOGETHER}")
        console.print(f"[bold green]done[/] {outcome.run}{extra}; {everything if complete else incomplete}")


def _downloaded(run: RunId) -> str:
    """Return what runs/RUN/ has of a run that has ended."""
    with suppress(OSError):  # a program may make any folders there
        return "logs and curves" if any(RunPaths(RUNS / run).tensorboard.rglob(EVENTS)) else "logs"
    return "logs"
