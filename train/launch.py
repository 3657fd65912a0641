"""The life of one training process: it joins the process group, handles SIGTERM, trains and leaves the group."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist

from train.config import Config
from train.parallel.peers import name_lost_peers
from train.parallel.world import StopSignal, start


def run(config: Config) -> None:
    """Joins the group, prints the first line, trains.

    Raises:
        TrainError, Stopped: as `train.loop.train`.
    """
    if config.parallel == "dual_batch":
        from train.dual_batch.run import run as run_dual_batch

        run_dual_batch(config)
        return
    world = start(config)
    stop = StopSignal(world)
    before = signal.signal(signal.SIGTERM, lambda *_: stop.ask())
    if world.first:  # before the slow imports below: tells the user that all ranks have joined
        print(
            f"train: {world.size} process{'es' * (world.size > 1)}, {world.device.type}, backend {world.backend}, "
            f"torch {torch.__version__}",
            flush=True,
        )
    from train.loop import train

    try:
        with name_lost_peers(world):
            train(config, world, stop)
    finally:
        signal.signal(signal.SIGTERM, before)
        if dist.is_initialized():
            dist.destroy_process_group()
