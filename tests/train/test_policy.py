"""Augmentation after the crop: the same operations as torchvision's, reproducible whatever the number of threads."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from train.config import Config, parse
from train.data import sampler
from train.data.batch import Request, Transfer
from train.data.decode import Pillow
from train.data.loader import Loader
from train.data.policy import BINS, OPERATIONS, make_policy
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
    """Draws that give one sign."""

    def __init__(self, number: float) -> None:
        self._number = number

    def random(self) -> float:
        return self._number


@pytest.mark.parametrize(("name", "strengths"), [("trivial", tuple(range(BINS))), ("rand", (9,))])
def test_the_outcomes_are_exactly_torchvisions(name: str, strengths: tuple[int, ...]) -> None:
    """Every image that ours can make, its class makes, and the other way round."""
    policy = make_policy(replace(POLICIES, auto_augment=name))
    assert policy
    image, column = Image.fromarray(PIXELS), int(name == "trivial")
    signs: list[Any] = [Sign(0.1), Sign(0.9)]
    ours = {
        policy.apply(image, operation, strength, column, sign).tobytes()
        for operation in OPERATIONS
        for strength in strengths
        for sign in signs
    }
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


@pytest.mark.parametrize(("count", "batch", "repeats"), [(1000, 64, 4), (97, 16, 3), (10, 4, 4)])
def test_repeated_augmentation_has_the_copies_of_an_image_in_one_batch_on_different_ranks(
    count: int, batch: int, repeats: int
) -> None:
    order, plain = sampler.order(3, 1, count, repeats, batch), sampler.order(3, 1, count)
    assert len(order) == len(set(order.tolist())) == count
    assert set((order % count).tolist()) == set(plain[: -(-count // repeats)].tolist())
    for step in range(count // batch if batch % repeats == 0 else 0):
        for rank in range(repeats):
            share, _ = sampler.training_batch(order, step, batch, rank, repeats)
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
