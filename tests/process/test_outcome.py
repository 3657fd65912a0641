"""How a run ended, from all that its nodes have left: nodes of a run that is over, on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from launcher.model.container import ContainerState, Phase
from launcher.node.connect import LOCAL, Fleet
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.node.process.engine import ProcessEngine
from launcher.records.left_out import LeftOut
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.records.wanted import RECORDINGS
from launcher.run.end import explain
from launcher.run.end.outcome import conclude
from launcher.run.locate import Attached
from launcher.run.result import Failure, Outcome

RUN = "job-20260101-000000-abcd"
VICTIM = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    dist.all_reduce(x)
RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [198.18.0.3]:40404
"""
OWN = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    read("conf.yaml")
FileNotFoundError: [Errno 2] No such file or directory: 'conf.yaml'
"""
HUNG = "launcher: no output and no step for 60 s\n"
GONE = Failure("local-1", None, None, "stopped responding: no connection since 10:00:00", "check that it is up", "")


class Over:
    """A run that is over, with two nodes. What is collected of a node is in the record."""

    def __init__(self, folder: Path, runtime: str = "process") -> None:
        output = folder / ".launcher" / RUN
        self.nodes = tuple(
            NodeOfRun(f"local-{n}", LOCAL, n, f"launcher-{RUN}-{n}", str(output), range(n, n + 1)) for n in range(2)
        )
        self.record = Record.rebuild(RUN, runtime, self.nodes, folder / "runs")
        self.engines = {node.name: ProcessEngine(node.name) for node in self.nodes}
        self.warned: list[str] = []
        self.checkpoint = output / "checkpoints" / "last.pt"
        self.checkpoint.parent.mkdir(parents=True)
        self.checkpoint.write_bytes(b"0" * 1000)

    def ended(self, *ends: tuple[str, int | None], missing: tuple[Failure, ...] = (), **known: Any) -> Outcome:
        """ends: of each node the log and the exit code."""
        states = {}
        for node, (log, code) in zip(self.nodes, ends, strict=False):
            for path in (NodePaths(str(self.record.paths.root), node.name).log, self.rank_log(node.rank)):
                Path(path).parent.mkdir(exist_ok=True)
                Path(path).write_text(log)
            names = ("id", node.container, "", {})
            states[node.name] = ContainerState(*names, Phase.EXITED, code, started=1.0, finished=9.0)
        fleet = Fleet([*self.engines.values()], {}, None)
        attached = Attached(self.record, self.nodes, self.engines, fleet)
        stopped_by, lost = known.get("stopped_by"), {failure.node: failure for failure in missing}
        return conclude(attached, states, lost, stopped_by, self.warned.append)

    def rank_log(self, rank: int) -> str:
        return NodePaths(str(self.record.paths.root), "").rank_log(rank)


@pytest.fixture
def over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Over:
    monkeypatch.setenv("HOME", str(tmp_path))
    return Over(tmp_path)


def victims(outcome: Outcome) -> list[str]:
    return [node.node for node in outcome.nodes if node.victim]


def said(outcome: Outcome) -> tuple[str, int, str, int | None, str]:
    """Return state, exit code, and of the failure the node, the exit code and the reason."""
    assert outcome.failure is not None
    return outcome.state.value, outcome.exit_code, outcome.failure.node, outcome.failure.exit_code, outcome.failure.what


MISSING_FILE = "exited with code 1: FileNotFoundError: [Errno 2] No such file or directory: 'conf.yaml'"


def test_an_error_has_its_file_that_was_left_out_and_the_checkpoint_to_go_on_from(over: Over) -> None:
    over.record.write_left_out(over.record.paths.root, LeftOut({"conf.yaml": "excluded by .gitignore:2"}))
    outcome = over.ended((VICTIM, 1), (OWN, 1))
    assert said(outcome) == ("failed", 1, "local-1", 1, MISSING_FILE)
    assert outcome.failure is not None
    assert outcome.failure.cure.startswith("conf.yaml exists here but was not sent: excluded by .gitignore:2")
    assert (outcome.failure.rank, outcome.failure.words) == (1, OWN.rstrip())
    assert victims(outcome) == ["local-0"]
    assert outcome.resume is not None
    assert outcome.resume.startswith("checkpoints/last.pt (in ")
    there = "in the folder where it was started"  # this one has found it on its nodes
    assert outcome.resume.endswith(f" 1 kB): {over.record.resume_command}, {there}")
    assert over.warned == []


def test_the_disk_is_the_reason_of_a_program_that_left_no_word(over: Over, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(over.ended(("step 3\n", 3), ("step 3\n", 0))) == ("failed", 1, "local-0", 3, "exited with code 3")
    monkeypatch.setattr(explain, "FULL", 1 << 62)
    outcome = over.ended(("step 3\n", 3), ("step 3\n", 0))
    assert said(outcome) == ("failed", 1, "local-0", 3, "exited with code 3; the output folder's disk is full")
    assert outcome.failure is not None
    assert outcome.failure.cure.startswith("free some space there")
    own = over.ended((OWN, 1), ("step 3\n", 0))
    assert said(own) == ("failed", 1, "local-0", 1, MISSING_FILE)
    assert over.warned == []


def test_a_node_that_is_lost_is_the_reason_of_who_lost_it_only(over: Over) -> None:
    victim = over.ended((VICTIM, 1), missing=(GONE,))
    assert victim.failure == GONE
    assert (victim.state.value, victim.exit_code, victims(victim)) == ("failed", 1, ["local-0"])
    assert victim.resume is not None
    own = over.ended((OWN, 1), missing=(GONE,))
    assert said(own) == ("failed", 1, "local-0", 1, MISSING_FILE)
    done = over.ended(("step 3\n", 0), missing=(GONE,))
    assert done.failure == GONE
    early = over.ended((VICTIM, 1), ("step 3\n", 0), missing=(GONE,))  # its files could not be collected
    assert early.failure == GONE
    assert over.warned == []


def test_a_node_without_an_exit_code_is_the_reason_if_no_node_failed(over: Over) -> None:
    what = "ended without a record of its exit code, so it is unknown whether its program was successful"
    assert said(over.ended(("step 3\n", 0), (OWN, None))) == ("lost", 3, "local-1", None, what)
    failed = over.ended(("step 3\n", 3), (OWN, None))
    assert said(failed) == ("failed", 1, "local-0", 3, "exited with code 3")
    gone = dataclasses.replace(GONE, node="local-0")
    assert said(over.ended(("", None), (OWN, None), missing=(gone,))) == ("lost", 3, "local-1", None, what)
    assert over.ended(("", None), (VICTIM, None), missing=(gone,)).failure == gone


def test_a_run_that_is_done_or_was_stopped_has_no_failure(over: Over) -> None:
    done = over.ended(("step 3\n", 0), ("step 3\n", 0))
    stopped = over.ended((VICTIM, 1), (OWN, 1), stopped_by="ada@here")
    found = [(each.state.value, each.exit_code, each.failure, each.resume) for each in (done, stopped)]
    assert found == [("done", 0, None, None), ("stopped", 5, None, None)]
    assert victims(stopped) == []


def test_a_machine_that_has_restarted_is_the_reason(over: Over, tmp_path: Path) -> None:
    """Its containers started before it; plain processes would have ended with it, and it is not asked."""
    assert said(over.ended((VICTIM, 1), (OWN, 1))) == ("failed", 1, "local-1", 1, MISSING_FILE)
    docker = Over(tmp_path / "docker", "docker")
    assert said(docker.ended((OWN, 1), ("", 0)))[2:] == ("local-0", 1, "restarted while the run used it")
    assert said(docker.ended((VICTIM, 1), (VICTIM, 1)))[2:] == ("local-0", 1, "restarted while the run used it")
    another = docker.ended((VICTIM, 1), (OWN, 1))  # not what ended the other one
    assert said(another)[2:] == ("local-1", 1, MISSING_FILE)
    assert (over.warned, docker.warned) == ([], [])


def test_recordings_that_cannot_be_read_are_said_beside_the_rest(over: Over) -> None:
    recording = over.record.paths.root / RECORDINGS / "local-0" / "gloo_0"
    recording.parent.mkdir(parents=True)
    recording.write_bytes(b"")
    what = said(over.ended((HUNG, 125), ("step 3\n", 143)))[-1]
    assert what.startswith(
        "hung: no output and no step within the job's hang_timeout; its flight recorder dumps could not be analysed: "
    )
    assert over.warned == []


def test_the_files_that_a_fix_names_are_the_runs_own(over: Over) -> None:
    """Who reads result.json has no output above it."""
    hung, unknown = over.ended((HUNG, 125), ("step 3\n", 143)), over.ended(("step 3\n", 0), (OWN, None))
    assert hung.failure is not None
    assert unknown.failure is not None
    logs = [f"runs/{RUN}/logs/local-{n}.log" for n in range(2)]
    assert hung.failure.cure.startswith(f"see what was printed last: {logs[0]}, {logs[1]}; raise `hang_timeout`")
    assert unknown.failure.cure == f"before you use its results, check its output: {logs[1]}"


class Mute(LocalMachine):
    """Answers of a node that no one has thought of."""

    def run(self, *args: Any, **options: Any) -> Any:
        raise ValueError("an answer that no one has thought of")


def test_whatever_cannot_be_asked_is_a_warning_of_its_own(over: Over, tmp_path: Path) -> None:
    docker = Over(tmp_path / "docker", "docker")
    for name, engine in docker.engines.items():
        engine.machine = Mute(name, "me")
        engine.files = Files(engine.machine)
    silent = docker.ended(("step 3\n", 3), ("step 3\n", 0))
    assert said(silent) == ("failed", 1, "local-0", 3, "exited with code 3")
    rest = ["whether a machine has restarted is not known", "the last checkpoint is not known"]
    assert [line.partition(":")[0] for line in docker.warned] == ["whether a disk is full is not known", *rest]
    docker.warned.clear()
    text = "FileExistsError: [Errno 17] File exists: '/dev/shm/x'"
    exists = docker.ended((f"Traceback (most recent call last):\n{text}\n", 1), ("step 3\n", 0))
    assert said(exists) == ("failed", 1, "local-0", 1, f"exited with code 1: {text}")
    assert [line.partition(":")[0] for line in docker.warned] == ["what is left in shared memory is not known", *rest]
