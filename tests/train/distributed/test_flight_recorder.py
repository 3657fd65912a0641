"""flight_recorder.py under rank.sh: torch loads it, gloo's private dump works, and only the worker itself listens."""

from __future__ import annotations

import os
import pickle
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launcher import container_scripts
from launcher.hangs import container_scripts as of_hangs

# Stands in for nccl2, the NCCL of torch 2.15, which cannot run without a GPU: torch records it by its name.
NCCL2 = """
from torch._C import _distributed_c10d as c10d

class Done(dist._Work):
    def wait(self, timeout=None):
        return True

class Backend(c10d.Backend):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)

    def getBackendName(self):
        return "nccl2"

    def allreduce(self, tensors, options):
        return Done()

dist.Backend.register_backend("stands-in", Backend, devices=["cpu"])
"""
loaded_by_torch = pytest.mark.skipif(torch.__version__ < "2.5", reason="torch before 2.5 loads no extension")
PROGRAM = """
import sys, time
import torch, torch.distributed as dist

def reads():
    print("ready", flush=True)
    while True:
        time.sleep(1)

dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
if sys.argv[1] == "fails":
    raise RuntimeError("Connection closed by peer")
reads()
"""


def written_kit(output: Path) -> Path:
    kit = output / "kit"
    (kit / "home").mkdir(parents=True)
    (output / "logs").mkdir()
    for name, text in container_scripts.scripts().items():
        (kit / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / name).write_bytes(text)
    return kit


HAS_NCCL2 = torch.__version__ >= "2.15"


@loaded_by_torch
@pytest.mark.ci
@pytest.mark.parametrize(("how", "recorder"), [("hangs", "gloo"), ("fails", "nccl2" if HAS_NCCL2 else "gloo")])
def test_a_worker_records_its_collectives_and_its_stack(tmp_path: Path, how: str, recorder: str) -> None:
    kit, program = written_kit(tmp_path), tmp_path / "program.py"
    before, backend = (NCCL2, "stands-in") if recorder == "nccl2" else ("", "gloo")
    program.write_text(PROGRAM.replace("BACKEND", repr(backend)).replace("\ndef reads", f"{before}\ndef reads"))
    worker = subprocess.Popen(
        ["sh", str(kit / "rank.sh"), sys.executable, str(program), how],
        env=os.environ | {"RANK": "0", "LAUNCHER_OUTPUT": str(tmp_path), "LAUNCHER_NODE": "n0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert worker.stdout is not None
    pipe, written = kit / "home" / ".flight_recorder" / "rank-0", tmp_path / "flight_recorder" / "n0"
    groups, deadline = tmp_path / "state" / "n0.groups", time.monotonic() + 200
    if how == "hangs":
        assert worker.stdout.readline() == "ready\n"
        assert list(written.iterdir()) == []
        while "group" not in groups.read_text():  # it is killed without a last look
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pipe.write_text("\n")
        while pipe.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        worker.kill()
        assert "in reads" in (written / "stack_0").read_text()
    out, _ = worker.communicate(timeout=200)
    print(out)
    assert not pipe.exists()
    noted = [line.rpartition(" ") for line in groups.read_text().splitlines()]
    assert [what for what, _, _ in noted] == ["watched 0", "group 0 1"]
    assert all(0 <= time.time() - int(when) < 1000 for _, _, when in noted)
    name = {"gloo": "gloo_0", "nccl2": "nccl_0"}[recorder]
    assert sorted(file.name for file in written.iterdir()) == sorted({"gloo_0", name, "stack_0"})
    entries = pickle.loads((written / name).read_bytes())["entries"]
    assert [(e["profiling_name"], e["input_sizes"], e["collective_seq_id"]) for e in entries] == [
        (f"{recorder}:all_reduce", [[3]], 1)
    ]


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("2.5.1", {"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}),
        ("2.8.0a0+34c6371d24.nv25.8", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}),
        ("2.14.1+cu130", set()),
    ],
)
def test_nccls_recorder_is_turned_on_by_the_names_that_torch_knows(version: str, names: set[str]) -> None:
    recorder = runpy.run_path(str(Path(of_hangs.__file__).with_name("flight_recorder.py")))
    found = recorder["nccl_settings"](version, "/o/nccl_", "/k/nccl-", {})
    always = {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"}
    assert set(found) == names | always | {"TORCH_FR_BUFFER_SIZE"}
    given = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    kept = recorder["nccl_settings"](version, "/o/nccl_", "/k/nccl-", given)
    assert not set(kept) & {*given, "TORCH_FR_BUFFER_SIZE"}


JOIN = "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"
BLIND = "import threading, time; looked = threading.Event()"  # looks once, before the group exists
BLIND += "; time.sleep = lambda _: (looked.set(), threading.Event().wait()); import torch; looked.wait()"
START = f'import subprocess, sys, torch; subprocess.run([sys.executable, "-c", "{JOIN}"], check=True)'


@loaded_by_torch
@pytest.mark.parametrize(
    ("program", "noted"),
    [
        ("import torch", ["watched 3"]),
        ("print('no torch')", []),
        (JOIN, ["watched 3", "group 3 1"]),
        (f"{BLIND}; {JOIN}; d.destroy_process_group()", ["watched 3", "inner 3 0"]),
        (START, ["watched 3", "inner 3 1"]),
        ("import sys, torch; sys.modules['horovod'] = sys", ["watched 3", "inner 3 0"]),
    ],
)
def test_what_a_worker_joins_is_noted(tmp_path: Path, program: str, noted: list[str]) -> None:
    subprocess.run(
        ["sh", str(written_kit(tmp_path) / "rank.sh"), sys.executable, "-c", program],
        env=os.environ | {"RANK": "3", "LAUNCHER_OUTPUT": str(tmp_path), "LAUNCHER_NODE": "n0"},
        check=True,
        timeout=200,
    )
    file = tmp_path / "state" / "n0.groups"
    lines = file.read_text().splitlines() if file.exists() else []
    assert [line.rpartition(" ")[0] for line in lines] == noted
