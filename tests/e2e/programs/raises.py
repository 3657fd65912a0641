"""Rank 1 raises an exception; the others wait for it in a collective, as in real programs."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} is here", flush=True)
dist.barrier()
if dist.get_rank() == 1:
    images = {"cat": 1}
    print(images["dog"])
dist.all_reduce(torch.ones(1))
