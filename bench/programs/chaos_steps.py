"""chaos_steps.py SECONDS INTERVAL TIMEOUT FOLDER: steps of SECONDS each, with a collective, until it is stopped.

The first worker of each node writes a checkpoint to FOLDER every INTERVAL steps. At the start, all ranks resume from
the newest checkpoint of any rank: generations are compared first, then steps. Rank 0 appends a line `<step> <epoch
seconds>` to FOLDER/steps.txt at each step. Runs under the launcher, with min_nodes, and under torchrun.
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

seconds, interval, folder = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4])
generation = int(
    os.environ.get("LAUNCHER_GENERATION", "0")
)  # torchrun has no generations and cannot detect outdated checkpoints
file = folder / "checkpoint.json"
folder.mkdir(parents=True, exist_ok=True)
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[3])))


def save(step: int) -> None:
    if os.environ["LOCAL_RANK"] == "0":
        file.with_suffix(".part").write_text(json.dumps([generation, step]))
        file.with_suffix(".part").replace(file)


found: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(found, json.loads(file.read_text()) if file.exists() else [0, 0])
step = int(max(found)[1])
save(step)
dist.barrier()
while True:
    step += 1
    dist.all_reduce(torch.ones(1))
    time.sleep(seconds)
    if dist.get_rank() == 0:
        with (folder / "steps.txt").open("a") as steps:
            steps.write(f"{step} {time.time():.3f}\n")
    if step % interval == 0:
        save(step)
