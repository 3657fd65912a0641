"""ddp_steps.py BYTES STEPS: train with DistributedDataParallel over gloo, with so many bytes of gradients.

Rank 0 prints a line `seconds-of-a-step FASTEST`. Alone it trains without DistributedDataParallel.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

WIDTH = 512  # of a layer, which has 1 MiB of gradients

size, steps = int(sys.argv[1]), int(sys.argv[2])
layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(size // (4 * WIDTH * WIDTH), 1))]
model: torch.nn.Module = torch.nn.Sequential(*layers)
dist.init_process_group("gloo")
if int(os.environ["WORLD_SIZE"]) > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
inputs = torch.randn(8, WIDTH)
seconds = []
for _ in range(steps + 2):  # the first one builds the buckets anew
    dist.barrier()
    began = time.perf_counter()
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - began)
if dist.get_rank() == 0:
    print(f"seconds-of-a-step {min(seconds[2:])}", flush=True)
dist.barrier()
dist.destroy_process_group()
