"""Augmentation after the crop: the same operations as torchvision's, reproducible with any number of threads."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from train.config import Config, parse
from train.data import sampler
from train.data.augment import BINS, OPERATIONS, Changes, Operation, draw, operation
from train.data.batch import Request, Transfer
from train.data.decode import Pillow
from train.data.loader import Loader
from train.data.on_device import make_device_policy
from train.data.policy import make_policy
from train.data.source import Pixels
from train.errors import TrainError

SIDE = 12
PIXELS = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
POLICIES = Config(
    data="",
    image_size=SIDE,
    val_resize=SIDE,
    auto_augment="trivial",
    color_jitter=(0.4, 0.4, 0.4, 0.1),
    random_erase=0.5,
)


class Sign:
    """Random numbers with a fixed sign."""

    def __init__(self, number: float) -> None:
        self._number = number

    def random(self) -> float:
        return self._number


@pytest.mark.parametrize(("name", "strengths"), [("trivial", tuple(range(BINS))), ("rand", (9,))])
def test_the_outcomes_are_exactly_torchvisions(name: str, strengths: tuple[int, ...]) -> None:
    """Every possible result of ours is a result of torchvision's class, and vice versa."""
    policy = make_policy(replace(POLICIES, auto_augment=name))
    assert policy
    image = Image.fromarray(PIXELS)
    signs = [Sign(0.1), Sign(0.9)]
    ours = {
        policy.apply(image, operation(kind, strength, name == "trivial", SIDE, sign)).tobytes()
        for kind in OPERATIONS
        for strength in strengths
        for sign in signs
    }
    from torchvision.transforms import InterpolationMode, v2  # imported here: it takes two seconds

    torch.manual_seed(0)
    bilinear = InterpolationMode.BILINEAR
    transform: Any = v2.TrivialAugmentWide(interpolation=bilinear)
    if name == "rand":
        transform = v2.RandAugment(num_ops=1, magnitude=9, interpolation=bilinear)
    theirs = {transform(image).tobytes() for _ in range(12_000 if name == "trivial" else 500)}
    assert len(ours) > (400 if name == "trivial" else 20)
    # theirs has its strengths in float32, so a pixel at the edge of a sheared image may be inside or outside
    a, b = (np.array([list(each) for each in images], np.int16) for images in (ours, theirs))
    distances = np.array([(np.abs(b - each) > 1).mean(1) for each in a])
    assert distances.min(0).max() < 0.02
    assert distances.min(1).max() < 0.02


def test_the_operations_are_drawn_equally_often() -> None:
    policy = make_policy(replace(POLICIES, color_jitter=(0.0,) * 4, random_erase=0.0))
    assert policy
    same = 0
    for index in range(1400):
        pixels = PIXELS.copy()
        policy(pixels, index / 1400)
        same += np.array_equal(pixels, PIXELS)
    # one in 14 is the identity; on noise nothing changes either by autocontrast, and by the others when weak
    assert 1400 * 2 / 14 < same < 1400 * 3 / 14


def test_random_erasing_fills_a_box_with_the_mean() -> None:
    policy = make_policy(replace(POLICIES, auto_augment="none", color_jitter=(0.0,) * 4))
    assert policy
    colour, shares = np.array([124, 116, 104]), []
    for index in range(400):
        pixels = np.zeros((64, 64, 3), np.uint8)
        policy(pixels, index / 400)
        erased = (pixels == colour).all(2)
        assert ((pixels == 0).all(2) | erased).all()
        rows, columns = np.flatnonzero(erased.any(1)), np.flatnonzero(erased.any(0))
        if len(rows):
            assert erased[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
            shares.append(erased.mean())
    assert 160 < len(shares) < 240
    assert 0.015 < min(shares) < max(shares) < 0.35


class Photos:
    labels = np.arange(8)

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> Pixels:
        return np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), np.uint8)

    def place(self, index: int) -> None:
        pass


def loaded(config: Config, indices: list[int], epoch: int = 0) -> torch.Tensor:
    loader = Loader(config, Photos(), Pillow(), len(indices), 1, Transfer(torch.device("cpu")))
    try:
        return next(loader.batches([Request(np.array(indices), len(indices))], epoch)).images.clone()
    finally:
        loader.close()


def test_images_do_not_depend_on_threads_but_on_epoch_and_copy() -> None:
    config = replace(POLICIES, augment="none", flip=0.0)
    first = loaded(replace(config, workers=0), list(range(8)))
    assert torch.equal(first, loaded(replace(config, workers=4), list(range(8))))
    assert torch.equal(first[[5, 2]], loaded(replace(config, workers=1), [5, 2]))
    again = loaded(replace(config, workers=0), list(range(8)), epoch=1)
    copies = loaded(replace(config, workers=0), list(range(8, 16)))  # the same images, as their second copies
    assert sum(map(torch.equal, first, again)) < 4
    assert sum(map(torch.equal, first, copies)) < 4


def drawn(kind: str, side: int, strengths: Iterable[int]) -> list[Operation]:
    """Return the operation at these strengths, with both signs."""
    if kind == "hue":
        return [Operation(kind, strength / BINS - 0.5) for strength in strengths]
    return [operation(kind, strength, True, side, Sign(sign)) for strength in strengths for sign in (0.1, 0.9)]


