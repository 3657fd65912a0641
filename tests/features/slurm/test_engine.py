"""The launcher with stand-ins for Slurm's programs: messages about a job, and the script that is submitted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from launcher.cli.console import print_outcome
from launcher.errors import JobInvalid, NodeUnfit, UsageError
from launcher.features.slurm import cluster as slurm_cluster
from launcher.features.slurm import engine as slurm_engine
from launcher.features.slurm.engine import SlurmEngine
from launcher.features.slurm.queue import ASK, PLAIN, RunInQueue, parse
from launcher.job.loader import parse_job
from launcher.job.settings import read_settings
from launcher.model import labels
from launcher.model.container import Phase
from launcher.node.connect import Fleet
from launcher.node.machine import LocalMachine
from launcher.planning.checks import Level
from launcher.planning.cluster import build
from launcher.records.store import NodeOfRun, Record
from launcher.run.end.evidence import gather
from launcher.run.end.outcome import conclude
from launcher.run.execute import execute
from launcher.run.locate import Attached
from launcher.run.result import Failure, Outcome
from launcher.run.state import RunState, state_of
from launcher.run.watch.supervise import Supervision
from tests.exported import CPU, DIGEST, GPU
from tests.failures import first_failure
from tests.features.slurm.test_script import HPC, import_step, sbatch

RUN = "job-20260101-000000-abcd"
NOT_STARTED = -1  # instead of a node's exit code


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def run_labels(root: Path, nodes: int = 2) -> dict[str, str]:
    known = {labels.RUN: RUN, labels.JOB: "job", labels.NODE: "node-0", labels.NODE_RANK: "0", labels.RANKS: "0+1"}
    known |= {labels.NODES: labels.SPLIT.join([labels.NO_HOST] * nodes), labels.OUTPUT: str(root / RUN)}
    known |= {labels.UID: str(os.getuid()), labels.OWNER: "me@here", labels.CREATED: "1", labels.RUNTIME: "process"}
    return known | {labels.PURPOSE: "run", labels.GPUS: ""}


def listed(root: Path, state: str, *, number: str = "12", script: str = "", comment: str = f"launcher {RUN}") -> str:
    """Return the job's line in the output of squeue. script: instead of the run's."""
    own = f"{root / RUN}/.node/job.sh {RUN} {root / RUN}"
    return f"{number}|{state}|None|{script or own}|{comment}"


def ended(
    tmp_path: Path,
    queue: str,
    *,
    accounting: str = "",
    code: str = "",
    log: str = "",
    end: str = "",
    codes: Any = (0, 0),
    submitted: str = "12",
) -> Any:
    """Return the run of job 12, parsed from ASK. queue: its line in squeue, "" if squeue no longer lists it.

    code: the exit code in scontrol.
    """
    root = tmp_path / ".launcher"
    own = root / RUN
    for folder in (own / ".node", own / "state", own / "logs"):
        folder.mkdir(parents=True)
    spec = {"name": f"launcher-{RUN}-0", "labels": run_labels(root), "code": "", "sweep": []}
    (own / ".node" / "spec.json").write_text(json.dumps(spec))
    if submitted:
        (own / ".node" / "submitted").write_text(f"{submitted}\n")
    (own / "logs" / "slurm.log").write_text(log)
    if end:
        (own / "state" / "slurm.end").write_text(end)
    for rank, code in enumerate(codes):
        if code == NOT_STARTED:
            continue
        exit_ = "" if code is None else f"exit {code} 1700000009\n"
        (own / "state" / f"node-{rank}.attempts").write_text(f"start 1700000000\n{exit_}")
    program(tmp_path / "bin", "squeue", f"echo '{queue}'")
    program(tmp_path / "bin", "sacct", f"echo '{accounting}'" if accounting else "echo disabled >&2; exit 1")
    program(tmp_path / "bin", "scontrol", f"echo 'JobId=12 JobState=FAILED ExitCode={code} Restarts=0'")
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    text = subprocess.check_output(["sh", "-c", ASK, "sh", "mark", str(root), RUN], text=True, env=env)
    (run,) = parse(text, "mark")
    return run


def first_line(run: RunInQueue, root: Path) -> tuple[str, str]:
    """Return the first line that a user sees about its end, and the fix."""
    nodes = [NodeOfRun(f"node-{rank}", "slurm:hpc", rank, "", str(root), range(rank, rank + 1)) for rank in range(2)]
    failure = first_failure([gather(root, node, state) for node, state in zip(nodes, run.states(), strict=True)])
    assert failure is not None
    assert (failure.rank, failure.words) == (None, "")
    return failure.what, failure.cure


@pytest.mark.parametrize(
    ("state", "more", "what", "fix"),
    [
        ("TIMEOUT", {}, "TIMEOUT, at its time limit", "raise `time`"),
        ("CANCELLED", {"accounting": "CANCELLED by 0"}, "CANCELLED, by root", "--resume"),
        ("CANCELLED", {"end": "143 1700000009 \n"}, "CANCELLED, by scancel", "--resume"),
        ("OUT_OF_MEMORY", {"end": "1 1700000009 "}, "OUT_OF_MEMORY, a process used more", "resources.memory"),
        ("NODE_FAIL", {"codes": (None, None)}, "NODE_FAIL, Slurm lost one of its machines", "`restarts`"),
        ("PREEMPTED", {"codes": (None, 0)}, "PREEMPTED, another job took its machines", "`restarts`"),
        ("", {"accounting": "TIMEOUT"}, "TIMEOUT, at its time limit", "raise `time`"),
        ("", {"accounting": "CANCELLED by 0"}, "CANCELLED, by root", "--resume"),
        ("", {"log": "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***\n"}, "TIMEOUT", "time"),
        ("FAILED", {"end": "124 1700000009 TIMEOUT", "codes": (1, 1)}, "TIMEOUT, at its time limit", "raise `time`"),
    ],
)
def test_how_slurm_ended_a_job_is_the_first_line(
    state: str, more: dict[str, Any], what: str, fix: str, tmp_path: Path
) -> None:
    """Even if every node exited with 0 after SIGTERM, and if Slurm no longer lists the job."""
    run = ended(tmp_path, listed(tmp_path / ".launcher", state) if state else "", **more)
    assert run.phase is Phase.EXITED
    found = first_line(run, tmp_path)
    assert found[0].startswith(f"was ended by Slurm: job 12: {what}")
    assert fix in found[1]
    assert run.states()[0].exit_code


def test_a_job_that_has_just_started_gets_its_grace_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached state of the queue is outdated: plain scancel would kill the job immediately."""
    root = tmp_path / ".launcher"
    ended(tmp_path, listed(root, "PENDING"), codes=())
    state, cancelled = tmp_path / "state", tmp_path / "cancelled"
    program(tmp_path / "bin", "squeue", f'echo "{listed(root, f"$(cat {state})")}"')
    program(tmp_path / "bin", "scancel", f'echo "$*" >>{cancelled}; echo CANCELLED >{state}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    here = HPC.model_copy(update={"workdir": str(tmp_path)})
    engine = SlurmEngine("slurm:hpc", here, LocalMachine("slurm:hpc", "me"))
    state.write_text("PENDING")
    assert engine.list({labels.RUN: RUN})[0].phase is Phase.CREATED
    state.write_text("RUNNING")
    assert engine.stop(f"launcher-{RUN}-0", 5).phase.ended
    assert cancelled.read_text().startswith("--batch --signal=TERM 12\n")


def test_a_job_that_failed_on_its_own_is_not_attributed_to_slurm(tmp_path: Path) -> None:
    run = ended(tmp_path, listed(tmp_path / ".launcher", "FAILED"), end="7 1700000009 ", codes=(0, 7))
    assert [(state.exit_code, state.error) for state in run.states()] == [(0, ""), (7, "")]


def test_a_node_that_had_not_started_when_another_failed_is_not_blamed(tmp_path: Path) -> None:
    """A large image is being unpacked on one node while the program on another one exits."""
    run = ended(tmp_path, listed(tmp_path / ".launcher", "FAILED"), end="7 1700000009 ", codes=(NOT_STARTED, 7))
    assert [(state.exit_code, state.error) for state in run.states()] == [(137, ""), (7, "")]
    nodes = [NodeOfRun(f"node-{rank}", "slurm:hpc", rank, "", str(tmp_path), range(rank, rank + 1)) for rank in (0, 1)]
    failure = first_failure([gather(tmp_path, node, state) for node, state in zip(nodes, run.states(), strict=True)])
    assert failure is not None
    assert (failure.node, failure.what) == ("node-1", "exited with code 7")


def fails(run: RunInQueue, root: Path, nodes: int = 2) -> Failure:
    every = [NodeOfRun(f"node-{n}", "slurm:hpc", n, "", str(root), range(n, n + 1)) for n in range(nodes)]
    failure = first_failure([gather(root, node, state) for node, state in zip(every, run.states(), strict=True)])
    assert failure is not None
    return failure


@pytest.mark.parametrize("first", [NOT_STARTED, None, 143, 0], ids=["not started", "no exit", "stopped", "done"])
def test_a_node_that_did_not_start_is_the_reason_with_its_machine(first: int | None, tmp_path: Path) -> None:
    log = "srun: error: n4: task 1: Exited with exit code 2\nsrun: error: n1: task 0: Exited with exit code 73\n"
    run = ended(tmp_path, listed(tmp_path / ".launcher", "FAILED"), end="2 1700000009 ", log=log, codes=(first,))
    found = fails(run, tmp_path)
    assert (found.node, found.exit_code) == ("node-1", 2)
    assert found.what == "could not be started: its task on n4 exited with code 2 before its program started"
    assert found.cure.endswith("launcher doctor JOB --on CLUSTER --set nodes=1 --set 'cluster.options=[--nodelist=n4]'")
    assert state_of(run.states(), 2) is RunState.FAILED


def test_a_node_that_did_not_start_is_a_suspect_and_no_victim(tmp_path: Path) -> None:
    """srun has no message of it; the other one waited for it."""
    lost = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.1]"
    run = ended(tmp_path, listed(tmp_path / ".launcher", "FAILED"), end="1 1700000009 ", codes=(1,))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "node-0.log").write_text(f"Traceback (most recent call last):\n{lost}\n")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "node-0.attempts").write_text("start 1700000000\nexit 1 1700000009\n")
    found = fails(run, tmp_path)
    assert (found.node, found.what) == ("node-1", "did not start its program")
    assert "sees the cluster's workdir" in found.cure


