"""The first failure: the rank's own message, known causes, and peers that only failed as a consequence."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from launcher.container_scripts.words import TRACEBACK, last_traceback
from launcher.model.container import ContainerState, Phase
from launcher.records.store import NodeOfRun
from launcher.run.end.diagnose import is_victim, last_stack
from launcher.run.end.evidence import Evidence, gather, refusal
from launcher.run.state import RunState, at_budget, state_of
from launcher.run.watch.attempts import AtBreakpoint, Attempt, EndedGeneration
from tests.failures import first_failure

OWN = """step 1
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    images["dog"]
KeyError: 'dog'
"""
VICTIM = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    dist.all_reduce(x)
RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [198.18.0.3]:40404
"""


def state(code: int | None, *, oom: bool = False, error: str = "", finished: float = 10.0) -> ContainerState:
    phase = Phase.EXITED if code is not None else Phase.RUNNING
    return ContainerState("id", "c", "i", {}, phase, code, oom, 0, 1.0, finished, error)


def evidence(rank: int, log: str, code: int | None = 1, **changes: object) -> Evidence:
    node = NodeOfRun(f"n{rank}", f"n{rank}", rank, "c", "/o", range(rank, rank + 1))
    return Evidence(node, state(code, **changes), log, None, {rank: log} if log else {})  # type: ignore[arg-type]


def test_the_failing_rank_is_found_although_its_peer_ended_first() -> None:
    found = first_failure([evidence(0, VICTIM, finished=9.0), evidence(1, OWN, finished=11.0)])
    assert found is not None
    assert (found.node, found.rank) == ("n1", 1)
    assert found.words.endswith("KeyError: 'dog'")
    assert is_victim(evidence(0, VICTIM))
    assert not is_victim(evidence(1, OWN))


@pytest.mark.parametrize(("lines", "known"), [(100, True), (101, False)])
def test_an_error_after_which_the_rank_went_on_is_not_its_end(lines: int, known: bool) -> None:
    at_exit = (
        "wandb: Run history:\n  File 'a.py'\nframe #0: c10::Error\n[rank0]:[E916 08:53:53 ProcessGroupNCCL.cpp:633]\n"
    )
    found = first_failure([evidence(0, OWN + "epoch\n" * lines + at_exit * 50)])
    assert found is not None
    assert ("KeyError: 'dog'" in found.what) is known
    assert ("KeyError: 'dog'" in found.words) is known


def test_a_long_error_is_found_again() -> None:
    found = first_failure([evidence(0, "step\n" * 200 + OWN.rstrip() + "x" * 3000 + "\n")])
    assert found is not None
    assert "KeyError: 'dog'xxx" in found.what


def test_a_node_that_was_killed_before_the_others_lost_it_is_the_cause() -> None:
    """As if somebody had killed torchrun there, or a container; the others end later, and say what they lost."""
    stopped = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 27 got signal: 15\n"
    others = [evidence(0, VICTIM, finished=12.0), evidence(2, f"{TRACEBACK}\n{stopped}", 143, finished=13.0)]
    found = first_failure([*others, evidence(1, "step 3\n", 137, finished=9.0)])
    assert found is not None
    assert (found.node, found.exit_code) == ("n1", 137)
    killed_later = first_failure([*others, evidence(1, "step 3\n", 137, finished=14.0)])  # by the launcher's stop
    assert killed_later is not None
    assert killed_later.node == "n0"


def test_a_peer_that_was_stopped_and_saved_its_work_is_not_the_cause_of_an_earlier_kill() -> None:
    killed, saved = evidence(0, "step 3\n", 137, finished=9.0), evidence(1, "step 3\n", 0, finished=13.0)
    found = first_failure([killed, saved])
    assert found is not None
    assert (found.node, found.exit_code) == ("n0", 137)
    left = first_failure([killed, evidence(1, "step 3\n", 0, finished=8.0)])  # and n0 was killed as it waited
    assert left is not None
    assert (left.node, left.exit_code) == ("n1", 0)


def test_a_killed_node_whose_orphans_outlive_it_ended_before_its_peer() -> None:
    """They keep its container for some seconds, as do those of the peer, which ended with 0."""
    peer = dataclasses.replace(evidence(0, "step 3\n", 0, finished=14.2), attempts=(Attempt(1, ended=11, exit_code=0),))
    for ended in (10, 11):
        killed = evidence(1, "Killed\n", 137, finished=14.5)
        killed = dataclasses.replace(killed, attempts=(Attempt(1, ended=ended, exit_code=137),))
        found = first_failure([peer, killed])
        assert found is not None
        assert (found.node, found.exit_code) == ("n1", 137)