def device_images(side: int) -> torch.Tensor:
    """Noise, a smooth image, one of two greys, and a black one."""
    torch.manual_seed(0)
    noise = torch.randint(0, 256, (1, 3, side, side), dtype=torch.uint8)
    smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 4, 4) * 255, (side, side), mode="bilinear").byte()
    greys = torch.where(torch.arange(side) % 3 > 0, 77, 200).byte().expand(1, 3, side, side)
    return torch.cat([noise, smooth, greys, torch.zeros(1, 3, side, side, dtype=torch.uint8)])


@pytest.mark.parametrize("kind", [name for name in (*OPERATIONS, "hue") if name != "identity"])
@pytest.mark.parametrize(
    "side", [32, pytest.param(65, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_an_operation_on_the_device_equals_torchvisions_on_tensors(kind: str, side: int, request: Any) -> None:
    """Bitwise on this CPU; others may round a product and sum once or twice, a difference of one level of 255."""
    policies = make_policy(POLICIES), make_device_policy(replace(POLICIES, augment_on="device"))
    assert policies[0]
    assert policies[1]
    images, every = device_images(side), drawn(kind, side, range(0, BINS, 6 if side == 32 else 1))
    for image in images:
        found = policies[1].apply(image.expand(len(every), -1, -1, -1), kind, [each.value for each in every])
        expected = torch.stack([policies[0].apply(image, each) for each in every])
        distance = (found.int() - expected.int()).abs()
        assert distance.max() <= 1
        assert (distance > 0).float().mean() < 1e-3


def test_a_batch_on_the_device_gets_each_images_own_changes() -> None:
    from torchvision.transforms.v2 import functional

    config = replace(POLICIES, auto_augment="rand", augment_on="device", image_size=24)
    one, many = make_policy(replace(config, augment_on="cpu")), make_device_policy(config)
    assert one
    assert many
    images = torch.randint(0, 256, (40, 24, 24, 3), dtype=torch.uint8)
    changes = [draw(config, index / 40, 24) for index in range(39)] + [Changes()]
    found = many(images, changes)
    assert torch.equal(found[39], images[39])
    expected = images.permute(0, 3, 1, 2).clone()
    for index, each in enumerate(changes):
        for step in each.operations:
            expected[index] = one.apply(expected[index], step)
        if each.box:
            top, left, height, width = each.box
            colour = torch.tensor([124, 116, 104], dtype=torch.uint8).view(3, 1, 1)
            expected[index] = functional.erase(expected[index], top, left, height, width, colour)
    assert sum(each.box is not None for each in changes) > 10
    distance = (found.permute(0, 3, 1, 2).int() - expected.int()).abs()
    # a difference of one level may grow where a later operation stretches the levels
    assert (distance > 0).float().mean() < 1e-3


@pytest.mark.parametrize("name", ["trivial", "rand"])
def test_the_device_draws_what_the_cpu_draws(name: str) -> None:
    """The images differ only as Pillow and torch round, and as Pillow smooths in another order."""
    config = replace(POLICIES, augment="none", flip=0.0, auto_augment=name, workers=2)
    changed = loaded(replace(config, augment_on="device"), list(range(8)))
    assert torch.equal(changed, loaded(replace(config, augment_on="device", workers=0), list(range(8))))
    here = loaded(config, list(range(8)))
    distance = (changed.int() - here.int()).abs().float()
    assert distance.flatten(1).median(1).values.max() <= 2
    plain = loaded(replace(config, auto_augment="none", color_jitter=(0.0,) * 4, random_erase=0.0), list(range(8)))
    assert (plain.int() - here.int()).abs().float().flatten(1).median(1).values.max() > 10


@pytest.mark.parametrize(("count", "batch", "repeats"), [(1000, 64, 4), (97, 16, 3), (10, 4, 4)])
def test_repeated_augmentation_has_the_copies_of_an_image_in_one_batch_on_different_ranks(
    count: int, batch: int, repeats: int
) -> None:
    order, plain = sampler.order(3, 1, count, repeats, batch), sampler.order(3, 1, count)
    assert len(order) == len(set(order.tolist())) == count
    assert set((order % count).tolist()) == set(plain[: -(-count // repeats)].tolist())
    for step in range(count // batch if batch % repeats == 0 else 0):
        for rank in range(repeats):
            share = sampler.training_batch(order, step, batch, [1] * repeats)[rank]
            assert len(set((share % count).tolist())) == len(share)
        images = (order[step * batch : (step + 1) * batch] % count).tolist()
        assert all(images.count(image) == repeats for image in images)
        assert all(a != b for a, b in pairwise(images)) or batch == repeats


@pytest.mark.parametrize(
    "options", ["--rand-magnitude 31", "--color-jitter 0.4 0.4 0.4 0.6", "--color-jitter -1 0 0 0", "--random-erase 2"]
)
def test_settings_out_of_range_are_refused(options: str) -> None:
    with pytest.raises(TrainError, match=options.split()[0]):
        parse(["--data", "unused", *options.split()])
