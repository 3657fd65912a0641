"""A model whose first weights torch's seed does not determine: with UNLIKE=1 each rank has others."""

import os

import torch
from torch import nn

from train.models import make_model


def build(num_classes: int) -> nn.Module:
    model = make_model("smallcnn", num_classes)
    draw = torch.Generator().manual_seed(int(os.environ["UNLIKE"]) * int(os.environ["RANK"]))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.rand(tensor.shape, generator=draw), alpha=0.1)
    return model