def test_the_first_failure_is_not_decided_by_a_wrong_clock() -> None:
    ahead = dataclasses.replace(evidence(0, OWN, finished=3609.0), ahead=3600.0)
    for found in (first_failure([ahead, evidence(1, OWN, finished=10.0)]), first_failure([evidence(1, OWN), ahead])):
        assert found is not None
        assert found.node == "n0"
    killed = dataclasses.replace(evidence(1, "step 3\n", 137, finished=3609.0), ahead=3600.0)
    found = first_failure([evidence(0, VICTIM, finished=12.0), killed])
    assert found is not None
    assert (found.node, found.exit_code) == ("n1", 137)
    assert dataclasses.replace(evidence(0, OWN, finished=0.0), ahead=3600.0).failed_at == 0  # unknown


def test_out_of_memory_takes_precedence_over_tracebacks() -> None:
    found = first_failure([evidence(0, OWN), evidence(1, "", 137, oom=True)])
    assert found is not None
    assert found.node == "n1"
    assert "out of memory" in found.what


@pytest.mark.parametrize(("code", "failed", "known"), [(137, (), True), (1, ((1, -9),), True), (1, ((1, 1),), False)])
def test_the_kernel_ran_out_of_memory_although_the_engine_does_not_say_so(
    code: int, failed: tuple[tuple[int, int], ...], known: bool
) -> None:
    """If the kernel killed a rank or the program, and not only a process without which they went on."""
    noted = dataclasses.replace(evidence(1, "", code), attempts=(Attempt(1, failed=failed, memory_ran_out=True),))
    found = first_failure([evidence(0, VICTIM), noted])
    assert found is not None
    assert found.node == "n1"
    assert ("out of memory" in found.what) is known


def test_a_timeout_is_reported_as_a_timeout() -> None:
    found = first_failure([evidence(0, "launcher: time limit of 5 s reached", 124), evidence(1, VICTIM)])
    assert found is not None
    assert "time limit" in found.what


def test_a_rank_that_exited_early_is_reported_instead_of_the_one_that_waited_for_it() -> None:
    found = first_failure([evidence(0, VICTIM), evidence(1, "step 3\n", 0)])
    assert found is not None
    assert (found.node, found.rank, found.exit_code) == ("n1", 1, 0)
    assert "exited with code 0 while others still waited" in found.what
    assert found.words.endswith("[198.18.0.3]:40404")
    own = first_failure([evidence(0, OWN), evidence(1, "step 3\n", 0)])
    assert own is not None
    assert own.node == "n0"


def test_a_node_that_waited_for_the_others_when_it_was_stopped_has_exited() -> None:
    """torchrun waits five minutes for the torchrun processes of the other nodes."""
    first, stopped = Attempt(1, ranks_had_exited=True), evidence(0, "step 3\n", 143)
    stopped = dataclasses.replace(stopped, log=f"{TRACEBACK}\n  File 'api.py' in _exit_barrier\n", rank_logs={0: ""})
    found = first_failure([dataclasses.replace(stopped, attempts=(first,)), evidence(1, VICTIM)])
    assert found is not None
    assert (found.node, found.rank, found.exit_code) == ("n0", 0, 0)


REPORT = "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1\n"


@pytest.mark.parametrize(("ended", "rank"), [("", 1), ("Sending process 7 closing signal SIGTERM\n", 0)])
def test_a_rank_that_exited_on_the_same_node_is_reported_unless_torchrun_stopped_it(ended: str, rank: int) -> None:
    node = NodeOfRun("n0", "n0", 0, "c", "/o", range(2))
    found = first_failure([Evidence(node, state(1), ended + REPORT, None, {0: VICTIM, 1: "step 3\n"})])
    assert found is not None
    assert found.rank == rank