@pytest.mark.parametrize(
    ("codes", "log", "blamed"),
    [
        ((0, 7), ["n4: task 1", "n[1-2]: tasks 0-99,7"], ""),  # both have started
        ((0,), ["n4: task 1", "again", "n2: task 0"], ""),
        ((), ["n4: task 1", "again", "n[2-3]: tasks 0-1"], "n[2-3]"),
        ((), ["n2: task 7", "n3: task "], ""),
        ((), ["again", "n3: tasks 5,1"], "n3"),
    ],
)
def test_the_first_task_of_the_last_attempt_that_started_nothing_is_named(
    codes: tuple[int, ...], log: list[str], blamed: str, tmp_path: Path
) -> None:
    again = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-27T02:37:26 DUE TO JOB REQUEUE ***"
    text = [again if line == "again" else f"srun: error: {line}: Exited with exit code 3" for line in log]
    run = ended(tmp_path, listed(tmp_path / ".launcher", "FAILED"), end="3 1 ", log="\n".join([*text, ""]), codes=codes)
    errors = [state.error for state in run.states() if state.error]
    assert all(error == f"its task on {blamed} exited with code 3 before its program started" for error in errors)
    assert bool(errors) == bool(blamed)


def test_a_launch_that_failed_asks_whether_the_machine_sees_the_folder(tmp_path: Path) -> None:
    line = listed(tmp_path / ".launcher", "FAILED").replace("|None|", "|JobLaunchFailure|")
    run = ended(tmp_path, line, codes=(), code="0:53 BatchHost=n4")
    found = fails(run, tmp_path)
    assert found.what == "could not be started: job 12: FAILED (JobLaunchFailure) on n4"
    assert "check whether n4 sees the cluster's workdir" in found.cure


