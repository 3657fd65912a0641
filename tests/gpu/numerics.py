"""Checks of bench/gpu.py: results of a GPU equal references in torch and formulas."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.gpu_scale import Figures, Scale, group, relative
from tests.train.steps import accumulate
from train.config import Config
from train.data.batch import Batch
from train.distributed.ddp import distributed
from train.distributed.fsdp import ShardedStep
from train.distributed.methods import make_step
from train.distributed.world import World
from train.experiments.syncbn import SyncBatchNorm
from train.models import make_model
from train.precision import choose_precision
from train.step import Plan, Step

MORE, EXACT = 2, 1e-6  # the error of synchronised batch norm relative to that of torch's batch norm; always allowed
SIDE = 16


def syncbn(scale: Scale) -> Figures:
    """Our synchronised batch norm, its all-reduces over NCCL, errs no more than torch's batch norm in both layouts.

    Both are compared with batch norm in fp64. What fp32 loses depends on the GPU's kernels and grows with the mean.
    """
    device = group(scale).device
    found, ok = dict[str, str](), True
    for kind, offset in ((torch.float32, 0), (torch.float32, 100), (torch.bfloat16, 0), (torch.float16, 0)):
        ours, theirs = 0.0, 0.0
        for layout in (torch.contiguous_format, torch.channels_last):
            torch.manual_seed(0)
            x, incoming = (torch.randn(64, 32, 14, 14, device=device) for _ in range(2))
            x, incoming = (value.to(kind).contiguous(memory_format=layout) for value in (x + offset, incoming))
            exact = normalised(nn.BatchNorm2d(32).to(device).double(), x.double(), incoming.double())
            mine = normalised(SyncBatchNorm(32).to(device), x, incoming)
            assert mine[0].is_contiguous(memory_format=layout), "the layout changed"
            ours = max(ours, *map(relative, mine, exact))
            theirs = max(theirs, *map(relative, normalised(nn.BatchNorm2d(32).to(device), x, incoming), exact))
        ok = ok and ours < max(MORE * theirs, EXACT)
        found[f"{str(kind).removeprefix('torch.')}, mean {offset}"] = f"{ours:.1e} (torch's {theirs:.1e})"
    empty = SyncBatchNorm(32).to(device)(torch.empty(0, 32, 14, 14, device=device, requires_grad=True))
    empty.sum().backward()
    dist.destroy_process_group()
    return {"ok": ok, **found}


def normalised(layer: nn.Module, x: Tensor, incoming: Tensor) -> tuple[Tensor, ...]:
    """Return output, gradients of input and weight, and the running variance."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(incoming)
    return out, x.grad, layer.weight.grad, layer.running_var


def ddp(scale: Scale) -> Figures:
    """DDP's gradients, in fp64 and compressed to bf16, equal the bare model's."""
    world = group(scale)
    torch.manual_seed(0)
    bare = make_model("smallcnn", 10).to(world.device, torch.float64)
    x = torch.randn(16, 3, SIDE, SIDE, device=world.device, dtype=torch.float64)
    bare(x).square().sum().backward()
    errors = {}
    for kind in ("none", "bf16"):
        model = copy.deepcopy(bare)
        model.zero_grad(set_to_none=True)
        wrapped = distributed(model, world, Config(data="", gradient_compression=kind))
        wrapped(x).square().sum().backward()
        pairs = zip(model.parameters(), bare.parameters(), strict=True)
        errors[kind] = max(relative(ours.grad, theirs.grad) for ours, theirs in pairs)
    dist.destroy_process_group()
    ok = errors["none"] < 1e-10 < errors["bf16"] < 1e-2  # in between: the gradients were converted to bf16
    return {"ok": ok, "fp64 error": f"{errors['none']:.1e}", "bf16 error": f"{errors['bf16']:.1e}"}


def new_step(config: Config, world: World, arch: str = "smallcnn") -> Step:
    """Return a step like `setup.prepare`, in the layout and precision that the options select on this device."""
    torch.manual_seed(0)
    precision = choose_precision(config, world.device)
    home = torch.device("cpu") if config.shards_weights else world.device
    model = precision.cast(make_model(arch, 10), home)
    if config.shards_weights:
        return ShardedStep(config, world, precision, model)
    return make_step(config, world, precision, model)


def batch(world: World, seed: int, count: int = 16, last: bool = True, total: int = 16) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, SIDE, SIDE, 3), dtype=torch.uint8, generator=draw).to(world.device)
    labels, weights = torch.arange(count, device=world.device) % 10, torch.ones(count, device=world.device)
    return Batch(images, labels, weights, total, last)


def fsdp(scale: Scale) -> Figures:
    """A model with convolutions in the default layout of a GPU trains equally with and without FSDP2."""
    options = {"data": "", "image_size": SIDE, "amp": "none", "tf32": False, "device": "cuda"}
    world = group(scale, Config(**options))
    plain = new_step(Config(**options, parallel="single"), world, "cifar_resnet20")
    divided = new_step(Config(**options, parallel="fsdp"), world, "cifar_resnet20")
    error = apart(trained(divided, world), trained(plain, world))
    layout = str(divided.objective.precision.layout).removeprefix("torch.")
    dist.destroy_process_group()
    return {"ok": error < 1e-2 and layout == "channels_last", "error": f"{error:.1e}", "layout": layout}


