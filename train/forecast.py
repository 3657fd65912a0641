"""The disk space for the checkpoints of a run, told before the first step."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from train.config import Config
from train.distributed.world import World
from train.files import amount
from train.optim import present_state_size, state_size
from train.own import is_own
from train.step import Step


def forecast(config: Config, world: World, model: nn.Module, step: Step, epochs: int) -> str:
    """Return the line to print; every rank must call it. `epochs`: those that are left.

    The size is that of the state after the first update; what a user's optimiser has then is not known before it.
    """
    weights = _size(model.state_dict(keep_vars=True).values())
    size = present_state_size if is_own(config.optimizer) else state_size
    optimizer = torch.tensor(size(step.optimizer))
    if not world.sharded:  # each rank has the state of its stage
        world.sum(optimizer)
    averages = _size(step.ema.averages.values()) if step.ema else 0
    whole = weights + int(optimizer) + averages + _size(step.masters or ()) + step.bytes_besides

    count = files(config, epochs)
    names = ["last", "previous", *([] if step.sharded else ["best"])]
    if config.mirror:
        names.append("one that is uploaded")
    if config.keep:
        names.append("1 epoch" if config.keep == 1 else f"{config.keep} epochs")
    names.append("the next while it is written")
    text = f"about {count} x {amount(whole)} ({', '.join(names)})"
    needed = count * whole
    if step.sharded:
        text += f" and {amount(weights + averages)} (best)"
        needed += 2 * (weights + averages)  # it is also written beside the old
    folder = config.checkpoint_folder.absolute()
    try:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        missing = needed - _taken(folder) > free
    except OSError:  # the first checkpoint will say why
        return f"train: checkpoints of this run: {text}"
    warning = "warning: " if missing else ""
    return f"train: {warning}checkpoints of this run: {text}; {folder} has {amount(free)} free"


def files(config: Config, epochs: int) -> int:
    """Return the largest number of checkpoints on the disk at a time, each counted once under all its names.

    The last, the previous and the best one may be different files. If one is saved only at the end of an epoch, the
    last two are also epochs that --keep keeps.
    """
    within = bool(config.checkpoint_every)
    most = (2 + config.keep if within else max(2, config.keep)) + (not config.shards_weights) + 1
    most += bool(config.mirror)
    return most if within else min(most, epochs + 1)  # a run that is stopped saves once more


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _taken(folder: Path) -> int:
    """Return the bytes of the checkpoints of an earlier attempt, which will be replaced."""
    found = [path.stat() for path in (*folder.glob("*.pt"), *folder.glob("*.sharded/*"))]
    return sum({(each.st_dev, each.st_ino): each.st_size for each in found}.values())