def test_how_slurm_ended_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    log = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT x DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"
    run = ended(tmp_path, "", log=log, end="0 1700000009 ")
    assert [(state.exit_code, state.error) for state in run.states()] == [(0, ""), (0, "")]


@pytest.mark.parametrize(
    ("state", "more", "codes"),
    [
        ("COMPLETED", {"end": "0 1700000009 ", "codes": (0, NOT_STARTED)}, [0, None]),
        ("COMPLETED", {"end": "0 1700000009 ", "codes": (None, 0), "code": "0:0"}, [None, 0]),
        ("COMPLETED", {"code": "0:0", "codes": ()}, [None, None]),
        ("", {"codes": (None, None)}, [None, None]),
        ("", {"codes": ()}, [None, None]),
        ("", {"codes": (None, None), "accounting": "COMPLETED|0:0"}, [None, None]),
        ("FAILED", {"codes": (None, None), "code": "73:0"}, [None, None]),  # the disk was full at the end
    ],
)
def test_no_evidence_is_neither_a_success_nor_a_failure(
    state: str, more: dict[str, Any], codes: list[int | None], tmp_path: Path
) -> None:
    run = ended(tmp_path, listed(tmp_path / ".launcher", state) if state else "", **more)
    states = run.states()
    assert run.phase is Phase.EXITED
    assert [one.exit_code for one in states] == codes
    assert state_of(states, 2) is RunState.LOST


@pytest.fixture
def over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attached:
    """A run on Slurm that is over, with two nodes."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    here = HPC.model_copy(update={"workdir": str(tmp_path)})
    engine = SlurmEngine("slurm:hpc", here, LocalMachine("slurm:hpc", "me"))
    output = str(tmp_path / ".launcher" / RUN)
    nodes = tuple(
        NodeOfRun(f"node-{n}", "slurm:hpc", n, f"launcher-{RUN}-{n}", output, range(n, n + 1)) for n in (0, 1)
    )
    record = Record.rebuild(RUN, "process", nodes, tmp_path / "runs")
    return Attached(record, nodes, {node.name: engine for node in nodes}, Fleet([engine], {}, None))


def outcome_of(over: Attached, run: RunInQueue) -> Outcome:
    states = {node.name: state for node, state in zip(over.nodes, run.states(), strict=True)}
    return conclude(over, states, {}, None, pytest.fail)


def test_the_fix_for_slurms_reason_has_the_runs_own_command(tmp_path: Path, over: Attached) -> None:
    outcome = outcome_of(over, ended(tmp_path, listed(tmp_path / ".launcher", "TIMEOUT")))
    assert outcome.failure is not None
    assert outcome.failure.what == "was ended by Slurm: job 12: TIMEOUT, at its time limit"
    assert outcome.failure.cure.endswith(f"; resume from its last checkpoint: {over.record.resume_command}")
    assert over.record.resume_command.endswith(f" --on hpc --resume {RUN}")
    assert (outcome.exit_code, outcome.resume) == (1, None)  # it is not said twice


def test_what_explains_its_end_is_loaded_before_it_is_followed(over: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher may be upgraded meanwhile."""
    monkeypatch.delitem(sys.modules, "launcher.features.slurm.causes", raising=False)
    Supervision(over, (), resumed=True).close()
    assert "launcher.features.slurm.causes" in sys.modules


def test_an_outcome_without_evidence_names_the_node(tmp_path: Path, over: Attached) -> None:
    outcome = outcome_of(over, ended(tmp_path, "", codes=(0, None)))
    assert (outcome.state, outcome.exit_code) == (RunState.LOST, 3)
    console = Console(width=200)
    with console.capture() as printed:
        print_outcome(console, outcome, str)
    assert f"lost {RUN}: node-1 ended without a record of its exit code" in printed.get()