@pytest.mark.parametrize(
    ("log", "code", "what"),
    [
        (REPORT.replace(": 1\n", ": -9 (pid: 7)\n"), 1, "was killed by SIGKILL"),
        (REPORT.replace(": 1\n", ": -64 (pid: 7)\n"), 1, "exited with code 1"),
        (
            REPORT.replace(": 1\n", ": -9 (pid: 7)\n") + REPORT,
            1,
            "exited with code 1",
        ),  # the report of an earlier attempt
        ("", 139, "was killed by SIGSEGV (exit code 139)"),
        ("", 255, "exited with code 255"),
    ],
)
def test_a_signal_that_killed_the_failing_rank_or_the_program_is_reported(log: str, code: int, what: str) -> None:
    found = first_failure([evidence(0, log, code)])
    assert found is not None
    assert found.what == what


def test_the_exit_code_is_that_of_the_rank_which_failed_first() -> None:
    noted = dataclasses.replace(evidence(0, "step 3\n", 75), attempts=(Attempt(1, failed=((0, 75), (1, 1))),))
    by_torchrun = evidence(0, REPORT.replace(": 1\n", ": 75 (pid: 7)\n"))  # as in runs of earlier versions
    for each in (noted, by_torchrun):
        found = first_failure([each])
        assert found is not None
        assert (found.rank, found.exit_code, found.what) == (0, 75, "exited with code 75")


TOLD = "train: 2 processes\ntrain: error: --data /nowhere: no such file\n"


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (TOLD, "exited with code 2: train: error: --data /nowhere: no such file"),
        (OWN + TOLD, "exited with code 2: train: error: --data /nowhere: no such file"),  # the traceback is older
        (OWN, "exited with code 2: KeyError: 'dog'"),
        ("usage: run.py [-h]\nrun.py: error: unrecognized arguments: --lr\n", None),
        ("step 3: error: 0.01\n", "exited with code 2"),
    ],
)
def test_the_error_that_the_program_reported_is_in_the_verdict(output: str, what: str | None) -> None:
    found = first_failure([evidence(0, output, 2)])
    assert found is not None
    assert found.what == what or found.what.endswith(": run.py: error: unrecognized arguments: --lr")


def test_a_rank_that_exits_because_another_one_reports_the_error_is_not_blamed() -> None:
    """The trainer's ranks agree on an error, and one of them prints it; torchrun may notice another one first."""
    node = NodeOfRun("n0", "n0", 0, "c", "/o", range(2))
    silent = Attempt(1, failed=((1, 2), (0, 2)))
    found = first_failure([Evidence(node, state(2), TOLD, None, {0: TOLD, 1: ""}, (silent,)), evidence(2, "", 2)])
    assert found is not None
    assert (found.rank, found.words) == (0, "train: error: --data /nowhere: no such file")


def test_a_suspended_rank_is_the_cause() -> None:
    slept = dataclasses.replace(evidence(1, "step 3\n", 137), attempts=(Attempt(1, halted=frozenset({1})),))
    for other in (evidence(0, VICTIM), evidence(0, STACK, 125)):
        found = first_failure([other, slept])
        assert found is not None
        assert (found.node, found.rank) == ("n1", 1)
        assert "was suspended" in found.what


@pytest.mark.parametrize(
    "other",
    [
        evidence(1, "step 3\n", 137, finished=8.0),
        evidence(1, "step 3\n", 137, oom=True, finished=8.0),
        evidence(1, "step 3\n", 3, finished=8.0),
        evidence(1, OWN, finished=8.0),
    ],
    ids=["killed", "out of memory", "an exit code", "an error"],
)
def test_a_suspended_rank_is_not_the_cause_where_another_one_did_not_wait_for_it(other: Evidence) -> None:
    """It is known only at the end, when the launcher stops the peers of the node that failed."""
    slept = dataclasses.replace(evidence(0, "step 3\n", 143), attempts=(Attempt(1, halted=frozenset({0})),))
    found = first_failure([slept, other])
    assert found is not None
    assert (found.node, found.exit_code) == ("n1", other.state.exit_code)


def test_a_node_that_was_done_after_the_other_one_was_stopped_did_not_leave_it() -> None:
    """`docker stop` of one; the launcher then stops its peer, which saves and exits with 0."""
    found = first_failure([evidence(0, "step 3\n", 0, finished=15.0), evidence(1, "step 3\n", 143, finished=10.0)])
    assert found is not None
    assert (found.node, found.exit_code) == ("n1", 143)


def test_of_nodes_that_ended_within_a_second_the_killed_one_was_first() -> None:
    """The log of the killed one was longer, so that its container ended later."""
    found = first_failure([evidence(0, VICTIM, finished=10.2), evidence(1, "step 3\n", 137, finished=10.6)])
    assert found is not None
    assert (found.node, found.exit_code) == ("n1", 137)


