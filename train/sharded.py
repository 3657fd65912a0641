"""Sharded checkpoints of --parallel fsdp: every rank writes its part, and any number of ranks reads them.

A checkpoint is a folder in the format of torch.distributed.checkpoint, with run.pt beside the parts: what else a
checkpoint has, and the SHA-256 of every part. It is written under a temporary name and renamed, so it is either
complete or absent. All ranks must see the same folder.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from train.checkpoint import Loaded, State, digest, read
from train.errors import TrainError
from train.parallel.world import World

LAST, PREVIOUS, RUN = "last.sharded", "previous.sharded", "run.pt"
PARTS = ("model", "optimizer")  # of a checkpoint's state: what is divided over the ranks


def check_shared(folder: Path, world: World) -> None:
    """Raises TrainError, on all ranks, if this rank sees another folder than rank 0."""
    mark = folder / f".shared-{world.broadcast_object(uuid.uuid4().hex)}"
    if world.first:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.sum(torch.zeros(1))
    seen = mark.exists()
    world.sum(torch.zeros(1))
    if world.first:
        mark.unlink()
    if not seen:
        raise TrainError(
            f"--parallel fsdp: {folder} is not rank 0's; a sharded checkpoint needs a folder that all machines share: "
            f"mount one, and name it with --checkpoints"
        )


class ShardedSaver:
    """Writes checkpoints; every rank calls the same methods in the same order. Training waits."""

    def __init__(self, folder: Path, keep: int, world: World, model: nn.Module) -> None:
        self._folder, self._keep, self._world, self._model = folder, keep, world, model

    def save(self, state: State, best: bool = False, epoch: int | None = None) -> None:
        """Writes last.sharded (the old one becomes previous.sharded), the epoch's folder if `keep`, best.pt if `best`.

        best.pt is one file with the weights, without the optimiser's state.
        """
        fresh = self._folder / f"{LAST}.tmp"
        if self._world.first:
            shutil.rmtree(fresh, ignore_errors=True)
        self._world.sum(torch.zeros(1))
        save({name: state[name] for name in PARTS}, checkpoint_id=fresh)
        sums = _sums(fresh, [path.name for path in fresh.glob(f"__{self._world.rank}_*.distcp")], self._world)
        whole = {}
        if best:
            whole = get_model_state_dict(self._model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self._world.first:
            rest = {name: value for name, value in state.items() if name not in PARTS}
            _write(fresh / RUN, rest | {"parts": sums})
            if best:
                _write(self._folder / "best.pt", rest | {"model": whole})
            if self._keep and epoch is not None:
                kept = self._folder / f"epoch-{epoch:04d}.sharded"
                shutil.rmtree(kept, ignore_errors=True)  # of the epoch's first attempt
                shutil.copytree(fresh, kept, copy_function=os.link)
                for old in sorted(self._folder.glob("epoch-*.sharded"))[: -self._keep]:
                    shutil.rmtree(old)
            last, previous = self._folder / LAST, self._folder / PREVIOUS
            if last.exists():
                shutil.rmtree(previous, ignore_errors=True)
                last.rename(previous)
            fresh.rename(last)
        self._world.sum(torch.zeros(1))

    def wait(self) -> None:
        """Nothing is written in the background."""

    def close(self) -> None:
        """Nothing is open."""


def _write(path: Path, state: State) -> None:
    """As `Saver` writes a file: under a temporary name, synchronised, with its digest."""
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("wb") as file:
        torch.save({**state, "sha256": digest(state)}, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _sums(folder: Path, mine: list[str], world: World) -> dict[str, str]:
    """File -> SHA-256, over all ranks; this rank reads `mine`."""
    sums = {}
    for name in mine:
        with (folder / name).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            sums[name] = hashlib.sha256(content).hexdigest()
    every: list[dict[str, str]] = [{}] * world.size
    dist.all_gather_object(every, sums)
    return {name: value for part in every for name, value in part.items()}


def find(resume: str, folder: Path, world: World) -> Loaded | None:
    """The checkpoint that `--resume` selects, its parts verified but not yet read; None to start from scratch.

    Raises:
        TrainError: as `checkpoint.find`, or the folder has checkpoints in one file.
    """
    candidates = [path for name in (LAST, PREVIOUS) if (path := folder / name).exists()]
    if resume == "none":
        if candidates:
            raise TrainError(f"--resume none: {candidates[0]} would be overwritten; use other --checkpoints")
        return None
    if (folder / "last.pt").exists():
        raise TrainError(f"{folder / 'last.pt'} was made without --parallel fsdp; use another --output")
    if resume != "auto":
        candidates = [path if (path := Path(resume)).suffix == ".sharded" else path / LAST]
    failures: list[str] = []
    for path in candidates:
        try:
            state = _verified(path, world) | {"optimizer": {"shards": str(path)}}
            return Loaded(state, path, failures[0] if failures else None)
        except TrainError as error:
            failures.append(str(error))
    if failures:
        raise TrainError(f"no usable checkpoint: {'; '.join(failures)}; start over with another --output")
    return None


def _verified(path: Path, world: World) -> State:
    state, problem = world.broadcast_object(_read(path) if world.first else ({}, ""))
    if problem:
        raise TrainError(problem)
    there = state.pop("parts")
    here = _sums(path, sorted(there)[world.rank :: world.size], world)
    if damaged := [name for name in there if there[name] != here[name]]:
        raise TrainError(f"{path / damaged[0]}: damaged (its content does not match its SHA-256)")
    return state


def _read(path: Path) -> tuple[State, str]:
    """run.pt's content and "", or why the checkpoint is not usable."""
    try:
        state = read(path / RUN)
    except TrainError as error:
        return {}, str(error)
    missing = [name for name in state["parts"] if not (path / name).is_file() or not (path / name).stat().st_size]
    return state, f"{path / missing[0]}: missing or empty" if missing else ""