def test_a_run_is_done_if_every_node_recorded_it(tmp_path: Path) -> None:
    """Even if the script could not write its own record."""
    for number, (state, code) in enumerate([("", ""), ("COMPLETED", "0:0"), ("FAILED", "73:0")]):
        root = tmp_path / str(number)
        run = ended(root, listed(root / ".launcher", state) if state else "", code=code)
        assert state_of(run.states(), 2) is RunState.DONE


@pytest.mark.parametrize(
    ("state", "more", "what"),
    [
        ("FAILED", {"code": "73:0"}, "could not be started: its batch script could not write to "),
        ("", {"accounting": "FAILED|73:0"}, "could not be started: its batch script could not write to "),
        ("", {"accounting": "FAILED|69:0"}, "exited with code 69"),
        ("FAILED", {"code": "0:9"}, "could not be started: job 12: FAILED"),
    ],
)
def test_the_scripts_exit_code_comes_from_slurm_if_the_script_could_not_record_it(
    state: str, more: dict[str, str], what: str, tmp_path: Path
) -> None:
    run = ended(tmp_path, listed(tmp_path / ".launcher", state) if state else "", codes=(), **more)
    assert first_line(run, tmp_path)[0].startswith(what)


def test_the_exit_codes_of_an_ended_run_may_be_visible_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, the login machine sees new files with a delay."""
    ended(tmp_path, "", codes=())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    here = HPC.model_copy(update={"workdir": str(tmp_path)})
    cluster, first = SlurmEngine("slurm:hpc", here, LocalMachine("slurm:hpc", "me")), f"launcher-{RUN}-0"
    assert cluster.wait(first, 0).phase is Phase.RUNNING
    monkeypatch.setattr(slurm_engine, "_LATE", 0)
    assert cluster.wait(first, 0).phase is Phase.EXITED


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("PartitionConfig", "too few"),
        ("PartitionTimeLimit", "lower `time`"),
        ("QOSMaxWallDurationPerJobLimit", "lower `time`"),
        ("AssocMaxNodePerJobLimit", "sacctmgr show assoc"),
        ("QOSMaxGRESPerJob", "sacctmgr show qos"),
        ("QOSMinGRES", "sacctmgr show qos"),
        ("InvalidQOS", "set `account` and `qos`"),
        ("JobHeldUser", "scontrol release 12"),
        ("launch failed requeued held", "doctor JOB --on CLUSTER; then release it: scontrol release 12"),
        ("job requeued in held state", "scontrol release 12"),
        *((reason, "") for reason in ("Resources", "Priority", "BeginTime", "QOSMaxJobsPerUserLimit", "PartitionDown")),
    ],
)
def test_a_reason_that_does_not_pass_by_itself_has_an_advice(reason: str, advice: str, tmp_path: Path) -> None:
    line = listed(tmp_path / ".launcher", "PENDING").replace("|None|", f"|{reason}|")
    shown = ended(tmp_path, line, codes=()).states()[0].error
    assert shown.startswith(f"job 12: PENDING ({reason})")
    assert (": " in shown.removeprefix("job 12: ")) == bool(advice)
    assert advice in shown


def test_a_job_in_an_unknown_state_is_running(tmp_path: Path) -> None:
    assert ended(tmp_path, listed(tmp_path / ".launcher", "HIBERNATING")).phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("job", "submitted"),
    [
        ({"comment": "project 17"}, "12"),
        ({"comment": "(null)", "script": "(null)"}, "12"),
        ({"comment": "project|17"}, "12"),
        ({"comment": "project 17"}, ""),
        ({"comment": "project 17", "script": f"/shared/.launcher/{RUN}/.node/job.sh"}, ""),  # of newer versions
        ({"script": "(null)"}, ""),
        ({"comment": "project 17"}, "12;cluster"),
    ],
)
def test_a_job_is_found_by_its_id_its_script_or_its_comment(
    job: dict[str, str], submitted: str, tmp_path: Path
) -> None:
    run = ended(tmp_path, listed(tmp_path / ".launcher", "RUNNING", **job), submitted=submitted, codes=())
    assert run.phase is Phase.RUNNING


def test_another_job_with_the_same_id_is_not_the_runs(tmp_path: Path) -> None:
    """Slurm starts counting again if it has lost its state."""
    other = listed(tmp_path / ".launcher", "RUNNING", script="/home/me/other.sh", comment="(null)")
    assert ended(tmp_path, other).phase is Phase.EXITED


def test_a_task_of_an_array_is_found_without_its_id(tmp_path: Path) -> None:
    root = tmp_path / ".launcher"
    ended(tmp_path, "", submitted="", codes=())
    file = root / RUN / ".node" / "spec.json"
    last = f"{RUN}-last"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sweep": ["x", RUN, last]}))
    script = f"{root / last}/.node/array.sh"
    tasks = [listed(root, "RUNNING", number=f"12_{n}", script=script, comment="") for n in (0, 1)]
    program(tmp_path / "bin", "squeue", f"echo '{tasks[0]}'; echo '{tasks[1]}'")
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    text = subprocess.check_output(["sh", "-c", ASK, "sh", "mark", str(root), RUN], text=True, env=env)
    (run,) = parse(text, "mark")
    assert str(run.job) == "job 12_1: RUNNING"


def test_files_that_a_program_replaced_by_links_or_pipes_are_not_read(tmp_path: Path) -> None:
    ended(tmp_path, "")
    root, private = tmp_path / ".launcher", tmp_path / "private"
    private.mkdir()
    (private / "slurm.log").write_text("slurmstepd: error: *** private DUE TO \n")
    (private / "text").write_text("private text\n")
    for name in ("state/slurm.end", "state/node-0.attempts", "state/node-1.attempts", ".node/submitted", "logs"):
        subprocess.run(["rm", "-rf", root / RUN / name], check=True)
    (root / RUN / ".node" / "submitted").symlink_to(private / "text")
    (root / RUN / "logs").symlink_to(private)
    (root / RUN / "state" / "node-0.attempts").symlink_to("/dev/zero")
    for name in ("slurm.end", "node-1.attempts"):
        os.mkfifo(root / RUN / "state" / name)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    text = subprocess.check_output(["sh", "-c", ASK, "sh", "mark", str(root), RUN], text=True, env=env, timeout=30)
    assert "private" not in text
    (run,) = parse(text, "mark")
    assert (run.submitted, run.end, run.attempts) == ("", None, {})


def text_of(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk without free space, with the folders of a run's output."""
    folder = tmp_path / "out"
    folder.mkdir()
    if os.geteuid() or subprocess.call(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]):
        pytest.skip("mount is not allowed here")
    try:
        for name in ("state", "errors"):
            (folder / name).mkdir()
        subprocess.run(["dd", "if=/dev/zero", f"of={folder}/fill"], stderr=subprocess.DEVNULL, check=False)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


