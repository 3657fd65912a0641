"""Storage of a run's checkpoints: which ranks write and read them. Sharded ones are in `train.distributed.shards`.

Rank 0 writes, and all ranks get what it reads. With --replicate, the first worker of each node writes the same
checkpoint to its local disk, so that the loss of a node loses no checkpoint, and the newest one of all nodes is loaded.
All copies are bitwise identical: the model is replicated, and rank 0's running statistics are sent to the others first.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from train.checkpoint import (
    BEST,
    LAST,
    PREVIOUS,
    Loaded,
    Saver,
    State,
    check_replaceable,
    map_tensors,
    names_before,
    read,
    select,
    take_best,
)
from train.config import Config
from train.distributed.world import World
from train.errors import TrainError
from train.mirror import RESUMED, Mirror, Place, download, download_best, find, is_url, new_name


class Store(Protocol):
    """Every rank must call the same methods in the same order."""

    def find(self) -> Loaded | None:
        """Return the checkpoint that --resume selects, on every rank; None to start from scratch.

        Raises:
            TrainError: no checkpoint is usable, or one would be overwritten.
            SystemExit: another rank raised TrainError.
        """

    def earlier(self, found: Loaded, problem: str) -> Loaded:
        """Return the checkpoint before `found`, which is not usable.

        Raises:
            TrainError: there is none, or --resume has named this one.
            SystemExit: another rank raised TrainError.
        """

    def open(self) -> None:
        """Must be called before the first `save`. Raises TrainError if the folder is not writable."""

    def take_best(self, found: Loaded, best: float) -> bool:
        """Return whether the folder has best.pt of the checkpoint that was resumed, taken along from where that was.

        `best`: its score. Call after `open`.
        """

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

    def end_mirror(self) -> None:
        """Wait until the last checkpoint is in the store of --mirror; the run has ended, and `close` was called."""


class Files:
    """Checkpoints in single files."""

    def __init__(self, config: Config, world: World, say: Callable[[str], None] = print) -> None:
        self._config, self._world, self._say = config, world, say
        self._saver: Saver | None = None  # None if other ranks write
        self._mirror: Mirror | None = None  # on rank 0
        self._fresh = True  # nothing was resumed

    def find(self) -> Loaded | None:
        def check_folder() -> None:
            folder = self._config.checkpoint_folder
            if (sharded := folder / "last.sharded").exists():
                best = folder / "best.pt"
                anew = (
                    f"; or begin anew from its weights: another --output, --pretrained {best}" if best.exists() else ""
                )
                raise TrainError(f"{sharded} was saved with --parallel fsdp or hsdp: use the same{anew}")
            check_replaceable(folder)

        reads = self._world.first or (self._config.replicated and self._world.local_rank == 0)
        self._world.all_ranks_or_exit(lambda: check_folder() if reads else None)
        found = self._load(reads)
        self._fresh = found is None
        return found

    def earlier(self, found: Loaded, problem: str) -> Loaded:
        names = names_before(found, self._config.resume, (LAST, PREVIOUS))
        reads = bool(names) and (self._world.first or (self._config.replicated and self._world.local_rank == 0))
        before = self._load(reads, names)
        return self._world.all_ranks_or_exit(lambda: instead_of(found, problem, before))

    def open(self) -> None:
        if self._writes():
            self._saver = Saver(
                self._config.checkpoint_folder, self._config.keep, self._world.device, written=self._written
            )
        if self._config.mirror:
            self._world.all_ranks_or_exit(self._open_mirror)

    def take_best(self, found: Loaded, best: float) -> bool:
        folder = self._config.checkpoint_folder
        here = self._saver is not None and best_here(found, folder, best)
        return any(self._world.gather(here, patient=True))  # with --replicate a node that joins has none

    def _open_mirror(self) -> None:
        if self._world.first:
            self._mirror = Mirror(self._config.mirror, self._config.checkpoint_folder, True, self._say)
            self._mirror.begin(self._fresh)

    def _written(self, path: Path, state: State) -> None:
        if self._mirror:
            self._mirror.offer([path], state, new_name(state), self._mirror.busy, path.with_name(BEST))

    def save(self, state: Callable[[], State], best: bool = False, epoch: int | None = None) -> None:
        if self._saver:
            self._saver.save(state(), best, epoch)

    def wait(self) -> None:
        if self._saver:
            self._saver.wait()

    def close(self) -> None:
        if self._saver:
            self._saver.close()

    def end_mirror(self) -> None:
        if self._mirror:
            self._mirror.end()

    def _load(self, reads: bool, names: tuple[str, ...] = ()) -> Loaded | None:
        """Load the newest complete checkpoint of all ranks that read, on every rank; None to start from scratch.

        `names`: if given, only these files of the run's own folder.

        Raises:
            TrainError: see `train.checkpoint.select`; only if no rank has a checkpoint.
            SystemExit: another rank raised TrainError.
        """
        world, failure = self._world, ""
        mine: Loaded | None = None
        if reads:
            try:
                mine = select("auto", self._config.checkpoint_folder, names) if names else self._select()
            except TrainError as error:
                failure = str(error)
        if world.size == 1:
            return _or_raise(mine, failure)
        # a rank may download or read for a long time
        offers = world.gather((mine.age if mine else None, failure, socket.gethostname()), patient=True)
        ages = {rank: age for rank, (age, _, _) in enumerate(offers) if age is not None}
        if not ages:
            return world.all_ranks_or_exit(lambda: _or_raise(None, failure))
        source = max(ages, key=lambda rank: (ages[rank], -rank))
        found = _broadcast(mine, source, world)
        unusable = [f"{text} (rank {rank} on {host})" for rank, (_, text, host) in enumerate(offers) if text]
        origin = f"rank {source} on {offers[source][2]}" if source else found.origin
        return replace(found, origin=origin, damaged="; ".join(filter(None, [found.damaged, *unusable])) or None)

    def _select(self) -> Loaded | None:
        config = self._config
        if not is_url(config.resume):
            return select(config.resume, config.checkpoint_folder, (LAST, PREVIOUS))
        own = select("auto", config.checkpoint_folder, (LAST, PREVIOUS))
        if not self._world.first:
            return own
        try:
            entry = find(place := Place(config.resume), LAST)
            if own and own.age >= Loaded(entry.about, Path()).age:
                return own
            folder = config.checkpoint_folder / RESUMED
            try:
                download(place, entry, [LAST], folder)
                return Loaded(read(folder / LAST), Path(LAST), origin=f"{place.url}/{entry.name}")
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except TrainError as error:
            if own:
                return replace(own, damaged=str(error))
            raise

    def _writes(self) -> bool:
        """Whether this rank writes checkpoints: rank 0, or the first worker of each node, one for each shared folder.

        Raises:
            TrainError: the output folder is not writable.
        """
        config, world = self._config, self._world
        if not config.replicated or world.size == 1:
            return world.first
        folder = config.checkpoint_folder
        # a name that is not in the cache of a network file system
        mark = f".{world.broadcast_object(secrets.token_hex(8))}-"
        own = folder / f"{mark}{world.rank}"
        world.all_ranks_or_exit(lambda: _touch(own) if world.local_rank == 0 else None)
        shared = any((folder / f"{mark}{lower}").exists() for lower in range(world.rank))
        world.sum(torch.zeros(1))  # every rank has checked
        own.unlink(missing_ok=True)
        return world.local_rank == 0 and not shared


def best_here(found: Loaded, folder: Path, best: float) -> bool:
    """Return whether best.pt of a resumed checkpoint is in the folder; take it along from another one, or a store."""
    url, _, name = found.origin.rpartition("/")
    try:
        if best < 0 or not is_url(found.origin):
            return best < 0 or take_best(found.path, folder, best)
        return download_best(Place(url), name, folder)
    except (TrainError, OSError):  # there will be another; if the folder cannot be written, saving says so
        return False


def _touch(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise TrainError(f"{file.parent}: cannot be written: {error.strerror}") from error


def instead_of(found: Loaded, problem: str, earlier: Loaded | None) -> Loaded:
    """Return the checkpoint that replaces an unusable one. Raises TrainError if there is none."""
    said = f"{found.path}: {problem}"
    if earlier is None:
        raise TrainError(f"{said}; --resume an earlier checkpoint, or go on with --allow-nan")
    return replace(earlier, damaged="; ".join(filter(None, [found.damaged, said, earlier.damaged])))


def _or_raise(found: Loaded | None, failure: str) -> Loaded | None:
    if failure:
        raise TrainError(failure)
    return found


def _broadcast(loaded: Loaded | None, source: int, world: World) -> Loaded:
    """Return the checkpoint of rank `source` on every rank, so that only its machine needs the file."""
    mine = loaded if world.rank == source else None
    outline = mine and replace(mine, state=map_tensors(mine.state, lambda tensor: tensor.to("meta")))
    outline = world.broadcast_object(outline, source)
    assert outline is not None  # the source has one
    found = mine or outline

    def share(tensor: Tensor) -> Tensor:
        here = tensor.contiguous() if mine else torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.broadcast(here, source)
        return here

    return replace(found, state=map_tensors(found.state, share))