def test_the_node_that_ended_the_generation_is_reported_even_if_another_one_exited_last() -> None:
    def one(rank: int, code: int, ended: EndedGeneration, finished: float) -> Evidence:
        return dataclasses.replace(evidence(rank, "a step\n", code, finished=finished), ended_generation=ended)

    others = [one(0, 1, EndedGeneration(3, ("n1",)), 8.0), one(2, 1, EndedGeneration(3, ()), 7.0)]
    own = one(1, 3, EndedGeneration(3, ("n1",)), 9.0)
    earlier = one(3, 1, EndedGeneration(2, ("n3",)), 1.0)  # excluded from the last generation
    found = first_failure([*others, own, earlier])
    assert found is not None
    assert (found.node, found.exit_code) == ("n1", 3)
    assert [is_victim(e) for e in (*others, own)] == [True, True, False]


def test_nothing_failed() -> None:
    assert first_failure([evidence(0, "fine", 0), evidence(1, "fine", 0)]) is None


def test_rank_prefixes_of_torch_do_not_hide_the_traceback() -> None:
    prefixed = "".join(f"[rank1]: {line}\n" for line in OWN.splitlines()[1:]) + "torchrun says something\n"
    assert last_traceback(prefixed) == "\n".join(OWN.splitlines()[1:])


def test_chained_tracebacks_are_kept_together() -> None:
    text = OWN + "\nDuring handling of the above exception, another exception occurred:\n\n" + VICTIM
    assert last_traceback("noise\n" + text).startswith("Traceback")
    assert "KeyError" in last_traceback(text)
    assert last_traceback(OWN + "later\n" + VICTIM).count("Traceback") == 1


def test_truncated_and_unknown_error_files_do_not_hide_the_failure(tmp_path: Path) -> None:
    node = NodeOfRun("n0", "n0", 0, "c", "/o", range(1))
    for content in (
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        b'{"message": {"message": "boom", "extraInfo": {"timestamp": "x"}}}',
    ):
        for name, data in {"errors/n0.json": content, "logs/n0.log": b"some output\n"}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
        found = first_failure([gather(tmp_path, node, state(1))])
        assert found is not None
        assert found.words in ("some output", "boom")


@pytest.mark.parametrize(("time", "words"), [(150, "boom"), (250, "boom"), (99, "some output")])
def test_an_error_of_an_earlier_attempt_is_not_that_of_the_last(tmp_path: Path, time: int, words: str) -> None:
    error = f'{{"message": {{"message": "boom", "extraInfo": {{"timestamp": "{time}"}}}}}}'
    attempts = "start 10\nexit 1 100\nstart 120\nexit 137 200\n"
    texts = {"errors/n0.json": error, "logs/n0.log": "some output\n", "state/n0.attempts": attempts}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = first_failure([gather(tmp_path, NodeOfRun("n0", "n0", 0, "c", "/o", range(1)), state(137))])
    assert found is not None
    assert found.words == words


@pytest.mark.parametrize(
    ("noted", "printed", "words"),
    [
        ("begins {size}\nbegins {size} 0\n", "", ""),
        ("begins {size}\nbegins {size} 0\n", "no more data\n", "no more data"),
        ("begins {size}\n", "", ""),  # torchrun did not start its ranks
        ("generation 2 {size} n0 rank 0 is now on n0, world 1 of 2\n", "", ""),
        ("", "", "KeyError: 'dog'"),  # scripts of an earlier version do not tell
    ],
)
def test_what_an_earlier_attempt_printed_is_not_the_error_of_the_last(
    tmp_path: Path, noted: str, printed: str, words: str
) -> None:
    before = f"step 1\n{TRACEBACK}\nKeyError: 'dog'\n"
    attempts = f"start 10\nbegins 0 0\nexit 1 100\nstart 120\n{noted.format(size=len(before))}exit 1 200\n"
    logs = dict.fromkeys(("logs/n0.log", "logs/rank-0.log"), before + printed)
    for name, text in {**logs, "generations/0001-0/rank-0.log": before, "state/n0.attempts": attempts}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = first_failure([gather(tmp_path, NodeOfRun("n0", "n0", 0, "c", "/o", range(1)), state(1))])
    assert found is not None
    assert found.words.rpartition("\n")[2] == words
    assert ("KeyError" in found.what) == ("KeyError" in words)


