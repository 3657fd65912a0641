"""The line about a run's gradients, from its record: of NCCL's collected logs, or of the plan for gloo."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.job.dump import dump_job
from launcher.model.rdma import Port
from launcher.records.paths import NodePaths
from launcher.records.store import Record
from launcher.records.wanted import Want, want
from launcher.run import membership
from launcher.run.end import gradients
from launcher.run.end.evidence import gather
from tests.failures import first_failure
from tests.nccl_rows import ROWS
from tests.unit.test_diagnose import state
from tests.unit.test_plan import CASES, job, planned

ROCE = ROWS["ports that NCCL joins, one of two pairs used"].log
CONNECTED = "gradients: RoCE on mlx5_0, mlx5_1, without GPUDirect"


def recorded(folder: Path, name: str, **keys: Any) -> Record:
    """Return the record of a run that the case of test_plan would start; keys: of its job."""
    a_job, facts, image = CASES[name]
    own = job(**keys) if keys else a_job
    plan = planned(own, facts, image)
    record = Record.of(plan, [], folder / "runs")
    record.write(plan, dump_job(own), b"")
    return record


def logged(record: Record, name: str, text: str, when: float = 100.0) -> None:
    file = record.paths.logs / name
    file.write_text(text)
    os.utime(file, (when, when))


def test_all_nodes_must_have_connected(tmp_path: Path) -> None:
    record = recorded(tmp_path, "docker_2_nodes_gpus")
    assert gradients.line(record) == ""
    logged(record, "gpu-0.nccl.41", ROCE)
    assert gradients.line(record) == ""
    logged(record, "gpu-1.nccl.7", ROWS["RoCE, two cards"].log)  # it has not connected
    assert gradients.line(record) == ""
    logged(record, "gpu-1.nccl.7", ROCE)
    logged(record, "gpu-1.nccl.txt", "of the program")
    assert gradients.line(record) == CONNECTED
    tcp = ROWS["no libibverbs in the image"].log
    assert gradients.line(record, {"gpu-0": tcp, "gpu-1": tcp}) == "gradients: TCP on ens4"  # of a running node


def test_an_unused_rdma_device_and_the_interfaces_speed_are_named(tmp_path: Path) -> None:
    a_job, facts, image = CASES["docker_2_nodes_gpus"]
    cards = (Port("mlx5_0", 1, "ACTIVE"), Port("mlx5_1", 1, "DOWN"), Port("cxgb4_0", 1, "ACTIVE", rdma=False))
    facts = [
        replace(each, rdma=cards, interfaces=tuple(replace(one, speed=10_000) for one in each.interfaces))
        for each in facts
    ]
    plan = planned(a_job, facts, image)
    record = Record.of(plan, [], tmp_path / "runs")
    record.write(plan, dump_job(a_job), b"")
    off = "NCCL INFO NCCL_IB_DISABLE set by environment to 1.\nNCCL INFO Using network Socket\n"
    logs = {
        f"gpu-{rank}": f"{off}NCCL INFO NET/Socket : Using [0]ens{rank}:10.0.0.1{rank}<0>\n"
        "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
        for rank in range(2)
    }
    why = "although mlx5_0 is active: NCCL_IB_DISABLE is set -> remove it from `env` or the image"
    assert gradients.line(record, logs) == (
        f"gradients: gpu-0: TCP on ens0 (10 Gb/s), {why}; gpu-1: TCP on ens1 (10 Gb/s), {why}"
    )


def test_the_logs_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    record = recorded(tmp_path, "docker_2_nodes_gpus")
    logged(record, "gpu-0.nccl.41", ROCE)
    logged(record, "gpu-1.nccl.7", ROCE, when=90.0)
    state_folder = record.paths.root / "state"
    state_folder.mkdir()
    (state_folder / "gpu-1.attempts").write_text("start 80\nexit 1 95\nstart 96\n")
    assert gradients.line(record) == ""
    logged(record, "gpu-1.nccl.9", ROCE, when=97.0)
    assert gradients.line(record) == CONNECTED


def joined(record: Record) -> Record:
    """A rank of each node has joined a process group of all."""
    (record.paths.root / "state").mkdir(exist_ok=True)
    for node in record.nodes():
        Path(NodePaths(str(record.paths.root), node.name).groups).write_text(f"group {node.ranks.start} 64 100\n")
    return record


def test_gloo_uses_the_planned_interface_once_ranks_of_all_nodes_have_joined(tmp_path: Path) -> None:
    said = "gradients: TCP (gloo) on ens0 (10.0.0.10), ens1 (10.0.0.11)"
    record = recorded(tmp_path / "a", "docker_2_nodes_cpu")
    assert gradients.line(record) == "", "its ranks may never join"
    assert gradients.line(joined(record)) == said
    attempts, _ = (Path(NodePaths(str(record.paths.root), node.name).attempts) for node in record.nodes())
    attempts.write_text("start 80\nexit 1 105\nstart 106\n")
    assert gradients.line(record) == "", "only of an earlier attempt"
    seen = {node.name: membership.parse(b"group 0 64 107\n") for node in record.nodes()}
    assert gradients.line(record, groups=seen) == said, "of running nodes"
    chosen = joined(recorded(tmp_path / "b", "docker_2_nodes_cpu", env={"GLOO_SOCKET_IFNAME": "ib0"}))
    assert gradients.line(chosen) == "gradients: TCP (gloo) on ib0"


def test_nothing_is_said_of_what_does_not_travel(tmp_path: Path) -> None:
    assert gradients.line(recorded(tmp_path / "one", "docker_1_node_4_gpus")) == ""
    command = joined(recorded(tmp_path / "command", "docker_2_nodes_command"))
    assert gradients.line(command) == ""  # it may be no torch at all
    known = joined(recorded(tmp_path / "known", "docker_2_nodes_cpu"))
    rebuilt = joined(Record.rebuild(known.run, "docker", known.nodes(), tmp_path / "other"))
    assert gradients.line(rebuilt) == ""  # the plan is unknown


def test_a_log_that_a_restarted_process_writes_anew_is_replaced() -> None:
    assert want("logs/gpu-0.nccl.41") == Want("logs/gpu-0.nccl.41", grows=False, text=True)
    assert want("logs/gpu-0.log") == Want("logs/gpu-0.log", grows=True, text=True)


def test_warnings_in_nccls_own_log_explain_the_failure(tmp_path: Path) -> None:
    record = recorded(tmp_path, "docker_2_nodes_gpus")
    error = (
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    ddp(x)\n'
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:317, unhandled system error"
    )
    (record.paths.logs / "gpu-0.log").write_text(error)
    (record.paths.logs / "rank-0.log").write_text(error)
    [first, _] = record.nodes()
    before = first_failure([gather(record.paths.root, first, state(1))])
    assert before is not None
    assert "memlock" not in before.what
    warning = "misc/ibvwrap.cc:160 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"
    logged(record, "gpu-0.nccl.41", f"a:41:60 [0] {warning}\n")
    found = first_failure([gather(record.paths.root, first, state(1))])
    assert found is not None
    assert "the memlock limit is too low" in found.what
    assert "LimitMEMLOCK=infinity" in found.cure


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"])
def test_a_job_that_sets_nccls_log_itself_keeps_it(name: str) -> None:
    _, facts, image = CASES["docker_2_nodes_gpus"]
    env = planned(job(2, env={name: "mine"}), facts, image).nodes[0].container.env
    assert {key: value for key, value in env.items() if key.startswith("NCCL_DEBUG")} == {
        "NCCL_DEBUG": "WARN",
        name: "mine",
    }


def test_nodes_of_one_machine_send_nothing_between_machines(tmp_path: Path) -> None:
    record = recorded(tmp_path, "docker_2_nodes_gpus")
    for rank in range(2):
        logged(record, f"gpu-{rank}.nccl.41", ROCE)
    assert gradients.line(record) == CONNECTED
    record.paths.plan.write_text(record.paths.plan.read_text().replace('"host": "gpu-1"', '"host": "gpu-0"'))
    assert gradients.line(Record(record.paths)) == ""


@pytest.mark.parametrize(("case", "told"), [("docker_2_nodes_cpu", True), ("docker_3_nodes_and_a_spare", False)])
def test_ranks_that_work_alone_are_told_once_two_write_curves(tmp_path: Path, case: str, told: bool) -> None:
    """Not with min_nodes, where a generation may begin anew."""
    record = recorded(tmp_path, case)
    for node in record.nodes():
        file = Path(NodePaths(str(record.paths.root), node.name).groups)
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"watched {rank} 50\n" for rank in node.ranks))
    record.paths.tensorboard.mkdir()
    (record.paths.tensorboard / "events.out.tfevents.100.gpu-0.41.0").touch()
    assert membership.so_far(record) == ""
    (record.paths.tensorboard / "events.out.tfevents.100.gpu-1.42.0").touch()
    assert membership.so_far(record).startswith("2 ranks write curves, but no process group has all") is told