STEP = (  # in a separate session, to which scancel sends signals
    'setsid bash -c \'trap "sleep 0.3; echo saved; exit 0" TERM; echo $$ >{0}/step; : >{0}/runs; '
    "while :; do sleep 0.05; done' & wait $!"
)


def run_script(
    tmp_path: Path, script: str, *, srun: str = STEP, by_hand: bool = False, sees: bool = True, **env: str
) -> subprocess.Popen[str]:
    """Run the script with a Slurm of one node, as `up` submits it or with sbatch alone. sees: the run's folder."""
    own = tmp_path / "bin"
    program(own, "srun", srun.format(tmp_path))
    program(own, "scancel", f"echo $* >>{tmp_path}/scancel; kill -TERM $(cat {tmp_path}/step)")
    program(own, "scontrol", f"echo $* >>{tmp_path}/scontrol; echo NodeAddr=127.0.0.1")
    (tmp_path / "job.sh").write_text(script)
    if sees and not by_hand:
        (tmp_path / "out" / ".node").mkdir(parents=True, exist_ok=True)
    known = {**os.environ, "PATH": f"{own}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1"}
    return subprocess.Popen(
        ["bash", str(tmp_path / "job.sh"), *(() if by_hand else (RUN, str(tmp_path / "out")))],
        cwd=tmp_path,
        env={**known, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("data", [CPU, GPU], ids=["process", "image"])
def test_a_script_that_cannot_write_starts_no_node(data: dict[str, Any], full: Path, tmp_path: Path) -> None:
    script = sbatch({**data, "secrets": [], "restarts": 0}, HPC.model_copy(update={"workdir": str(tmp_path)}))
    said, _ = (running := run_script(tmp_path, script)).communicate(timeout=20)
    assert running.returncode == 73, said
    assert f"could not write {full}/state/node.sh" in said
    assert not (tmp_path / "runs").exists()
    assert not [*full.glob("state/*")]


def test_a_script_that_cannot_record_its_end_is_no_success(full: Path, tmp_path: Path) -> None:
    (full / "fill").unlink()
    fills = f"dd if=/dev/zero of={full}/fill 2>/dev/null; exit 0"
    said, _ = (running := run_script(tmp_path, sbatch(CPU), srun=fills)).communicate(timeout=20)
    assert running.returncode == 73, said
    assert f"could not write {full}/state/slurm.end" in said


def test_a_script_on_a_machine_that_does_not_see_its_folder_runs_nothing(tmp_path: Path) -> None:
    """Newer versions of Slurm create the folder of its output there."""
    running = run_script(tmp_path, sbatch(CPU), sees=False)
    said, _ = running.communicate(timeout=20)
    assert (running.returncode, "does not see" in said) == (73, True), said
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "out" / "state").exists()


def test_a_script_that_another_run_submits_uses_nothing_of_that_run(tmp_path: Path) -> None:
    """Slurm passes on the environment of sbatch."""
    removed = {"LAUNCHER_NODE_RANK": "3", "LAUNCHER_TIMEOUT": "1", "LAUNCHER_MIG": "a,b", "RANK": "3"}
    removed |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "SLURM_CPU_BIND": "quiet", "SLURM_MEM_PER_CPU": "1"}
    kept = {"LAUNCHER_SSH_CONFIG": "/my/config", "MINE": "1"}
    others = {"LAUNCHER_RUN": "other", "LAUNCHER_OUTPUT": str(tmp_path / "other"), "SLURM_RESTART_COUNT": "9"}
    script = sbatch({**CPU, "restarts": 1})
    running = run_script(tmp_path, script, srun="env >{}/env", by_hand=True, **removed, **kept, **others)
    said, _ = running.communicate(timeout=20)
    assert running.returncode == 0, said
    found = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert found["LAUNCHER_RUN"] == "digits-12"
    assert found["LAUNCHER_OUTPUT"] == f"{tmp_path}/output/digits-12"
    assert {name: found.get(name) for name in kept} == kept
    assert not {*removed} & {*found}
    assert not (tmp_path / "other").exists()


