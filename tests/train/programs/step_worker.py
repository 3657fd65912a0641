"""Runs on each of two ranks and prints JSON: synchronised batch norm against a reference, a step in which one rank
overflows, the number of collectives, compressed gradients, and validation after steps."""

import copy
import json
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.train.steps import accumulate
from train.__main__ import leave
from train.config import Config
from train.data.batch import Batch, Transfer
from train.data.loader import Loader
from train.data.repeat import synthetic
from train.distributed.ddp import wrap
from train.distributed.methods import make_step
from train.distributed.world import World, start
from train.evaluate import evaluate
from train.experiments.syncbn import SyncBatchNorm
from train.freeze import freeze
from train.models import SmallCNN, make_model
from train.precision import choose_precision
from train.step import Objective, Plan


def norm_error(
    world: World, sizes: tuple[int, int], shape: tuple[int, ...], offset: float, dtype: torch.dtype
) -> float:
    """Largest relative error of output, input gradient, parameter gradients and running statistics, on this rank."""
    torch.manual_seed(0)
    whole = torch.randn(sum(sizes), *shape, dtype=torch.float64) * 3 + offset
    incoming = torch.randn_like(whole)
    start_row = sum(sizes[: world.rank])
    rows = slice(start_row, start_row + sizes[world.rank])
    kind = nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d
    oracle, ours = kind(shape[0]).double(), SyncBatchNorm(shape[0]).to(dtype)
    for module in (oracle, ours):
        with torch.no_grad():
            module.weight.copy_(torch.linspace(0.5, 2, shape[0]))
            module.bias.copy_(torch.linspace(-1, 1, shape[0]))
    whole = whole.to(dtype).double()  # the reference gets the same rounded numbers as ours
    x = whole.clone().requires_grad_()
    expected = oracle(x)
    expected.backward(incoming)
    mine = whole[rows].to(dtype).requires_grad_()
    out = ours(mine)
    out.backward(incoming[rows].to(dtype))
    assert ours.weight.grad is not None
    assert mine.grad is not None
    assert x.grad is not None
    weight_grad = world.sum(ours.weight.grad.double())
    pairs = [
        (out, expected[rows]),
        (mine.grad, x.grad[rows]),
        (weight_grad, oracle.weight.grad),
        (ours.running_mean, oracle.running_mean),
        (ours.running_var, oracle.running_var),
    ]
    ours.eval(), oracle.eval()
    pairs.append((ours(mine), oracle(whole)[rows]))
    return max(
        float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max().clamp_min(1))
        if a.numel()
        else 0.0
        for a, b in pairs
    )


COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "barrier")


def calls(world: World) -> dict[str, list[str]]:
    """The collectives of one layer: forward and backward in training, and in evaluation."""
    asked: list[str] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable[..., object]:
        def call(*values: object, **options: object) -> object:
            asked.append(name)
            return originals[name](*values, **options)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        layer, found = SyncBatchNorm(3), {}
        x = torch.randn(2 + world.rank, 3, 4, 4, requires_grad=True)
        out = layer(x)
        found["forward"], asked = asked, []
        out.sum().backward()
        found["backward"], asked = asked, []
        layer.eval()(x).sum().backward()
        found["evaluation"] = asked
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return found


