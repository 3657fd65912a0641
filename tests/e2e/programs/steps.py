"""Simulates a trainer: a collective per step, a checkpoint every few steps, resumes from the last one.

steps.py STEPS INTERVAL SECONDS [TIMEOUT]: runs STEPS steps of SECONDS each, with a checkpoint every INTERVAL steps; a
peer that does not respond for TIMEOUT seconds (60) is an error. HOARD=RANK:STEP: that rank exhausts the memory at that
step, once.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

steps, interval, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[4]) if len(sys.argv) > 4 else 60))
rank = dist.get_rank()
output = Path(os.environ["LAUNCHER_OUTPUT"])
folder = output / "checkpoints"
last = folder / "last.json"
hoarded = output / "hoarded"
start = torch.zeros(1, dtype=torch.int64)
if rank == 0 and last.exists():
    start[0] = json.loads(last.read_text())["step"]
dist.broadcast(start, 0)
print(f"rank {rank} begins after step {start.item()}", flush=True)
for step in range(int(start.item()) + 1, steps + 1):
    if os.environ.get("HOARD") == f"{rank}:{step}" and not hoarded.exists():
        hoarded.touch()
        everything = []
        while True:
            everything.append(b"x" * (8 << 20))
    dist.all_reduce(torch.ones(1))
    time.sleep(seconds)
    if rank == 0:
        print(f"step {step}", flush=True)
        if step % interval == 0:
            folder.mkdir(exist_ok=True)
            last.with_suffix(".part").write_text(json.dumps({"step": step}))
            last.with_suffix(".part").replace(last)
print(f"rank {rank} finished after step {steps}", flush=True)
dist.barrier()
dist.destroy_process_group()
