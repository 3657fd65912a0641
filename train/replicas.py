"""Ranks that write checkpoints, and the checkpoint to load: rank 0's, or with --replicate the newest on any node.

With --replicate, the first worker of each node writes the same checkpoint to its local disk, so that the loss of a node
loses no checkpoint. All copies are bitwise identical: the model is replicated, and rank 0's running statistics are sent
to the others first.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.checkpoint import LAST, PREVIOUS, Loaded, select
from train.config import Config
from train.distributed.world import World
from train.errors import TrainError
from train.host_copy import map_tensors


def reads(config: Config, world: World) -> bool:
    """Whether this rank reads checkpoints."""
    return world.local_rank == 0 if config.replicated else world.first


def writes(config: Config, world: World) -> bool:
    """Whether this rank writes checkpoints: rank 0, or the first worker of each node, one for each shared folder.

    Raises:
        TrainError: the output folder is not writable.
    """
    if not config.replicated or world.size == 1:
        return world.first
    folder = config.checkpoint_folder
    mark = (
        f".{world.broadcast_object(secrets.token_hex(8))}-"  # a name that is not in the cache of a network file system
    )
    own = folder / f"{mark}{world.rank}"
    world.all_ranks_or_exit(lambda: _touch(own) if world.local_rank == 0 else None)
    shared = any((folder / f"{mark}{lower}").exists() for lower in range(world.rank))
    world.sum(torch.zeros(1))  # every rank has checked
    own.unlink(missing_ok=True)
    return world.local_rank == 0 and not shared


def _touch(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise TrainError(f"{file.parent}: cannot be written: {error.strerror}") from error


def load(config: Config, world: World) -> Loaded | None:
    """Load the newest complete checkpoint of all ranks that `reads`, on every rank; None to start from scratch.

    Raises:
        TrainError: see `train.checkpoint.select`; only if no rank has a checkpoint.
        SystemExit: another rank raised TrainError.
    """
    mine: Loaded | None = None
    failure = ""
    if reads(config, world):
        try:
            mine = select(config.resume, config.checkpoint_folder, (LAST, PREVIOUS))
        except TrainError as error:
            failure = str(error)
    if world.size == 1:
        return _or_raise(mine, failure)
    offers: list[Any] = [None] * world.size
    dist.all_gather_object(offers, (mine.age if mine else None, failure, socket.gethostname()))
    ages = {rank: age for rank, (age, _, _) in enumerate(offers) if age is not None}
    if not ages:
        return world.all_ranks_or_exit(lambda: _or_raise(None, failure))
    source = max(ages, key=lambda rank: (ages[rank], -rank))
    found = _broadcast(mine, source, world)
    unusable = [f"{text} (rank {rank} on {host})" for rank, (_, text, host) in enumerate(offers) if text]
    origin = f"rank {source} on {offers[source][2]}" if source else ""
    return replace(found, origin=origin, damaged="; ".join(filter(None, [found.damaged, *unusable])) or None)


def _or_raise(found: Loaded | None, failure: str) -> Loaded | None:
    if failure:
        raise TrainError(failure)
    return found


@dataclass(frozen=True)
class _Hole:
    """A placeholder for a tensor in a state whose tensors are broadcast separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _broadcast(loaded: Loaded | None, source: int, world: World) -> Loaded:
    """Return the checkpoint of rank `source` on every rank, so that only its machine needs the file."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> _Hole:
        tensors.append(tensor.contiguous())
        return _Hole(tuple(tensor.shape), tensor.dtype)

    skeleton = None
    if world.rank == source and loaded:
        skeleton = replace(loaded, state=map_tensors(loaded.state, take))
    skeleton = world.broadcast_object(skeleton, source)
    assert skeleton is not None  # the source has one

    def fill(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(fill(item) for item in value)
        if not isinstance(value, _Hole):
            return value
        tensor = tensors.pop(0) if world.rank == source else torch.empty(value.shape, dtype=value.dtype)
        dist.broadcast(tensor, source)
        return tensor

    return replace(skeleton, state=fill(skeleton.state))
