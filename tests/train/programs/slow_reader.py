"""A rank whose part of a common action takes longer than --timeout, on rank 1."""

import time

import torch.distributed as dist

from train.__main__ import leave
from train.config import Config
from train.distributed.world import start

TIMEOUT = 10.0
world = start(Config(data="", device="cpu", timeout=TIMEOUT))


def read() -> int:
    time.sleep(TIMEOUT + 3 if world.rank else 0)
    return world.rank


print("read", world.all_ranks_or_exit(read), world.gather(world.rank, patient=True), flush=True)
dist.destroy_process_group()
leave(0)
