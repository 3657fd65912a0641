"""Storage of a run's checkpoints, as single files or sharded (`train.sharded`).

Single files are written and read by rank 0, or with --replicate by one rank of every node (`train.replicas`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from train import replicas
from train.checkpoint import Loaded, Saver, State, check_replaceable
from train.config import Config
from train.distributed.world import World
from train.errors import TrainError


class Store(Protocol):
    """Every rank must call the same methods in the same order."""

    def find(self) -> Loaded | None:
        """Return the checkpoint that --resume selects, on every rank; None to start from scratch.

        Raises:
            TrainError: no checkpoint is usable, or one would be overwritten.
            SystemExit: another rank raised TrainError.
        """

    def open(self) -> None:
        """Must be called before the first `save`. Raises TrainError if the folder is not writable."""

    def save(self, state: Callable[[], State], best: bool = False, epoch: int | None = None) -> None:
        """Start writing the last checkpoint, the best one if `best`, and the epoch's if --keep.

        Returns once `state` is copied and may change; the files are written in the background.

        Raises:
            OSError: the previous checkpoint could not be written.
        """

    def wait(self) -> None:
        """Wait until the checkpoint is on disk. Raises OSError if it could not be written."""

    def close(self) -> None:
        """Wait for the last save and stop the thread."""


class SingleFiles:
    """Checkpoints in single files."""

    def __init__(self, config: Config, world: World) -> None:
        self._config, self._world = config, world
        self._saver: Saver | None = None  # None if other ranks write

    def find(self) -> Loaded | None:
        def check_folder() -> None:
            folder = self._config.checkpoint_folder
            if (sharded := folder / "last.sharded").exists():
                raise TrainError(f"{sharded} was saved with --parallel fsdp; use it again, or another --output")
            check_replaceable(folder)

        reads = replicas.reads(self._config, self._world)
        self._world.all_ranks_or_exit(lambda: check_folder() if reads else None)
        return replicas.load(self._config, self._world)

    def open(self) -> None:
        if replicas.writes(self._config, self._world):
            self._saver = Saver(self._config.checkpoint_folder, self._config.keep, self._world.device)

    def save(self, state: Callable[[], State], best: bool = False, epoch: int | None = None) -> None:
        if self._saver:
            self._saver.save(state(), best, epoch)

    def wait(self) -> None:
        if self._saver:
            self._saver.wait()

    def close(self) -> None:
        if self._saver:
            self._saver.close()


def make_store(config: Config, world: World, sharded: bool) -> Store:
    """Return the store. `sharded`: every rank has only a shard of the state."""
    if sharded:
        from train.sharded import Shards  # imports torch.distributed.checkpoint, which takes a second

        return Shards(config, world)
    return SingleFiles(config, world)