@pytest.mark.parametrize(
    ("last", "what"),
    [
        ("exit 1 200", "exited with code 73: the output folder's disk is full"),
        ("failed 0 1 200", "exited with code 73: the output folder's disk is full"),
        ("exit 73 200", "exited with code 73: KeyError: 'dog'"),  # of the program itself
    ],
)
def test_why_a_program_was_not_started_again_is_not_its_earlier_error(tmp_path: Path, last: str, what: str) -> None:
    texts = {"logs/n0.log": f"{TRACEBACK}\nKeyError: 'dog'\n", "state/n0.attempts": f"start 100\n{last}\n"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    refused = refusal(b"step 1\nlauncher: node n0: the output folder's disk is full\n", "n0")
    node = NodeOfRun("n0", "n0", 0, "c", "/o", range(1))
    found = first_failure([gather(tmp_path, node, state(73), refused=refused)])
    assert found is not None
    assert (found.what, found.exit_code) == (what, 73)
    assert refusal(b"launcher: node n0: x\nstep 1\n", "n0") == refusal(b"launcher: node n1: x\n", "n0") == b""


def test_without_a_log_file_the_engines_log_is_read(tmp_path: Path) -> None:
    node = NodeOfRun("n0", "n0", 0, "c", "/o", range(1))
    found = first_failure([gather(tmp_path, node, state(127), b"sh: not found\n")])
    assert found is not None
    assert found.words == "sh: not found"


def test_the_final_states_of_a_run_and_their_exit_codes() -> None:
    ends = {state: state.exit_code for state in RunState if state.ended}
    assert ends == {RunState.DONE: 0, RunState.FAILED: 1, RunState.STOPPED: 5, RunState.LOST: 3}


def test_a_runs_state_follows_from_its_containers() -> None:
    assert state_of([state(0), state(0)], 2) is RunState.DONE
    assert state_of([state(0)], 2) is RunState.LOST
    assert state_of([state(0), state(3)], 2) is RunState.FAILED
    assert state_of([state(0), state(None)], 2) is RunState.RUNNING
    unknown = dataclasses.replace(state(0), exit_code=None)  # ended, without a record of its exit code
    assert state_of([state(0), unknown], 2) is RunState.LOST
    assert state_of([state(3), unknown], 2) is RunState.FAILED
    paused = dataclasses.replace(state(None), phase=Phase.PAUSED)
    assert state_of([state(3), paused], 2) is RunState.RUNNING


def test_a_run_has_not_ended_while_one_of_its_nodes_does_not_answer() -> None:
    ends = [[], [state(0)], [state(3)], [state(143)]]
    for min_nodes, stopped, states in itertools.product((0, 1, 2), (False, True), ends):
        found = state_of(states, 3, min_nodes=min_nodes, unreachable=1, removed=2 - len(states), stopped=stopped)
        assert found is RunState.UNREACHABLE
    assert state_of([state(3), state(None)], 3, unreachable=1) is RunState.RUNNING
    assert state_of([state(3)], 2, unreachable=1, recorded=RunState.FAILED) is RunState.FAILED


def test_a_run_of_which_not_every_node_was_asked_is_neither_done_nor_lost() -> None:
    for states in ([state(0)], [state(3)], [state(143)]):
        assert state_of(states, 3, not_asked=2) is RunState.ENDED_HERE
    assert state_of([state(None)], 3, not_asked=2) is RunState.RUNNING
    assert state_of([state(0)], 3, not_asked=1, unreachable=1) is RunState.UNREACHABLE
    assert state_of([state(0)], 3, not_asked=2, recorded=RunState.DONE) is RunState.DONE
    assert not RunState.ENDED_HERE.ended


def test_at_its_budget_a_run_is_done_whatever_its_exit_codes_are() -> None:
    ended = [state(0), state(137)]
    assert state_of(at_budget(ended, True), 2) is RunState.DONE
    assert state_of(at_budget(ended, False), 2) is RunState.FAILED
    assert state_of(at_budget(ended[:1], True), 2, removed=1) is RunState.FAILED
    assert state_of(at_budget([state(0), state(None)], True), 2) is RunState.RUNNING
    unknown = dataclasses.replace(state(0), exit_code=None)
    assert state_of(at_budget([state(0), unknown], True), 2) is RunState.LOST


def test_ranks_that_were_still_importing_did_not_hang() -> None:
    stack = STACK.replace('File "/workspace/code/train.py", line 7 in read_batch', IMPORT)
    found = first_failure([evidence(0, stack, 125), evidence(1, stack, 143)])
    assert found is not None
    assert found.what.endswith("its ranks were still importing")
    assert "hang_timeout" in found.cure
    assert "importing" not in first_failure([evidence(0, stack, 125), evidence(1, STACK, 143)]).what  # type: ignore[union-attr]


def test_a_hang_is_put_down_to_the_rank_that_was_in_breakpoint() -> None:
    waits = AtBreakpoint(1, 77, 5, "train.py:13, breakpoint()")
    stuck = dataclasses.replace(evidence(1, STACK, 143), at_breakpoint=(waits,))
    found = first_failure([evidence(0, STACK, 125), stuck])
    assert found is not None
    assert found.what.endswith("; rank 1 on n1 was in train.py:13, breakpoint(), and nobody followed the run")
    assert "launcher logs" in found.cure


# printed by python3.11 -X faulthandler
IMPORT = 'File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed'
STACK = """step 3
Fatal Python error: Aborted

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "/workspace/code/train.py", line 7 in read_batch
  File "/workspace/code/train.py", line 30 in <module>

Extension modules: numpy (total: 1)
"""


def test_the_main_threads_stack_is_taken_from_faulthandler() -> None:
    assert last_stack(STACK).splitlines() == [
        "Current thread 0x00007f02 (most recent call first):",
        '  File "/workspace/code/train.py", line 7 in read_batch',
        '  File "/workspace/code/train.py", line 30 in <module>',
    ]
    assert last_stack("nothing of the kind") == ""


LOADER = """Fatal Python error: Aborted

Current thread 0x00007f03 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 113 in get
  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 335 in _worker_loop
  File "/usr/lib/python3.11/multiprocessing/process.py", line 314 in _bootstrap
  File "/workspace/code/train.py", line 19 in <module>
"""


def test_the_stack_of_a_rank_is_its_own_and_not_that_of_its_data_loaders_process() -> None:
    assert last_stack(STACK + LOADER) == last_stack(LOADER + STACK) == last_stack(STACK)
    assert "_worker_loop" in last_stack(LOADER)  # better than nothing
    found = first_failure([evidence(0, STACK + LOADER, 125), evidence(1, VICTIM + LOADER, 1)])
    assert found is not None
    assert "_worker_loop" not in found.words
    assert "read_batch" in found.words
    assert VICTIM.strip() in found.words


def test_of_a_rank_that_was_at_its_end_the_traceback_is_shown() -> None:
    """It lost its peer, and wrote its recording when it was aborted."""
    at_exit = (
        'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "f.py", line 154 in record'
    )
    found = first_failure([evidence(0, STACK, 125), evidence(1, f"{VICTIM}\n{at_exit}\n", 1)])
    assert found is not None
    assert f"rank 1 on n1: {VICTIM.strip()}" in found.words
    assert "read_batch" in found.words
    assert "record" in first_failure([evidence(0, f"{at_exit}\n", 125)]).words  # type: ignore[union-attr]


LINGERS = "launcher: ranks 1, 2 still run, 60 s after ranks 0, 3 exited with code 0\n"
WAITED = dataclasses.replace(evidence(1, "", 143), attempts=(Attempt(1.0, ranks_had_exited=True),))


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (evidence(1, "", 0), True),  # its torchrun has ended
        (WAITED, True),  # or waited for n0
        (evidence(1, STACK, 143), False),
    ],
)
def test_a_rank_that_never_exits_is_named_if_all_others_have(second: Evidence, named: bool) -> None:
    found = first_failure([evidence(0, STACK, 125), second])
    assert found is not None
    end = "; rank 0 on n0 did not exit, although all other ranks had exited with code 0"
    assert (end in found.what, "did not exit" in found.what) == (named, named)


def test_the_ranks_of_a_node_that_do_not_exit_are_those_with_a_stack() -> None:
    node = dataclasses.replace(evidence(0, LINGERS, 125).node, ranks=range(4))
    own = dataclasses.replace(evidence(0, LINGERS, 125), node=node, rank_logs={2: STACK})  # rank 1 exited later
    found = first_failure([own])
    assert found is not None
    assert found.what.endswith("; rank 2 on n0 did not exit, although all other ranks had exited with code 0")
