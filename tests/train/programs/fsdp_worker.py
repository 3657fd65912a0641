"""`fsdp_worker.py WHAT FOLDER` on every rank: compare ten steps with DDP, then save or load checkpoints.

WHAT: save, load, bf16, fp16, bf16+compile; or compile, inductor: compare with one process alone instead.

Every rank prints JSON.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from tests.train.programs.alike import Counts, without_compiler
from tests.train.steps import accumulate
from train.__main__ import leave
from train.checkpoint import digest, read
from train.config import Config
from train.data.batch import Batch, Transfer
from train.data.loader import Loader
from train.data.repeat import synthetic
from train.distributed.fsdp import local
from train.distributed.methods import make_step
from train.distributed.shards import Shards, check_shared
from train.distributed.world import World, start
from train.errors import TrainError
from train.evaluate import evaluate
from train.models import make_model
from train.precision import choose_precision
from train.step import Plan, Step

ALIKE = "tests.train.programs.alike:Alike"


def new(config: Config, world: World, seed: int = 0, arch: str = "smallcnn") -> Step:
    torch.manual_seed(seed)
    precision = choose_precision(config, world.device)
    return make_step(config, world, precision, precision.cast(make_model(arch, 10), world.device))


def work(step: Step, world: World, updates: int) -> None:
    """Every update has two micro-batches, with a sample of weight 0 on rank 0."""
    draw = torch.Generator().manual_seed(world.rank)
    for update in range(updates):
        for last in (False, True):
            accumulate(step, sample(world, last, draw), Plan(0.1, update))
        step.update(Plan(0.1, update))


def sample(world: World, last: bool, draw: torch.Generator | None = None) -> Batch:
    images = torch.randint(256, (4, 8, 8, 3), dtype=torch.uint8, generator=draw)
    weights = torch.tensor([1.0, 1.0, 1.0, float(world.rank > 0)])
    return Batch(images, torch.arange(4), weights, 8 * world.size - 2, last)


def weights(step: Step) -> torch.Tensor:
    parts = (p.full_tensor() if isinstance(p, DTensor) else p for p in step.model.parameters())
    return torch.cat([part.detach().flatten() for part in parts])


def digests(step: Step) -> list[str]:
    """Return the digests of all weights and of the complete optimiser state."""
    whole = StateDictOptions(full_state_dict=True)
    return [
        digest(step.model.state_dict()),
        digest(get_optimizer_state_dict(step.model, step.optimizer, options=whole)),
    ]


def saved(step: Step, store: Shards, folder: Path, world: World) -> dict[str, object]:
    """Save two checkpoints; the weights change before the second is written. A third save fails on rank 0."""
    store.open()
    store.save(lambda: {"format": 1, **step.state()})
    work(step, world, 1)
    store.wait()
    result: dict[str, object] = {"digests": digests(step)}
    weights = digest(step.model.state_dict())
    for first in (True, False):  # all ranks write together: not before the last rank has called
        if first == (world.rank < world.size - 1):
            store.save(lambda: {"format": 1, **step.state()}, best=True)
            with torch.no_grad():
                for parameter in step.model.parameters():
                    (parameter.to_local() if isinstance(parameter, DTensor) else parameter).add_(1)
        world.sum(torch.zeros(1))
    store.wait()
    result["moved on"] = digest(step.model.state_dict()) != weights
    if world.first:
        result["best is last"] = digest(read(folder / "best.pt")["model"]) == weights
        (folder / "best.pt").unlink()
        (folder / "best.pt" / "in the way").mkdir(parents=True)
    store.save(lambda: {"format": 1, **step.state()}, best=True)
    try:
        store.close()
    except OSError as error:
        result["failed"] = str(error)
    return result


def compiled(config: Config, world: World, counts: Counts) -> dict[str, object]:
    """Train and validate with compiled blocks, and on this rank alone, uncompiled, with the images of all ranks."""
    own = new(replace(config, compile=True), world, arch=ALIKE)
    alone = new(replace(config, parallel="single"), World(0, 1, 0, 1, world.device, "none"), arch=ALIKE)
    draws, before = [torch.Generator().manual_seed(rank) for rank in range(world.size)], weights(alone).clone()
    graphs, errors = list[int](), list[float]()
    for training in (True, True, False, False, True):
        own.model.train(training)
        alone.model.train(training)
        for last in (False, True):
            shares = [sample(replace(world, rank=rank), last, draw) for rank, draw in enumerate(draws)]
            images, labels, counted = (
                torch.cat([getattr(share, part) for share in shares]) for part in ("images", "labels", "weights")
            )
            whole = Batch(images, labels, counted, shares[0].total, last)
            if training:
                accumulate(own, shares[world.rank], Plan(0.1, 0))
                accumulate(alone, whole, Plan(0.1, 0))
            else:
                mine, every = logits(own, shares[world.rank]), logits(alone, whole)
                errors.append(float((mine - every.split(4)[world.rank]).abs().max()))
        if training:
            own.update(Plan(0.1, 0))
            alone.update(Plan(0.1, 0))
            errors.append(float((weights(own) - weights(alone)).abs().max()))
        graphs.append(counts.graphs)
    names = [list(step.model.state_dict()) for step in (own, alone)]
    moved = float((weights(alone) - before).abs().max())
    result = {"moved": moved, "distance": max(errors), "alike": names[0] == names[1], "about": own.compiled}
    return result | {"graphs": graphs, "calls": counts.calls}


@torch.no_grad()
def logits(step: Step, batch: Batch) -> torch.Tensor:
    found = step.objective.forward_loss(step.model, batch).logits
    assert found is not None
    return found


def overflowed(step: Step, world: World) -> dict[str, object]:
    """An update whose gradient is inf in one value of rank 1's shards, and the next one."""
    scales, before = [step.scale.value], weights(step).clone()
    accumulate(step, sample(world, True), Plan(0.1, 0))
    shards = local([parameter.grad for parameter in step.parameters if parameter.grad is not None])
    own = [shard for shard in shards if shard.numel()]
    if world.rank == 1:
        own[0].view(-1)[0] = float("inf")
    result: dict[str, object] = {"overflow": not all(bool(shard.isfinite().all()) for shard in own)}
    applied = [step.update(Plan(0.1, 0))]
    scales.append(step.scale.value)
    result["still"] = torch.equal(before, weights(step))
    accumulate(step, sample(world, True), Plan(0.1, 0))
    applied.append(step.update(Plan(0.1, 0)))
    return result | {"applied": applied, "scales": [*scales, step.scale.value]}


