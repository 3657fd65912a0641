"""The screen of a running job: tracebacks held back, long lines truncated, the progress line."""

from __future__ import annotations

import io
import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from launcher.cli import console
from launcher.cli.console import HOLD, HOLD_LINES, FirstOutput, Screen, TracebackBuffer, shorten
from launcher.model.container import ContainerState, Phase
from launcher.records.measured import training_progress
from launcher.run.end.outcome import given_up_or_removed
from launcher.run.result import Failure, Outcome
from launcher.run.state import RunState
from launcher.run.watch.attempts import Generation
from launcher.run.watch.messages import (
    Message,
    NodeAway,
    NodeEnded,
    NodeGivenUp,
    NodeRestarted,
    NodeWaits,
    Output,
    RankZeroMoved,
    Tick,
)

STRANGE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
HEAD = "[rank0]: Traceback (most recent call last):"
ENDED = ContainerState("1", "c", "", {}, Phase.EXITED, 1, oom_killed=False, restarts=0, started=0, finished=1)
FAILED = Outcome("r-1", RunState.FAILED, Failure("gpu-b", 1, 1, "raised KeyError", "", "KeyError: 'dog'"))


def test_a_program_without_output_is_reported_every_30_s_for_5_minutes() -> None:
    first = FirstOutput()
    assert first.message(1000) == ""  # no run is followed
    first.begin(0)
    said = [second for second in range(1000) if first.message(second)]
    assert said == list(range(30, 301, 30))
    first.begin(0)
    assert first.message(30).startswith("no output for 30 s")
    first.end()
    assert not any(first.message(second) for second in range(1000))


def test_a_job_in_the_queue_of_a_cluster_is_not_expected_to_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    screen = Screen()

    def reported(*shown: Message) -> bool:
        """Whether the lack of output is reported a minute after these messages."""
        nonlocal now
        for message in shown:
            screen.show(message)
        now += 60
        screen.show(Tick())
        return "no output for" in capsys.readouterr().err

    with screen.live():
        assert not reported(NodeWaits("node-0", "job 12: PENDING (Priority)", queued=True))
        assert not reported()
        assert reported(NodeWaits("node-0", "job 12: RUNNING", queued=False))
        assert reported(NodeWaits("node-0", "", queued=False))
        assert not reported(Output("node-0", b"hello\n"))
        assert not reported(NodeWaits("node-0", "", queued=False))
        assert not reported(NodeWaits("node-0", "job 12: PENDING (BeginTime)", queued=True))  # requeued
        assert not reported(Output("node-0", b"hello\n"), NodeWaits("node-0", "", queued=False))


def test_output_before_a_traceback_is_shown_immediately() -> None:
    buffer = TracebackBuffer()
    assert buffer.sift(["step 1", HEAD, "  File"], 0) == ["step 1"]
    assert buffer.sift(["step 2"], HOLD) == []
    assert buffer.flush() == [HEAD, "  File", "step 2"]
    assert buffer.sift(["step 3"], HOLD) == ["step 3"]


def test_output_is_shown_again_if_the_program_continues_without_a_pause() -> None:
    buffer = TracebackBuffer()
    shown = [buffer.sift([HEAD] if at == 0 else [f"step {at}"], at / 10) for at in range(200)]
    assert shown[100] == []
    assert shown[101] == [HEAD, *(f"step {at}" for at in range(1, 102))]
    assert shown[102:] == [[f"step {at}"] for at in range(102, 200)]


def test_a_failed_nodes_traceback_is_held_until_the_end() -> None:
    buffer = TracebackBuffer()
    buffer.failing = True
    assert buffer.sift([HEAD], 0) == []
    assert buffer.sift([], 100 * HOLD) == []


def test_no_more_is_held_than_the_limit() -> None:
    buffer = TracebackBuffer()
    buffer.failing = True
    lines = [HEAD, *map(str, range(HOLD_LINES))]
    assert buffer.sift(lines, 0) == lines


@given(
    st.lists(st.tuples(st.lists(st.sampled_from([HEAD, "a", "b", ""]), max_size=5), st.floats(0, 20))),
    st.booleans(),
)
def test_every_line_is_shown_once_and_in_order(pieces: list[tuple[list[str], float]], failing: bool) -> None:
    buffer, now, shown = TracebackBuffer(), 0.0, []
    buffer.failing = failing
    for lines, pause in pieces:
        now += pause
        shown += buffer.sift(lines, now)
    assert shown + buffer.flush() == [line for lines, _ in pieces for line in lines]


