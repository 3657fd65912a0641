"""The smallest distributed program: its first line comes when all ranks have met."""

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print(f"met: {dist.get_world_size()} ranks", flush=True)
dist.barrier()
dist.destroy_process_group()