def overflow(world: World) -> dict[str, object]:
    """Only rank 1's loss overflows; return the result of that step and of the next on each rank."""
    config = Config(data="", image_size=8, amp="fp16", momentum=0.9)
    torch.manual_seed(0)
    model = SmallCNN(10)
    step = make_step(config, world, choose_precision(config, world.device), model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    images = torch.from_numpy(np.random.default_rng(world.rank).integers(0, 256, (4, 8, 8, 3), np.uint8))
    result: dict[str, object] = {}
    for name, weight in (("bad", float("inf") if world.rank == 1 else 1.0), ("good", 1.0)):
        batch = Batch(images, torch.arange(4), torch.full((4,), weight), total=8, last=True)
        plan = Plan(rate=0.1, update=0)
        accumulate(step, batch, plan)
        result[name] = step.update(plan)
        result[f"{name} scale"] = step.scale.value
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        result[f"{name} moved"] = moved
    return result


def reductions(world: World) -> dict[str, int]:
    """All-reduces by gloo, counted by torch's profiler, in updates of 1 and 4 micro-batches and in batch norm."""

    def counted(what: Callable[[], object]) -> int:
        with torch.profiler.profile() as trace:
            what()
        return sum(event.count for event in trace.key_averages() if event.key == "gloo:all_reduce")

    config = Config(data="", image_size=8)
    model = SmallCNN(10)
    step = make_step(config, world, choose_precision(config, world.device), model)
    images = torch.from_numpy(np.random.default_rng(world.rank).integers(0, 256, (4, 8, 8, 3), np.uint8))

    def update(pieces: int) -> None:
        for piece in range(pieces):
            last = piece + 1 == pieces
            batch = Batch(images, torch.arange(4), torch.ones(4), total=8 * pieces, last=last)
            accumulate(step, batch, Plan(rate=0.1, update=0))
        step.update(Plan(rate=0.1, update=0))

    update(1)  # DDP arranges its buckets after the first one
    norm, x = SyncBatchNorm(4), torch.randn(5, 4, 3, 3, requires_grad=True)
    result = {"update of 1": counted(lambda: update(1)), "update of 4": counted(lambda: update(4))}
    outputs: list[torch.Tensor] = []
    result["norm forward"] = counted(lambda: outputs.append(norm(x)))
    result["norm backward"] = counted(lambda: outputs[0].square().sum().backward())
    norm.eval()
    result["norm in evaluation"] = counted(lambda: norm(x))
    return result


def frozen(world: World) -> dict[str, int]:
    """The number of gradients that DDP sums over ranks, without and with --freeze."""
    found = {}
    for pattern in ("", "features"):
        model, summed = SmallCNN(10), list[int]()
        if pattern:
            freeze(model, pattern)
        wrapped = wrap(model, world, Config(data=""))

        def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            state.append(bucket.buffer().numel())
            return default_hooks.allreduce_hook(None, bucket)

        wrapped.register_comm_hook(summed, hook)
        wrapped(torch.rand(2, 3, 8, 8)).sum().backward()
        found[pattern] = sum(summed)
    return found


def compression(world: World) -> dict[str, float]:
    """Largest relative error of the gradients reduced in bf16, against the same in plain tensors and against fp32."""
    config = Config(data="", image_size=8, gradient_compression="bf16")
    torch.manual_seed(0)
    model = SmallCNN(10)
    alone = copy.deepcopy(model)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(world.rank))
    for module in (alone, wrap(model, world, config)):
        module(x).square().sum().backward()
    errors = {"against bf16": 0.0, "against fp32": 0.0}
    for ours, mine in zip(model.parameters(), alone.parameters(), strict=True):
        halves = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(halves, mine.grad / world.size)
        oracles = {
            "against bf16": (halves[0].bfloat16() + halves[1].bfloat16()).float(),
            "against fp32": halves[0] + halves[1],
        }
        for name, oracle in oracles.items():
            assert ours.grad is not None
            errors[name] = max(errors[name], float((ours.grad - oracle).abs().max() / oracle.abs().max()))
    return errors


def statistics(world: World) -> dict[str, object]:
    """Two ranks with different batches: their running statistics, and the scores of a validation."""
    config = Config(data="", image_size=8, val_resize=8, batch_size=4, dtype="float64", workers=0)
    torch.manual_seed(0)
    model = make_model("cifar_resnet20", 16).double()
    wrapped = wrap(model, world, config)
    wrapped(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(world.rank)).double()).sum().backward()
    before = [buffer.clone() for buffer in model.buffers()]
    loader = Loader(config, synthetic(16, 8).val, None, 4, 1, Transfer(world.device))
    alone = World(0, 1, 0, 1, world.device, "none")
    precision = choose_precision(config, world.device)
    expected = evaluate(model, loader, Objective(config, precision, alone), alone)[0].tolist()
    scores = evaluate(model, loader, Objective(config, precision, world), world)[0].tolist()
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    option = "forward_sync_buffers" if hasattr(wrapped, "forward_sync_buffers") else "broadcast_buffers"  # before 2.14
    sent = {"batch norm": wrapped, "spectral norm": wrap(spectral, world, config)}
    return {
        "sent in steps": {name: getattr(module, option) for name, module in sent.items()},
        "changed by validation": not all(map(torch.equal, before, model.buffers())),
        "alone": expected,
        "scores": scores,
    }


if __name__ == "__main__":
    world = start(Config(data=""))
    sys.stdout.write(
        json.dumps(
            {
                "norm": {
                    "equal 2d": norm_error(world, (4, 4), (3, 5, 7), 0, torch.float64),
                    "uneven 2d": norm_error(world, (5, 2), (3, 5, 7), 0, torch.float64),
                    "empty 2d": norm_error(world, (5, 0), (3, 5, 7), 0, torch.float64),
                    "one row each": norm_error(world, (1, 1), (6,), 0, torch.float64),
                    "uneven 1d float32": norm_error(world, (7, 3), (6,), 0, torch.float32),
                    "empty float32": norm_error(world, (6, 0), (3, 5, 7), 0, torch.float32),
                    "mean 100 uneven float32": norm_error(world, (9, 4), (4, 9, 9), 100, torch.float32),
                    "mean 100 float32": norm_error(world, (8, 8), (4, 9, 9), 100, torch.float32),
                },
                "calls": calls(world),
                "overflow": overflow(world),
                "reductions": reductions(world),
                "frozen": frozen(world),
                "compression": compression(world),
                "statistics": statistics(world),
            }
        )
        + "\n"
    )
leave(0)