def said(*lines: str) -> Output:
    return Output("gpu-a", "".join(f"{line}\n" for line in lines).encode())


def test_a_busy_jobs_output_is_shown_again_in_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "HOLD", 0.0)
    screen = Screen()
    screen.show(said(HEAD))
    screen.show(said("step 2"))  # more output, not a Tick after a pause
    assert capsys.readouterr().out == f"{HEAD}\nstep 2\n"


def test_a_restart_shows_the_held_output(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.show(said(HEAD, "KeyError: 'dog'"))
    assert capsys.readouterr().out == ""
    screen.show(NodeRestarted("gpu-a", 1, "exit code 1"))
    assert capsys.readouterr().out == f"{HEAD}\nKeyError: 'dog'\n"
    screen.show(said("step 2"))
    assert capsys.readouterr().out == "step 2\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_only_the_first_failure_and_a_pipe_every_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    screen = Screen()
    screen.show(said("step 1", HEAD, "a victim's words"))
    screen.show(NodeEnded("gpu-a", ENDED))
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    screen.conclude(FAILED)
    screen.finish()
    seen = capsys.readouterr()
    assert "KeyError: 'dog'" in seen.err
    assert seen.out == ("step 1\n" if terminal else f"step 1\n{HEAD}\na victim's words\n")


def test_a_lost_node_is_told_when_it_is_lost_and_as_the_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    screen, gone = Screen(), NodeGivenUp("gpu-b", "gpu-b: 198.18.1.12 port 22: no response within 10 s", 0.0)
    screen.show(NodeAway("gpu-b", "198.18.1.12 port 22: no response within 10 s", 0.0))
    screen.show(NodeEnded("gpu-a", ENDED))
    screen.show(gone)
    screen.conclude(Outcome("r-1", RunState.FAILED, given_up_or_removed(gone)))
    seen = capsys.readouterr().err
    lines = [line for line in seen.splitlines() if "gpu-b" in line]
    assert len(lines) == 2
    assert lines[1].startswith("failed gpu-b stopped responding: no connection since")
    assert "198.18" not in seen


LOST = """[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 14, in <module>
[rank0]:     dist.barrier()
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [198.18.1.12]:11666
E1125 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 20954) of binary: sh
launcher: generation 1 ended on this node: gpu-b was lost"""


@pytest.mark.parametrize("own", [False, True])
def test_a_run_that_goes_on_shows_no_traceback_of_a_lost_peer(capsys: pytest.CaptureFixture[str], own: bool) -> None:
    screen, world = Screen(), Generation(2, 0, ("gpu-a",), "rank 0 is now on gpu-a, world 1 of 2")
    text = LOST.replace("RuntimeError: [gloo/transport/tcp/pair.cc:561]", "ValueError:") if own else LOST
    screen.show(said(*text.splitlines()))
    screen.show(RankZeroMoved("gpu-a", world))
    seen = capsys.readouterr().out.splitlines()
    assert seen == (text if own else text.splitlines()[-1]).splitlines()


LINE = (
    "Epoch: [12][1200/1502] Loss 0.1234 (0.2345) Acc@1 98.44 (97.31) Acc@5 100.00 (99.90) "
    "LR 0.016 images/s 1910.5 data 12%"
)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("line", "plain"),
    [(LINE, LINE), (f"\x1b[32m{LINE}\x1b[0m", LINE), ("世" * 61, "世" * 61), ("a\tb" * 20, None)],
    ids=["trainer", "coloured", "wide", "tabs"],
)
def test_a_line_fits_a_terminal(width: int, line: str, plain: str | None) -> None:
    shown = shorten(line, width)
    assert shown == line or cell_len(shown) <= width
    if plain is not None:
        whole = cell_len(plain) <= width
        assert shown == line if whole else plain.startswith(shown[:-1].rstrip())
        assert whole or shown.endswith("…")


@given(st.text(alphabet=st.characters(exclude_characters="\n"), max_size=200), st.integers(1, 120))
def test_any_program_output_is_handled(line: str, width: int) -> None:
    shown = shorten(line, width)
    assert shown == line or cell_len(shown) <= width


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


