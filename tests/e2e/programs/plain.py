"""A program that uses only torch.distributed and nothing of the launcher."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(f"rank {rank} of {world}: sum {total.item():.0f}, cwd {Path.cwd()}, uid {os.getuid()}", flush=True)
dist.destroy_process_group()
