"""Before the first step: all ranks have the same data and weights. Every node reads its own copy."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from train import loaded_code
from train.checkpoint import digest
from train.config import Config
from train.data.contents import Contents
from train.distributed.world import World
from train.errors import TrainError
from train.own import is_own

T = TypeVar("T")
# Options that may differ between machines
OF_A_NODE = {
    *("data", "pretrained", "evaluate", "output", "checkpoints"),  # paths, whose contents are compared
    *("workers", "prefetch", "decoder", "max_damaged", "threads", "bind_cores"),
}
BATCH = {"batch_size", "accumulate", "val_batch_size"}


def agree(config: Config, contents: Contents, weights: str, model: nn.Module, decoder: str, world: World) -> str | None:
    """Compare images, layers, code and, if `weights` is a file, loaded weights; return a warning about software.

    Raises:
        TrainError: this rank differs from rank 0.
        SystemExit: another rank differs.
    """
    agree_on_data(config.data, contents, world)
    agree_on_layers(config.arch, model, world)
    agree_on_code(world)
    if weights:
        agree_on_weights(weights, model, world)
    return mixed_software(decoder, world)


def agree_on_options(config: Config, world: World) -> None:
    """Raise TrainError on a rank with options that differ from rank 0's, SystemExit on the others.

    A node may have arguments of its own, for what may differ between machines (OF_A_NODE), and for the batch size where
    each rank reads its own samples.
    """
    options = shared_options(config, world.sharded)
    if world.size == 1 or len(set(world.gather(digest(options)))) == 1:
        return
    theirs, host = world.broadcast_object((options, socket.gethostname()))
    world.all_ranks_or_exit(lambda: check_options(options, theirs, host))


def shared_options(config: Config, sharded: bool) -> dict[str, Any]:
    """Return the options that must be the same on every rank. `sharded`: each rank reads its own samples."""
    own = OF_A_NODE | BATCH if sharded else OF_A_NODE
    same = {name: value for name, value in config.to_dict().items() if name not in own}
    # what these files contain is compared, together, by the ranks that have one: so all or none
    return same | {name: "set" if getattr(config, name) else "not set" for name in ("pretrained", "evaluate")}


def check_options(mine: dict[str, Any], theirs: dict[str, Any], host: str) -> None:
    """Raise TrainError if the options differ from rank 0's, on `host`."""
    for name, value in mine.items():
        if theirs[name] != value:
            option = "--" + name.replace("_", "-")
            raise TrainError(f"{option} is {value} here, but {theirs[name]} on rank 0 ({host}): it must be the same")


def agree_on_data(data: str, contents: Contents, world: World) -> None:
    """Raise TrainError on a rank with a data set that differs from rank 0's, SystemExit on the others."""
    if world.size == 1:
        return
    digests = world.gather(contents.digest(*contents.splits))
    if not all(mine.same(other) for mine in digests for other in (digests[0], digests[-1])):
        fix = "no randomness in it, and the same packages" if is_own(data) else "copy it from there"
        _refuse(f"--data {data}", contents, lambda mine, theirs: mine.difference(theirs), world, fix)


def agree_on_layers(arch: str, model: nn.Module, world: World) -> None:
    """Raise TrainError on a rank whose model has other layers than rank 0's, SystemExit on the others."""
    outline = {
        name: f"{'x'.join(map(str, value.shape)) or 'a number'} {value.dtype}"
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    if world.size > 1 and len(set(world.gather(digest(outline)))) > 1:
        _refuse(f"--arch {arch}", outline, _layer, world, "install the same packages and code on all machines")


def _layer(mine: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return the first weight or buffer in which a model differs from rank 0's."""
    for name in dict.fromkeys((*theirs, *mine)):
        here, there = mine.get(name, "none"), theirs.get(name, "none")
        if here != there:
            return f"{name}: {here} here, {there} there"
    return None  # another order


def agree_on_code(world: World) -> None:
    """Raise TrainError on a rank that has loaded other code than rank 0, SystemExit on the others."""
    mine = loaded_code.loaded(program=True) if world.size > 1 else {}
    if len(set(world.gather(digest(mine)))) > 1:
        _refuse("the code", mine, loaded_code.changed, world)


def agree_on_weights(file: str, model: nn.Module, world: World) -> None:
    """Raise TrainError on a rank with weights that differ from rank 0's, SystemExit on the others."""
    if world.size == 1:
        return
    tensors = {name: digest(value) for name, value in model.state_dict().items()}

    def difference(mine: dict[str, str], theirs: dict[str, str]) -> str | None:
        return next((f"other values of {name}" for name, value in mine.items() if theirs[name] != value), None)

    if len(set(world.gather(digest(tensors)))) > 1:
        _refuse(file, tensors, difference, world)


def start_alike(model: nn.Module, world: World) -> None:
    """Give all ranks the weights and buffers of rank 0: a user's model may draw its own by a generator of its own.

    One tensor at a time, as the model may be large.
    """
    if world.size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            contiguous = tensor.contiguous()
            dist.broadcast(contiguous, 0)
            tensor.copy_(contiguous)


def _refuse(
    what: str, mine: T, difference: Callable[[T, T], str | None], world: World, fix: str = "copy it from there"
) -> None:
    theirs, host = world.broadcast_object((mine, socket.gethostname()))

    def compare() -> None:
        if found := difference(mine, theirs):
            raise TrainError(f"{what} differs from rank 0 ({host}): has {found}; {fix}")

    world.all_ranks_or_exit(compare)


def mixed_software(decoder: str, world: World) -> str | None:
    """Return a warning if decoders or versions of packages differ between ranks, which may change results."""
    if world.size == 1:
        return None
    used = world.gather((f"decoder {decoder}, {versions()}", socket.gethostname()))
    if len({kind for kind, _ in used}) == 1:
        return None
    first = {kind: f"{kind} (rank {rank} on {host})" for rank, (kind, host) in reversed(list(enumerate(used)))}
    return f"train: warning: software differs between ranks, so results may differ: {'; '.join(sorted(first.values()))}"


def versions() -> str:
    """Return the versions of the packages that compute images and weights."""
    found = [f"torch {torch.__version__}"]
    for name in ("torchvision", "pillow", "numpy", "timm"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join(found)
