"""Where a run keeps its checkpoints: one interface, over whole files, or over parts (`train.sharded`).

Of whole files rank 0 writes and reads them, or with --replicate a rank of every node (`train.replicas`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from train import replicas
from train.checkpoint import Loaded, Saver, State
from train.config import Config
from train.errors import TrainError
from train.parallel.world import World


class Store(Protocol):
    """Every rank calls the same methods in the same order."""

    def find(self) -> Loaded | None:
        """The checkpoint that --resume selects, on every rank; None to start from scratch.

        Raises:
            TrainError: none is usable, or one would be overwritten.
            SystemExit: another rank raised it.
        """

    def open(self) -> None:
        """To be called before the first `save`. Raises TrainError: the folder cannot be written."""

    def save(self, state: Callable[[], State], best: bool = False, epoch: int | None = None) -> None:
        """Starts writing the last checkpoint, the best one if `best`, and the epoch's if --keep.

        Returns when `state` is copied. Its content may change then; the files are written in the background.

        Raises:
            OSError: the previous checkpoint could not be written.
        """

    def wait(self) -> None:
        """Waits until everything is on disk. Raises OSError: it could not be written."""

    def close(self) -> None:
        """Waits, and ends the thread."""


class WholeFiles:
    """A checkpoint is one file."""

    def __init__(self, config: Config, world: World) -> None:
        self._config, self._world = config, world
        self._saver: Saver | None = None  # None where others write

    def find(self) -> Loaded | None:
        def check_undivided() -> None:
            if (divided := self._config.checkpoint_folder / "last.sharded").exists():
                raise TrainError(f"{divided} was made with --parallel fsdp; use it again, or another --output")

        reads = replicas.reads(self._config, self._world)
        self._world.all_ranks_or_exit(lambda: check_undivided() if reads else None)
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
    """`sharded`: every rank has only a part of the state."""
    if sharded:
        from train.sharded import Shards  # imports torch.distributed.checkpoint, which takes a second

        return Shards(config, world)
    return WholeFiles(config, world)
