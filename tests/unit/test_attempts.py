"""Parsing of a node's attempts file, which is untrusted."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from launcher.model.container import ContainerState, Phase
from launcher.model.limits import AnswerLimits
from launcher.node import ends
from launcher.node.machine import LocalMachine
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run import membership
from launcher.run.end.evidence import gather
from launcher.run.watch.attempts import (
    LIMIT,
    Attempt,
    EndedGeneration,
    current_generation,
    ended_by_budget,
    give_up_reason,
    parse,
    parse_ended_generation,
    reached_budget,
    reasons,
    started,
    stop_line,
    stopped_by,
    waiting,
)

LONG = b"start 1\n" + b"other line\n" * (LIMIT // 11) + b"start 100\n"  # more than is read
STATE = ContainerState("", "", "", {}, Phase.EXITED, exit_code=1)


def test_restarts_and_why() -> None:
    found = parse(b"start 100\nexit 1 130\nstart 131\nstart 150\nexit 137 160\nstart 161\nexit 125 180\nstart 181\n")
    assert [attempt.started for attempt in found] == [100, 131, 150, 161, 181]
    assert reasons(found) == [
        "exit code 1 after 30 s",
        "killed together with its container, its engine or its node",
        "exit code 137 (SIGKILL) after 10 s",
        "exit code 125 (hung) after 19 s",
    ]
    assert reasons(parse(b"start 100\nexit 0 130\n")) == []
    assert parse(b"") == ()


def test_ranks_that_failed_with_their_exit_codes() -> None:
    text = b"start 100\nfailed 3 75 109\nfailed 4 -9 110\nexit 75 120\nfailed 4 x 1\n"
    assert parse(text) == (Attempt(100, 120, 75, failed=((3, 75), (4, -9))),)


def test_ranks_that_did_not_exit_in_time() -> None:
    assert parse(b"start 100\nkilled 3 140\nkilled 4 140\nexit 143 141\n")[0].killed == {3, 4}


def test_who_stopped_the_last_attempt_and_which_ranks_were_suspended() -> None:
    text = f"start 100\n{stop_line('me@there')}\nhalted 3 110\nhalted 4 110\nexit 143 120\n".encode()
    assert stopped_by(text) == "me@there"
    assert parse(text) == (Attempt(100, 120, 143, frozenset({3, 4})),)
    assert stopped_by(text + b"start 130\n") is None
    assert stopped_by(b"start 1\nstopped \x1b[2Jme 3\n") is None


def test_a_budget_that_was_reached() -> None:
    assert reached_budget(b"start 1\nstepped 2\nbudget 3\nexit 0 4\n")
    assert reached_budget(b"start 1\nbudget 3\nstart 4\n"), "its container was started once more"
    assert not reached_budget(b"start 1\nstepped 2\nbudget x\nexit 0 4\n")


def test_of_a_long_file_the_end_counts(tmp_path: Path) -> None:
    """It has the last attempt, about which everything is asked."""
    node = NodeOfRun("a", "local", 0, "", str(tmp_path), range(2))
    paths = NodePaths(str(tmp_path), "a")
    Path(paths.attempts).parent.mkdir(parents=True)
    Path(paths.attempts).write_bytes(LONG + b"waits 1 7 150 a.py:1, breakpoint()\nbudget 160\n")
    Path(paths.groups).write_bytes(b"watched 0 1\n" * (ends.GROUPS // 12) + b"watched 0 101\ngroup 0 2 101\n")
    assert started(tmp_path, node) == 100
    assert ended_by_budget(tmp_path, [node])
    assert gather(tmp_path, node, STATE).last == Attempt(100)
    assert membership.collected(tmp_path, [node])["a"].sizes == {0: 2}

    wanted = ends.EndsWanted(paths.log, paths.attempts, "", runs=False, groups=paths.groups)
    seen = ends.read(LocalMachine("a", "me", AnswerLimits()), str(tmp_path), wanted)
    assert [one.rank for one in waiting(seen.attempts)] == [1]
    assert membership.parse(seen.groups, 100).sizes == {0: 2}


def test_generation_of_the_last_attempt() -> None:
    started = b"start 1\ngeneration 3 120 gpu-b,gpu-a rank 0 is now on gpu-b, world 2 of 3: gpu-c lost at 12:03 UTC\n"
    assert current_generation(b"") == current_generation(b"start 1\n") == 0
    assert current_generation(started) == current_generation(started.replace(b"gpu-c", b"kickstart")) == 3
    assert current_generation(started + b"exit 1 50\nstart 51\n") == 0


def test_which_node_ended_a_generation_and_why_the_program_is_not_restarted() -> None:
    text = b"start 1\nended 1 gpu-a,gpu-b the program here ended with 3\nexit 3 20\nstart 21\nended 2 - x\n"
    assert parse_ended_generation(text) == EndedGeneration(2, ())
    assert parse_ended_generation(text[:70]) == EndedGeneration(1, ("gpu-a", "gpu-b"))
    assert parse_ended_generation(b"start 1\nended\nended 3 gpu-a\n") is None
    assert give_up_reason(text) == ""
    assert give_up_reason(text + b"over 3 generations in a row\n") == "3 generations in a row"


def test_incomplete_and_unknown_lines_are_ignored() -> None:
    assert parse(b"start 1\nexit\nexit 1\nhello\nexit x 3\nstart\nexit 3 9\nexit 4 10\n") == (Attempt(1, 9, 3),)


@given(st.binary(max_size=200))
def test_any_bytes_can_be_parsed(text: bytes) -> None:
    assert all(isinstance(why, str) for why in reasons(parse(text)))
