"""Operations of a step on the device: few for any number of tensors, and none that waits for results."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.steps import accumulate
from train.config import Config
from train.data.augment import JITTER, OPERATIONS, Changes, Operation
from train.data.batch import Batch
from train.data.on_device import make_device_policy
from train.distributed.methods import make_step
from train.distributed.world import World
from train.ema import EMA
from train.evaluate import Mistaken
from train.experiments.masters import Masters
from train.models import make_model
from train.optim import make_optimizer
from train.precision import choose_precision
from train.step import Plan

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1, CPU, "none")
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}  # the CPU needs their result to go on


class Operations(TorchDispatchMode):
    """The names of the operations in the block; a boolean index counts as `nonzero`, since its size is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "index" and any(value is not None and value.dtype is torch.bool for value in args[1]):
            name = "nonzero"
        self.names.append(name)
        return func(*args, **(kwargs or {}))


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(count)))


def counted(what: Any) -> int:
    with Operations() as asked:
        what()
    return len(asked.names)


def test_the_average_starts_as_many_kernels_for_many_tensors_as_for_few() -> None:
    averages = [EMA(model, 0.9, list(model.parameters())) for model in (layers(1), layers(20))]
    few, many = (counted(lambda ema=ema: ema.update(3)) for ema in averages)
    assert few == many < 5


def test_masters_are_copied_at_once() -> None:
    found = []
    for count in (1, 20):
        model = layers(count).half()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        masters = Masters(model)
        masters.take_gradients()
        found.append((counted(masters.take_gradients), counted(masters.publish)))
    assert found[0] == found[1] == (1, 1)


def kernels(what: Any) -> int:
    """Count kernels as on a GPU: an operation on lists is one, unless the sizes of the lists' tensors differ."""

    class Started(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            lists = [value for value in args if isinstance(value, list)]
            alike = len(lists) < 2 or all(len({each.shape for each in row}) == 1 for row in zip(*lists, strict=True))
            self.number += 1 if alike or not func.overloadpacket.__name__.startswith("_foreach") else len(lists[0])
            return func(*args, **(kwargs or {}))

    with Started() as started:
        what()
    return started.number


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, lambda size: nn.Linear(size, 5)])
def test_lars_starts_as_many_kernels_for_many_tensors_as_for_few(kind: Any) -> None:
    found = []
    for count in (1, 20):
        layers = nn.Sequential(*(kind(4 + index) for index in range(count)))
        for parameter in layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = make_optimizer(Config(data="", optimizer="lars"), layers)
        optimizer.step()
        found.append(kernels(optimizer.step))
    assert found[0] == found[1]


def test_augmentation_on_the_device_does_not_wait_and_has_no_kernels_per_image() -> None:
    policy = make_device_policy(Config(data="", augment_on="device", auto_augment="trivial", random_erase=1.0))
    assert policy
    found = []
    for count in (1, 9):
        changes = [
            Changes((Operation(name, 1.0),), (0, 0, 2, 2)) for name in (*OPERATIONS, *JITTER) for _ in range(count)
        ]
        images = torch.zeros(len(changes), 8, 8, 3, dtype=torch.uint8)
        policy(images, changes)
        with Operations() as asked:
            policy(images, changes)
        found.append(len(asked.names))
        assert not WAITS & set(asked.names)
    assert found[1] <= found[0]


@pytest.mark.parametrize(
    "options", [{}, {"ema_decay": 0.9}, {"optimizer": "lars"}, {"clip_norm": 1.0}, {"amp": "bf16"}]
)
def test_no_step_waits_for_the_device(options: dict[str, Any]) -> None:
    config = Config(data="", image_size=8, **options)
    step = make_step(config, ALONE, choose_precision(config, CPU), make_model("smallcnn", 10))
    with Operations() as asked:
        for update in range(2):
            batch = Batch(torch.ones(4, 8, 8, 3).byte(), torch.arange(4), torch.ones(4), 4, last=True)
            accumulate(step, batch, Plan(0.1, update))
            step.update(Plan(0.1, update))
    assert "convolution" in asked.names
    assert not set(asked.names) & WAITS


def test_no_batch_of_a_validation_waits_for_the_device() -> None:
    mistaken, logits = Mistaken(), torch.randn(6, 10)
    with Operations() as asked:
        for _ in range(3):
            mistaken.add(Batch(torch.ones(6, 8, 8, 3).byte(), torch.arange(6), torch.ones(6), 6, last=True), logits)
    assert not set(asked.names) & WAITS
