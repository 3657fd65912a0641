"""How fast the job's nodes are together: latency and all-reduce between them, in the job's own image."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import LauncherError
from launcher.job.models import Job
from launcher.model.progress import Log
from launcher.node.connect import Fleet
from launcher.planning.checks import Check, Level
from launcher.records.paths import NodePaths
from launcher.records.snapshot import snapshot
from launcher.run.exec_shell import temporary_run
from launcher.run.gpus import job_facts

TIMEOUT = 180
_MARK = "launcher-measured "
# One process a node. Bus bandwidth as nccl-tests count it: bytes / time * 2 (n - 1) / n.
_PROGRAM = f"""
import json, os, time
from datetime import timedelta
import torch, torch.distributed as dist
gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=60))
device = "cuda:0" if gpu else "cpu"
n = dist.get_world_size()
def best(size, times):
    data, seconds = torch.ones(size, device=device), []
    for _ in range(times):
        dist.barrier()
        if gpu: torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(data)
        if gpu: torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        data.fill_(1.0)
    return min(seconds)
best(1024, 3)
latency, size = best(1, 20), (64 if gpu else 4) << 20
seconds = best(size, 5)
if dist.get_rank() == 0:
    print({_MARK!r} + json.dumps({{"backend": dist.get_backend(), "latency": latency, "bytes": 4 * size,
          "bus": 4 * size / seconds * 2 * (n - 1) / n}}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def measure(job: Job, fleet: Fleet, log: Log) -> Iterator[Check]:
    """Run it once. Nothing of it is left on the nodes."""
    if len(job.machines) < 2:
        return
    alone = job.model_copy(update={"nodes": job.machines, "timeout": TIMEOUT, "secrets": (), "processes": 1})
    program = ("python3", "-c", _PROGRAM)
    with tempfile.TemporaryDirectory() as folder:
        empty = snapshot(Path(folder))  # the program is in the command
    try:
        with temporary_run("measure", alone, program, fleet, job_facts(alone, fleet), empty, {}, log) as plan:
            names = {node.node: node.container.name for node in plan.nodes}
            ends = fleet.each(lambda engine: engine.wait(names[engine.node], TIMEOUT))
            path = NodePaths(plan.master.container.output_dir, plan.master.node).log
            text = fleet.engines[0].files.read(path).decode(errors="replace")
    except (LauncherError, FileNotFoundError) as error:
        yield Check("all", "all-reduce", Level.WARN, f"could not be measured: {error}", "does the image have torch?")
        return
    found = [json.loads(line.removeprefix(_MARK)) for line in text.splitlines() if line.startswith(_MARK)]
    if not found or any(end.exit_code for end in ends):
        words = text.strip().splitlines()[-1:] or ["it printed nothing"]
        yield Check("all", "all-reduce", Level.FAIL, f"failed: {words[0]}", "the nodes cannot train together like this")
        return
    seen = found[-1]
    yield Check("all", "latency", Level.OK, f"{seen['latency'] * 1e6:.0f} us for the smallest all-reduce")
    bandwidth = f"{seen['bus'] / 1e9:.3f} GB/s bus bandwidth, {seen['bytes'] >> 20} MiB over {seen['backend']}"
    yield Check("all", "all-reduce", Level.OK, bandwidth)