def test_variables_of_the_terminal_do_not_change_what_slurm_is_asked() -> None:
    """As in the shell of a job, or with a user's defaults for other commands."""
    of_a_job = {"SLURM_JOB_ID": "12", "SLURM_NODELIST": "n1", "SLURM_MEM_PER_CPU": "1", "SRUN_CPUS_PER_TASK": "9"}
    options = {"SBATCH_ARRAY_INX": "0-9", "SQUEUE_PARTITION": "cpu", "SCANCEL_STATE": "R", "SLURM_CLUSTERS": "other"}
    kept = {"SBATCH_PARTITION": "gpu", "SLURM_CONF": "/etc/slurm.conf", "MINE": "SLURM_X=1"}
    env = {"PATH": os.environ["PATH"], **of_a_job, **options, **kept}
    done = subprocess.run(["sh", "-c", f"{PLAIN}env"], env=env, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert {name: found.get(name) for name in kept} == kept
    assert not {*of_a_job, *options} & {*found}
    outside = {"PATH": os.environ["PATH"], "SLURM_TIME_FORMAT": "relative", "SRUN_DEBUG": "3"}
    done = subprocess.run(["sh", "-c", f"{PLAIN}env"], env=outside, capture_output=True, text=True, check=True)
    assert "SLURM_TIME_FORMAT" in done.stdout  # no job: it is a user's setting


def test_before_slurms_time_limit_the_nodes_are_stopped_and_the_job_is_requeued(tmp_path: Path) -> None:
    script = sbatch({**CPU, "restarts": 1})
    assert "#SBATCH --signal=B:USR1@90" in script
    running = run_script(tmp_path, script.replace("sleep 60", "sleep 0"))
    while not (tmp_path / "runs").exists():
        assert running.poll() is None, running.communicate()[0]
        time.sleep(0.02)
    running.send_signal(signal.SIGUSR1)
    said, _ = running.communicate(timeout=20)
    assert "saved" in said
    assert running.returncode == 124
    assert (tmp_path / "out" / "state" / "slurm.end").read_text().split()[::2] == ["124", "TIMEOUT"]
    assert "requeue 12" in (tmp_path / "scontrol").read_text()


@pytest.mark.parametrize(("number", "own"), [("12", "12_3"), ("11", "12")])
def test_a_task_of_an_array_stops_and_requeues_only_itself(number: str, own: str, tmp_path: Path) -> None:
    """The last task that Slurm starts has the array's own ID, which means all tasks to scancel and scontrol."""
    script, task = sbatch({**CPU, "restarts": 1}).replace("sleep 60", "sleep 0"), {"SLURM_ARRAY_TASK_ID": "3"}
    running = run_script(tmp_path, script, SLURM_ARRAY_JOB_ID=number, **task)
    while not (tmp_path / "runs").exists():
        assert running.poll() is None, running.communicate()[0]
        time.sleep(0.02)
    running.send_signal(signal.SIGUSR1)
    running.communicate(timeout=20)
    assert (tmp_path / "scancel").read_text() == f"--signal=TERM {own}\n"
    assert f"requeue {own}\n" in (tmp_path / "scontrol").read_text()


def test_a_time_limit_of_a_minute_has_a_shorter_warning() -> None:
    assert "--signal=B:USR1@15" in sbatch({**CPU, "cluster": {"time": "1m"}})


@pytest.mark.parametrize(("data", "where"), [(GPU, "flock"), (CPU, "prepare")])
def test_a_job_that_is_cancelled_before_its_nodes_run_starts_no_node(
    data: dict[str, Any], where: str, tmp_path: Path
) -> None:
    """It waits for another job's import of the image, which it does not touch, or runs the site's setup lines."""
    here = HPC.model_copy(update={"workdir": str(tmp_path), "setup": ("prepare",)})
    program(tmp_path / "bin", "prepare", "true")
    program(tmp_path / "bin", where, f"echo $$ >{tmp_path}/waits; exec sleep 60")
    program(tmp_path / "bin", "enroot", "echo 4.0.1")
    script = sbatch({**data, "secrets": []}, here)
    imported = tmp_path / ".launcher" / "images" / f"{DIGEST.replace(':', '-')}.sqsh.part"
    imported.parent.mkdir(parents=True)
    imported.touch()
    running = run_script(tmp_path, script)
    while not text_of(tmp_path / "waits"):
        assert running.poll() is None, running.communicate()[0]
        time.sleep(0.02)
    running.terminate()
    os.kill(int(text_of(tmp_path / "waits")), signal.SIGTERM)
    said, _ = running.communicate(timeout=20)
    assert running.returncode == 143, said
    assert not (tmp_path / "runs").exists()
    assert imported.exists()


def test_a_missing_secret_stops_a_script_that_is_submitted_manually(tmp_path: Path) -> None:
    script = sbatch({**CPU, "secrets": ["WANDB_API_KEY"]})
    said, _ = (done := run_script(tmp_path, script)).communicate(timeout=20)
    assert done.returncode
    assert "WANDB_API_KEY: is a secret of the job" in said
    assert not (tmp_path / "step").exists()


def test_a_lock_that_the_file_system_refuses_is_reported(tmp_path: Path) -> None:
    """The image is imported anyway."""
    here = HPC.model_copy(update={"workdir": str(tmp_path)})
    program(tmp_path / "bin", "flock", "echo 'flock: 9: No locks available' >&2; exit 1")
    program(tmp_path / "bin", "enroot", '[ "$1" = version ] && echo 4.0.1 || : >"$3"')
    said, _ = (done := run_script(tmp_path, sbatch({**GPU, "secrets": []}, here), srun="true")).communicate(timeout=20)
    assert done.returncode == 0, said
    assert re.search(r"No locks available\nlauncher: could not lock \S+sqsh.lock .*another job may import", said), said


def test_an_address_that_slurm_does_not_say_ends_the_job(tmp_path: Path) -> None:
    script = sbatch(CPU)
    assert script.count("sleep 2") == 1
    program(tmp_path / "bin", "busy", f"echo x >>{tmp_path}/asked; echo 'scontrol: error: slurm_load_node: busy' >&2")
    running = run_script(tmp_path, script.replace("sleep 2", "sleep 0").replace("scontrol show node", "busy"))
    said, _ = running.communicate(timeout=20)
    assert running.returncode == 69, said
    assert "error: slurm_load_node: busy\nlauncher: scontrol did not give the address of the first of n1" in said
    assert len((tmp_path / "asked").read_text().split()) > 10
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("version", "possible"), [("slurm 20.02.7", False), ("slurm 20.11.0", True), ("", True)])
def test_a_slurm_without_overlapping_steps_is_named(
    version: str, possible: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of srun reject the option with the list of all their options."""
    root = tmp_path / ".launcher"
    ended(tmp_path, listed(root, "RUNNING"), codes=(None, None))
    program(tmp_path / "bin", "srun", f'[ "$*" = --version ] || exit 7; echo "{version}"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    here = HPC.model_copy(update={"workdir": str(tmp_path)})
    engine = SlurmEngine("slurm:hpc", here, LocalMachine("slurm:hpc", "me"))
    if possible:
        assert engine.interact(f"launcher-{RUN}-1", ["true"], terminal=False) == 7
        return
    with pytest.raises(NodeUnfit, match=r"slurm 20.02.7 cannot run a command beside a job's program: .*20.11 or newer"):
        engine.interact(f"launcher-{RUN}-1", ["true"], terminal=False)


def processors(data: dict[str, Any], **settings: Any) -> list[str]:
    lines = sbatch(data, HPC.model_copy(update={"options": (), **settings})).splitlines()
    return [line for line in lines if "exclusive" in line or "SBATCH --cpus" in line or "# CPUs" in line]


def test_a_job_has_all_processors_of_its_nodes_or_the_share_of_its_gpus() -> None:
    """Without an option Slurm gives a job one processor."""
    free = {**GPU, "resources": {}}
    every, comment = processors(free)
    assert every == "#SBATCH --exclusive"
    assert "all; to use fewer" in comment
    share, comment = processors({**free, "gpus": 2}, cpus_per_gpu=12)
    assert share == "#SBATCH --cpus-per-task=24"
    assert "24, by cpus_per_gpu" in comment
    assert processors(GPU, cpus_per_gpu=12)[0] == "#SBATCH --cpus-per-task=16"
    (own,) = [line for line in processors(free, options=("--cpus-per-gpu=4",)) if "SBATCH" not in line]
    assert "by the options above" in own


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        ({}, (), ["--mem=0"]),
        ({}, ("--exclusive",), ["--mem=0"]),
        ({}, ("--exclusive", "--mem 4G"), ["--mem 4G"]),
        ({}, ("--exclusive=user",), []),  # shares its nodes
        ({}, ("--mem-per-cpu=2G",), ["--mem-per-cpu=2G"]),
        ({}, ("--cpus-per-task=2", "--mem-bind=local"), ["--mem-bind=local"]),
        ({"resources": {"memory": "6g"}}, (), ["--mem=6144M"]),
        ({"resources": {"cpus": 1}}, (), []),
    ],
)
def test_a_job_that_has_its_nodes_alone_has_all_of_their_memory(
    data: dict[str, Any], options: tuple[str, ...], expected: list[str]
) -> None:
    """Without --mem it would get the cluster's DefMemPerNode. Slurm passes on a variable for any other value of it."""
    script = sbatch({**CPU, "nodes": 2, **data}, HPC.model_copy(update={"options": options}))
    assert re.findall(r"^#SBATCH (--mem.*)", script, re.MULTILINE) == expected
    kept = "SLURM_MEM_PER_NODE" not in script
    assert kept == any(re.match("--mem[= ][^0]", option) for option in expected)


def test_a_job_without_containers_gets_the_requested_processors_on_a_cluster() -> None:
    """Without a cluster, nothing would reserve them."""
    asked = {**CPU, "nodes": 2, "resources": {"cpus": 4, "memory": "6g"}}
    every, comment = processors(asked)
    assert every == "#SBATCH --cpus-per-task=4"
    assert "by resources.cpus" in comment
    assert "#SBATCH --mem=6144M" in sbatch(asked)
    with pytest.raises(JobInvalid, match=r"resources.cpus: .*give the number of nodes: nodes: 2"):
        sbatch({**asked, "nodes": ["local", "local"]})
    pool = {"nodes": {"pool": ["local"] * 4, "each": 2}, "sweep": [{"a": 1}]}
    with pytest.raises(JobInvalid, match=r"resources.cpus: .*give the number of nodes: nodes: 2"):
        sbatch({**asked, **pool})
    with pytest.raises(JobInvalid, match="which chooses them: --on CLUSTER"):
        parse_job(yaml.safe_dump(asked), "job.yaml").hosts()


def test_a_job_without_gpus_key_uses_none_if_the_cluster_has_no_number_either() -> None:
    quiet = {key: value for key, value in CPU.items() if key != "gpus"}
    plan = build(parse_job(yaml.safe_dump(quiet), "job.yaml"), "python3")
    assert plan.gpus == 0
    assert "lacks the number of GPUs" in plan.warnings[0]
    assert build(parse_job(yaml.safe_dump(quiet), "job.yaml"), "python3", 8).gpus == 8
    with pytest.raises(JobInvalid, match="the number of GPUs of a node is unknown"):
        build(parse_job(yaml.safe_dump({**quiet, "gpus": "all"}), "job.yaml"), "python3")


def test_the_job_overrides_the_clusters_settings_and_setup_lines_are_run() -> None:
    asked = {"partition": "big", "time": "1h", "options": ["--constraint=a100"]}
    script = sbatch({**GPU, "cluster": asked}, HPC.model_copy(update={"setup": ("module load cuda", "export A=1")}))
    head, _, rest = script.partition("\n\n")
    for line in ("--partition=big", "--account=lab", "--time=60"):
        assert f"#SBATCH {line}" in head
    assert head.index("--constraint=h100") < head.index("--constraint=a100")
    assert rest.index("module load cuda\nexport A=1\n") < rest.index("srun ")


def test_an_enroot_that_cannot_import_by_digest_is_an_error(tmp_path: Path) -> None:
    program(tmp_path, "enroot", "echo 3.5.0")
    step = import_step(sbatch(GPU, HPC.model_copy(update={"workdir": str(tmp_path)})))
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", step], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 69
    assert "enroot 3.5.0 cannot import an image by its digest: 4.0 or later" in done.stdout


def test_hints_for_a_cluster_name_only_commands_that_support_clusters(tmp_path: Path) -> None:
    node = NodeOfRun("node-0", "slurm:hpc", 0, "", "/out", range(1))
    engine = SlurmEngine("slurm:hpc", HPC, LocalMachine("slurm:hpc", "me"))
    record = Record.rebuild(RUN, "process", [node], tmp_path)
    attached = Attached(record, (node,), {"node-0": engine}, Fleet([engine], {}, None))
    with pytest.raises(NodeUnfit) as caught:
        execute(attached, ["true"], None, None, (), lambda message: None)
    assert "launcher status" in str(caught.value)
    assert "launcher shell" not in str(caught.value)


@pytest.mark.parametrize(
    ("srun", "name", "level", "expected"),
    [
        ('while [ "$1" != bash ]; do shift; done; exec "$@"', "enroot", Level.FAIL, "enroot 3.5.0"),
        ("echo 'srun: error: Unable to allocate resources: nodes are busy' >&2; exit 1", "node", Level.WARN, "free"),
    ],
)
def test_doctor_asks_a_node_for_its_enroot(
    srun: str, name: str, level: Level, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = {"sinfo": "echo slurm", "sbatch": "cat", "enroot": "echo 3.5.0", "srun": srun}
    for own, script in {**tools, "scontrol": "echo 'KillWait                = 30 sec'"}.items():
        program(tmp_path / "bin", own, script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    here = HPC.model_copy(update={"workdir": str(tmp_path)})
    engine = SlurmEngine("slurm:hpc", here, LocalMachine("slurm:hpc", "me"))
    job = parse_job(yaml.safe_dump({**GPU, "secrets": []}), "job.yaml")
    checks = [*slurm_cluster.check(job, here, Fleet([engine], {}, None))]
    assert (checks[-1].name, checks[-1].level) == (name, level)
    assert expected in checks[-1].what
    assert [one.what.partition(" ")[0] for one in checks if one.name == "time to save"] == ["30"]
    assert not [*(tmp_path / ".launcher").iterdir()]


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({"partion": "gpu"}, "6: clusters.hpc.partion: unknown key; did you mean 'partition'?"),
        ({"ab": "gpu"}, "6: clusters.hpc.ab: unknown key; expected one of kind, login, workdir"),
        ({"kind": "slrum"}, "2: clusters.hpc: expected 'slurm' or 'kubernetes', not 'slrum'; did you mean 'slurm'?"),
        ({"time": "soon"}, "6: clusters.hpc.time: expected a duration"),
    ],
)
def test_a_mistake_in_a_cluster_of_the_settings_file_has_its_line_and_what_is_meant(
    cluster: dict[str, str], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "launcher" / "settings.yaml"
    file.parent.mkdir()
    hpc = {"kind": "slurm", "login": "local", "workdir": "/shared", **cluster}
    file.write_text(yaml.safe_dump({"clusters": {"hpc": hpc}}, sort_keys=False))
    file.chmod(0o600)
    with pytest.raises(UsageError) as caught:
        read_settings({"XDG_CONFIG_HOME": str(tmp_path)})
    assert str(caught.value).startswith(f"{file}:{expected}")
