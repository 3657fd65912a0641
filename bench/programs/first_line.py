"""The smallest distributed program: it prints its first line when all ranks have joined."""

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print(f"joined: {dist.get_world_size()} ranks", flush=True)
dist.barrier()
dist.destroy_process_group()
