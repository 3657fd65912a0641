"""Split a model, as a chain of layers, into one stage per rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from train.errors import TrainError
from train.models import SmallCNN

# (architecture, ranks) -> the first layer of every stage except stage 0; the published split of experiment 4
PUBLISHED = {("cifar_mobilenet_v2", 4): (2, 8, 15), ("cifar_mobilenet_v2_nobn", 4): (2, 8, 15)}


class _Mean(nn.Module):
    """SmallCNN's pooling as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C)."""
        return x.mean((2, 3))


def layers(model: Any, arch: str) -> list[nn.Module]:
    """Return the model's layers (not copies) as a chain.

    Raises:
        TrainError: the model is not a known chain.
    """
    if isinstance(model, SmallCNN):
        return [*model.features, _Mean(), model.classifier]
    if isinstance(model, nn.Sequential):
        return list(model)
    kind = type(model).__module__
    if kind == "torchvision.models.resnet":
        stem = [model.conv1, model.bn1, model.relu, model.maxpool]
        blocks = [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
        return [*stem, *blocks, model.avgpool, nn.Flatten(), model.fc]
    if kind == "torchvision.models.vgg":
        return [*model.features, model.avgpool, nn.Flatten(), *model.classifier]
    raise TrainError(
        f"--arch {arch}: cannot be split into stages; use resnet*, vgg*, smallcnn or a cifar_* model, or --parallel ddp"
    )


def stages(model: nn.Module, arch: str, ranks: int) -> list[nn.Sequential]:
    """Return one stage per rank: the published split if there is one, else equal numbers of layers.

    Raises:
        TrainError: the model is not a chain, or has fewer layers than ranks.
    """
    chain = layers(model, arch)
    if len(chain) < ranks:
        raise TrainError(
            f"--arch {arch}: cannot split {len(chain)} layers into {ranks} stages; use {len(chain)} processes or fewer"
        )
    inner = PUBLISHED.get((arch, ranks)) or [len(chain) * rank // ranks for rank in range(1, ranks)]
    bounds = [0, *inner, len(chain)]
    return [nn.Sequential(*chain[a:b]) for a, b in pairwise(bounds)]
