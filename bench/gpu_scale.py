"""Shared by the checks of bench/gpu.py: sizes on a GPU and on a simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from train.config import Config, parse
from train.distributed.world import World, start

Figures = dict[str, Any]
Rows = Iterator[tuple[str, Figures]]  # by name
T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """The size of the model, its images and its batches on a GPU; dry: a small model on some tiny images."""

    dry: bool

    def world(self, config: Config | None = None) -> World:
        return start(config or Config(data="", device="cuda"))

    def options(self, text: str) -> Config:
        """ResNet-50 at its usual size, or a small model."""
        real = "--arch resnet50 --image-size 224 --batch-size 256"
        model = self.pick(real, "--arch smallcnn --image-size 8 --val-resize 8 --batch-size 32")
        return parse(f"--device cuda {model} {text}".split())

    def pick(self, real: T, dry: T) -> T:
        return dry if self.dry else real


def group(scale: Scale, config: Config | None = None) -> World:
    """Create a process group with only this process, over NCCL."""
    world = scale.world(config)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    return world


def relative(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float((a.detach().double() - b.detach().double()).abs().max() / b.detach().double().abs().max())
