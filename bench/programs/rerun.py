"""A program that somebody edits: each rank notes when its first line runs, rank 0 prints it after a step of all."""

import sys
import time

EDIT = 0
began = time.time()

import torch  # noqa: E402 - a program's first line stands above its imports
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
call = torch.compile(model) if "--compile" in sys.argv else model
call(torch.randn(32, 64)).square().mean().backward()
for weight in model.parameters():
    dist.all_reduce(weight.grad)
latest = torch.tensor([began], dtype=torch.float64)
dist.all_reduce(latest, op=dist.ReduceOp.MAX)
if dist.get_rank() == 0:
    print(f"edit {EDIT}: the last rank began at {latest.item()}, first step done", flush=True)
dist.barrier()
dist.destroy_process_group()