def trained(step: Step, world: World) -> list[Tensor]:
    """Return the weights after five updates of two micro-batches each."""
    for update in range(5):
        for last in (False, True):
            accumulate(step, batch(world, 2 * update + last, last=last, total=32), Plan(0.05, update))
        step.update(Plan(0.05, update))
    return list(step.model.parameters())


def apart(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Return the largest error of any tensor; `ours` are sharded."""
    pairs = zip(ours, theirs, strict=True)
    return max(relative(own.full_tensor(), other) for own, other in pairs)  # type: ignore[attr-defined]  # a DTensor


def fsdp_options(scale: Scale) -> Figures:
    """What has code of its own for shards on a GPU: compiled blocks, averages, the loss scale, a fused AdamW."""
    from torch.distributed.tensor import DTensor  # not in torch 2.4

    options = Config(data="", image_size=SIDE, amp="none", tf32=False, device="cuda")
    world = group(scale, options)

    def both(arch: str = "smallcnn", **more: Any) -> list[Step]:
        sharded = replace(options, **more, parallel="fsdp")
        alone = replace(sharded, parallel="single", compile=False)
        return [new_step(config, world, arch) for config in (sharded, alone)]

    errors = {}
    divided, plain = both("cifar_resnet20", compile=True)
    errors["compiled"] = apart(trained(divided, world), trained(plain, world))
    divided, plain = both(ema_decay=0.9)
    for step in (divided, plain):
        trained(step, world)
    names = [name for name, _ in plain.model.named_parameters()]
    errors["averages"] = apart(*([step.ema.averages[name] for name in names] for step in (divided, plain) if step.ema))
    divided, plain = both(amp="fp16")
    for step in (divided, plain):
        step.scale.value = 2.0**8  # no overflow
    errors["fp16"] = apart(trained(divided, world), trained(plain, world))
    exact = trained(new_step(replace(options, parallel="single"), world), world)
    rounding = max(relative(own, other) for own, other in zip(plain.parameters, exact, strict=True))
    divided, plain = both(optimizer="adamw")
    for update in range(3):  # with the same gradients: AdamW makes much of rounding in small ones
        for ours, theirs in zip(divided.parameters, plain.parameters, strict=True):
            theirs.grad = torch.randn_like(theirs)
            whole: Any = ours
            ours.grad = DTensor.from_local(theirs.grad.contiguous(), whole.device_mesh, whole.placements)
        for step in (divided, plain):
            step.update(Plan(0.01, update))
    errors["adamw"], fused = apart(divided.parameters, plain.parameters), divided.optimizer.defaults["fused"]
    torch.compiler.reset()
    dist.destroy_process_group()
    # two sums of fp16 products in different orders differ by at most as much as each from the exact one
    ok = fused and all(error < (3 * rounding if name == "fp16" else 1e-2) for name, error in errors.items())
    found = {f"{name} error": f"{error:.1e}" for name, error in errors.items()}
    return {"ok": ok, **found, "fp16 rounding": f"{rounding:.1e}", "fused": fused}


def loss_scale(scale: Scale) -> Figures:
    """A step that overflows is skipped and halves the loss scale; the next step is applied."""
    config = Config(data="", image_size=SIDE, amp="fp16", device="cuda")
    world = scale.world(config)
    step, losses = new_step(config, world), []

    def advance(overflow: bool = False) -> bool:
        images = batch(world, 0)
        if overflow:
            images.weights[0] = float("inf")
        losses.append(float(accumulate(step, images, Plan(0.005, 0))[0]))
        return step.update(Plan(0.005, 0))

    applied = [advance() for _ in range(20)]  # the first ones may overflow as well, until the scale is small enough
    before, kept = step.scale.value, [parameter.detach().clone() for parameter in step.parameters]
    skipped = not advance(overflow=True)
    halved = step.scale.value == before / 2
    still = all(torch.equal(a, b) for a, b in zip(kept, step.parameters, strict=True))
    ok = all(applied[-5:]) and skipped and halved and still and advance() and losses[-1] < losses[0]
    return {"ok": ok, "scale": step.scale.value, "loss": f"{losses[0]:.1f} to {losses[-1]:.1f}"}


def ema(scale: Scale) -> Figures:
    """The averages follow their formula: of fp32 weights, and of the fp32 masters of fp16 weights."""
    errors = {}
    for amp, arch in (("none", "cifar_resnet20"), ("O2", "smallcnn")):
        config = Config(data="", image_size=SIDE, amp=amp, ema_decay=0.9, tf32=False, device="cuda")
        world = scale.world(config)
        step = new_step(config, world, arch)
        assert step.ema
        names = [name for name, parameter in step.model.named_parameters() if parameter.requires_grad]
        expected = [parameter.detach().double() for parameter in step.parameters]
        for update in range(10):
            accumulate(step, batch(world, update), Plan(0.05, update))
            step.update(Plan(0.05, update))
            decay = min(0.9, (1 + update) / (10 + update))
            now = [parameter.detach().double() for parameter in step.parameters]
            expected = [decay * old + (1 - decay) * new for old, new in zip(expected, now, strict=True)]
        pairs = zip(names, expected, strict=True)
        errors[amp] = max(relative(step.ema.averages[name], value) for name, value in pairs)
        assert int(step.ema.averages.get("1.num_batches_tracked", 10)) == 10
    return {"ok": max(errors.values()) < 1e-5, **{f"{amp} error": f"{error:.1e}" for amp, error in errors.items()}}
