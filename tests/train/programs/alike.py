"""A model of blocks with the same shapes, and torch.compile without a compiler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Has a norm inside; `power` is what blocks differ in."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.conv, self.norm, self.power = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), power

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).sigmoid() ** self.power


class Alike(nn.Module):
    """Five blocks, of three kinds."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(Block(1), Block(2), Block(1), Block(1), nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.stem(images)).mean((2, 3)))
        return logits


@dataclass
class Counts:
    """What was compiled, and how often that has run."""

    graphs: int = 0
    calls: int = 0


def without_compiler() -> Counts:
    """Let this process's torch.compile run graphs as they are."""
    counts = Counts()

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
        counts.graphs += 1

        def call(*arguments: Tensor) -> object:
            counts.calls += 1
            return graph.forward(*arguments)

        return call

    torch.compile = partial(torch.compile, backend=backend)
    return counts