def main(what: str, folder: Path) -> dict[str, object]:
    config = Config(data="", image_size=8, parallel="fsdp", device="cpu")
    world, counts = start(config), Counts()
    amp, _, compiles = what.partition("+")
    half = amp in ("bf16", "fp16")
    exact = replace(config, amp=amp) if half else replace(config, dtype="float64", clip_norm=1.0)
    if compiles or what == "compile":
        counts = without_compiler()
    if what in ("compile", "inductor"):
        return compiled(exact, world, counts)
    arch = ALIKE if compiles else "smallcnn"
    ddp = new(replace(exact, parallel="ddp"), world, arch=arch)
    fsdp = new(replace(exact, compile=bool(compiles)), world, arch=arch)
    before = weights(ddp).clone()
    for each in (ddp, fsdp):
        work(each, world, 10)
    result: dict[str, object] = {"moved": float((weights(ddp) - before).abs().max())}
    result["distance"] = float((weights(ddp) - weights(fsdp)).abs().max())
    result |= {"graphs": counts.graphs, "calls": counts.calls}
    if half:
        plain = new(replace(config, parallel="ddp"), world, arch=arch)
        work(plain, world, 10)
        result["rounding"] = float((weights(plain) - weights(ddp)).abs().max())
        return result | (overflowed(fsdp, world) if what == "fp16" else {})
    step = new(replace(config, amp="bf16", optimizer="adamw"), world, seed=1)
    store = Shards(replace(config, checkpoints=str(folder)), world)
    if what == "save":
        work(step, world, 1)
        return result | saved(step, store, folder, world)
    found = store.find()
    assert found
    step.load_state(found.state)
    result |= {"read": found.path.name, "digests": digests(step)}
    loader = Loader(config, synthetic(10, 8).val, None, 8, 1, Transfer(world.device))
    evaluate(step.evaluated, loader, step.objective, world)  # as a run that was stopped in its validation goes on
    loader.close()
    work(step, world, 1)
    world.sum(torch.zeros(1))
    if world.first:
        part = folder / "last.sharded" / "__1_0.distcp"
        part.write_bytes(part.read_bytes()[:-100] + bytes(100))
    world.sum(torch.zeros(1))
    again = store.find()
    assert again
    result |= {"then": again.path.name, "why": again.damaged}
    try:
        check_shared(folder / str(world.rank), world)
    except TrainError as error:
        result["refused"] = str(error)
    return result


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], Path(sys.argv[2]))) + "\n")
leave(0)
