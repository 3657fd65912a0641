"""Tracebacks that are kept back: never for long, never lost, and the first failure before them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli import held
from launcher.cli.held import HOLD, LIMIT, Held
from launcher.cli.screen import Screen
from launcher.model.container import ContainerState, Phase
from launcher.run.diagnose import Failure
from launcher.run.finish import Outcome
from launcher.run.messages import NodeEnded, NodeRestarted, Output
from launcher.run.state import RunState

HEAD = "[rank0]: Traceback (most recent call last):"
ENDED = ContainerState("1", "c", "", {}, Phase.EXITED, 1, oom_killed=False, restarts=0, started=0, finished=1)
FAILED = Outcome("r-1", RunState.FAILED, Failure("gpu-b", 1, 1, "raised KeyError", "", "KeyError: 'dog'"))


def test_what_comes_before_a_traceback_is_shown_at_once() -> None:
    kept = Held()
    assert kept.sift(["step 1", HEAD, "  File"], 0) == ["step 1"]
    assert kept.sift(["step 2"], HOLD) == []
    assert kept.let_go() == [HEAD, "  File", "step 2"]
    assert kept.sift(["step 3"], HOLD) == ["step 3"]


def test_a_program_that_goes_on_is_shown_again_though_it_never_pauses() -> None:
    kept = Held()
    shown = [kept.sift([HEAD] if at == 0 else [f"step {at}"], at / 10) for at in range(200)]
    assert shown[100] == []
    assert shown[101] == [HEAD, *(f"step {at}" for at in range(1, 102))]
    assert shown[102:] == [[f"step {at}"] for at in range(102, 200)]


def test_a_node_that_has_failed_keeps_it_back_until_the_end() -> None:
    kept = Held()
    kept.failing = True
    assert kept.sift([HEAD], 0) == []
    assert kept.sift([], 100 * HOLD) == []


def test_no_more_is_kept_than_the_limit() -> None:
    kept = Held()
    kept.failing = True
    lines = [HEAD, *map(str, range(LIMIT))]
    assert kept.sift(lines, 0) == lines


@given(
    st.lists(st.tuples(st.lists(st.sampled_from([HEAD, "a", "b", ""]), max_size=5), st.floats(0, 20))),
    st.booleans(),
)
def test_every_line_once_and_in_order(pieces: list[tuple[list[str], float]], failing: bool) -> None:
    kept, now, shown = Held(), 0.0, []
    kept.failing = failing
    for lines, pause in pieces:
        now += pause
        shown += kept.sift(lines, now)
    assert shown + kept.let_go() == [line for lines, _ in pieces for line in lines]


def said(*lines: str) -> Output:
    return Output("gpu-a", "".join(f"{line}\n" for line in lines).encode())


def test_the_screen_shows_a_chatty_job_again_in_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "HOLD", 0.0)
    screen = Screen()
    screen.show(said(HEAD))
    screen.show(said("step 2"))  # another output, not the Tick of a pause
    assert capsys.readouterr().out == f"{HEAD}\nstep 2\n"


def test_a_restart_shows_what_was_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.show(said(HEAD, "KeyError: 'dog'"))
    assert capsys.readouterr().out == ""
    screen.show(NodeRestarted("gpu-a", 1, "exit code 1"))
    assert capsys.readouterr().out == f"{HEAD}\nKeyError: 'dog'\n"
    screen.show(said("step 2"))
    assert capsys.readouterr().out == "step 2\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_shown_the_first_failure_alone_and_a_pipe_every_line(
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
