"""desync.py HOW STEPS SECONDS: after STEPS steps, each with an all_reduce and a broadcast, rank 1 deviates.

HOW: skip, it skips the all_reduce, and a rank that waits in vain fails like the trainer; shape, its all_reduce has
another size; stuck, it calls no more collectives. Collectives time out after SECONDS.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from train.distributed.world import World, report_lost_peers
from train.errors import TrainError


def waits_forever() -> None:
    while True:
        time.sleep(1)


def train() -> None:
    for step in range(steps + 1):
        odd = step == steps and world.rank == 1
        if odd and how == "stuck":
            waits_forever()
        if not (odd and how == "skip"):
            dist.all_reduce(torch.ones(7 if odd and how == "shape" else 6), group=group)
        dist.broadcast(torch.ones(2), 0, group=group)
        if step % 10 == 0 and world.first:
            print(f"step {step}", flush=True)


how, steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
group = dist.new_group(timeout=timedelta(seconds=seconds))
dist.barrier()  # all ranks have started: no collective below waits for a starting one
world = World(dist.get_rank(), dist.get_world_size(), 0, 1, torch.device("cpu"), "gloo")
if how == "skip":
    try:
        with report_lost_peers(world):
            train()
    except TrainError as error:
        print(f"error: {error}", flush=True)
        os._exit(2)
train()
