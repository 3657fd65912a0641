"""A user program for a job with min_nodes: `run.script`, or `run.command` with one process per node.

elastic.py STEPS INTERVAL SECONDS: STEPS steps of SECONDS each on a batch of 12 samples, a checkpoint every INTERVAL
steps. Requirements: each node stores the checkpoint, because the disk of any other node may be
lost; all nodes agree on the newest one, comparing generations first, then steps; and each generation starts by writing
a checkpoint. The batch is that of the job, for any number of ranks. LINGER: seconds for which rank 0 is busy after the
others have finished.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BATCH = 12
steps, interval, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
generation = int(os.environ["LAUNCHER_GENERATION"])
file = Path(os.environ["LAUNCHER_OUTPUT"], "checkpoints", f"{os.environ['LAUNCHER_NODE']}.json")
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
rank, world = dist.get_rank(), dist.get_world_size()


def save(step: int, value: float) -> None:
    if os.environ["LOCAL_RANK"] == "0":
        file.parent.mkdir(exist_ok=True)
        file.with_suffix(".part").write_text(json.dumps([generation, step, value]))
        file.with_suffix(".part").replace(file)


found: list[Any] = [None] * world
dist.all_gather_object(found, json.loads(file.read_text()) if file.exists() else [0, 0, 0.0])
_, start, value = max(found)
save(start, value)
dist.barrier()  # on all disks before the first step
print(f"rank {rank} begins after step {start}", flush=True)
for step in range(start + 1, steps + 1):
    mine = torch.arange(BATCH, dtype=torch.float64)[rank::world] * step
    total = mine.sum()
    dist.all_reduce(total)
    value += float(total)
    time.sleep(seconds)
    if rank == 0:
        print(f"step {step}", flush=True)
    if step % interval == 0:
        save(step, value)
print(f"rank {rank} finished with {value:g}", flush=True)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    time.sleep(float(os.environ.get("LINGER", "0")))