@pytest.mark.parametrize("width", [80, 120])
def test_a_live_terminal_gets_its_width_and_a_pipe_every_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("os.get_terminal_size", lambda _=1: os.terminal_size((width, 30)))
    monkeypatch.setattr("sys.stderr", Terminal())
    screen = Screen()
    with screen.live():
        screen.show(said(LINE))
    assert capsys.readouterr().out == LINE + "\n"
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    with screen.live():
        screen.show(said(LINE))
        screen.show(said("short"))
    first, second = terminal.getvalue().splitlines()
    assert second == "short"
    assert len(first) <= width
    assert first == LINE or first.endswith("…")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_message_of_the_launcher_is_not_cut_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, prefix: bool
) -> None:
    own = "launcher: generation 12: rank 0 is now on gpu-server-b, world 3 of 4: gpu-server-a lost at 12:03 UTC"
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("os.get_terminal_size", lambda _=1: os.terminal_size((80, 30)))
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr("sys.stdout", terminal)
    screen = Screen(prefix=prefix)
    with screen.live():
        screen.show(said(own, f"{LINE} launcher: not ours"))
    first, second = terminal.getvalue().splitlines()
    assert first == ("gpu-a | " if prefix else "") + own
    assert len(second) <= 80


def step(at: float, step: int, **more: object) -> dict[str, object]:
    return {"kind": "step", "time": at, "step": step, "steps": 1000, "epoch": 2, "epochs": 6, **more}


def test_progress_shows_epoch_step_speed_and_time_left() -> None:
    lines = [{"kind": "start"}, step(10, 100), step(20, 200, images_per_s=1910.5), {"kind": "epoch", "step": 200}]
    seen = training_progress(lines)
    assert seen is not None
    assert seen.parts() == ["epoch 2/6", "step 200/1000", "1,910 images/s", "ETA 1:20"]


def test_a_restart_resets_the_speed() -> None:
    again = training_progress([step(0, 100), step(1, 900), step(100, 50), step(110, 100)])
    assert again is not None
    assert again.eta == pytest.approx(180)


KEYS = st.sampled_from(["step", "steps", "epoch", "time", "images_per_s"])


@given(st.lists(st.dictionaries(KEYS, STRANGE), max_size=4))
def test_any_metrics_of_a_program_are_handled(lines: list[dict[str, object]]) -> None:
    seen = training_progress([{"kind": "step", **line} for line in lines])
    assert seen is None or all(part.isprintable() for part in seen.parts())


@pytest.mark.parametrize("step", ["set_live", "clear_live"])
def test_ctrl_c_during_a_redraw_is_not_an_error(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Users press Ctrl-C when a line appears, and each line removes and redraws the progress line."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr("os.get_terminal_size", lambda _=1: os.terminal_size((80, 30)))
    screen, method = Screen(), getattr(Console, step)

    def pressed(console: Console, *args: object) -> object:
        monkeypatch.setattr(Console, step, method)
        signal.raise_signal(signal.SIGINT)
        return method(console, *args)

    with screen.live():
        monkeypatch.setattr(Console, step, pressed)
        with pytest.raises(KeyboardInterrupt):
            screen.show(said("step 1"))
        screen.finish()
    screen.log("left it running")


@pytest.mark.parametrize("control", ["\0", "\x1b", "\x9b", "\x1b[0", "\x1b]"], ids=ascii)
def test_megabytes_of_control_characters_take_seconds_and_little_memory(
    control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a line end: a program may print a binary file."""
    piece = (control * (1 << 18))[: 1 << 18].encode()
    longest = 0

    class Sink(io.StringIO):
        def write(self, text: str) -> int:
            nonlocal longest
            longest = max(longest, len(text))
            return len(text)

    monkeypatch.setattr("sys.stdout", Sink())
    screen, began = Screen(), time.process_time()
    for _ in range(20):
        screen.show(Output("gpu-a", piece))
    screen.finish()
    assert time.process_time() - began < 5
    assert longest < 1 << 24, "bounded pieces"


def test_runs_of_controls_leave_colours(capsys: pytest.CaptureFixture[str]) -> None:
    line = "\0\0\x1b\x1b[31mred\x1b[0m\x9b\x9b32m\x07\x07\x1b[2J\x1b"
    screen = Screen()
    screen.show(Output("gpu-a", f"{line}\n".encode()))
    assert capsys.readouterr().out == "\\x00\\x00\\x1b\x1b[31mred\x1b[0m\\x9b\\x07\\x07\\x1b\n"


def test_output_on_a_full_disk_does_not_end_the_supervision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, open(os.dup(full.fileno()), "w") as messages:  # noqa: PTH123
        monkeypatch.setattr("sys.stdout", full)
        screen = Screen()
        for _ in range(3):
            screen.show(Output("gpu-a", b"line\n"))
        assert not screen.unread
        assert capsys.readouterr().err.count("stdout cannot be written (No space left on device)") == 1
        monkeypatch.setattr("sys.stderr", messages)
        screen.conclude(FAILED)
        screen.log("still here")
