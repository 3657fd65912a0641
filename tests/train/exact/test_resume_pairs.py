"""Every pair of option values, in runs that are stopped and resumed within an epoch: bitwise as if never stopped."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from tests.train.runs import digit_tree
from train.config import parse
from train.distributed.world import Agreed, StopSignal, World
from train.errors import Stopped
from train.trainer import Trainer

BASE = "--image-size 8 --epochs 2 --batch-size 8 --workers 1 --device cpu --log-every 9 --threads 1"
OPTIONS: dict[str, tuple[str, ...]] = {
    "arch": ("--arch smallcnn", "--arch cifar_resnet20"),
    "parallel": ("--parallel single", "--parallel dp"),
    "optimizer": ("", "--optimizer sgd --nesterov --decay all", "--optimizer lars", "--optimizer adamw --lr 0.001"),
    "schedule": ("", "--schedule cosine", "--schedule multistep --milestones 0.3", "--schedule linear --warmup 0.2"),
    "amp": ("", "--amp bf16", "--amp fp16", "--amp O2"),
    "average": ("", "--ema-decay 0.9 --ema-every 2"),
    "gradients": ("", "--accumulate 2 --batch-size 4", "--clip-norm 0.5"),
    "mix": ("", "--mixup 0.2", "--cutmix 1 --mixup 0.2 --label-smoothing 0.1 --loss bce"),
    "images": (
        "",
        "--augment shift --last-batch drop",
        "--phases 8@0 16@0.5",
        "--auto-augment rand --random-erase 0.5",
    ),
    "validation": ("", "--val-interval 2 --val-batch-size 5"),
}


class StopAt(StopSignal):
    """Requests a stop before its nth step."""

    def __init__(self, world: World, step: int) -> None:
        super().__init__(world)
        self._left = step

    def agreed(self, save: bool = False) -> Agreed:
        self._left -= 1
        if self._left == 0:
            self.ask()
        return super().agreed(save)


def covering() -> list[dict[str, str]]:
    """Return few rows that contain every pair of values of different options, built greedily."""
    names = list(OPTIONS)
    missing = {
        frozenset(((a, x), (b, y))) for a, b in combinations(names, 2) for x, y in product(OPTIONS[a], OPTIONS[b])
    }
    rows = []
    while missing:
        row: dict[str, str] = dict(min(missing, key=sorted))
        for name in names:
            if name not in row:
                row[name] = max(
                    OPTIONS[name],
                    key=lambda value: sum(frozenset(((name, value), other)) in missing for other in row.items()),
                )
        missing -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append(row)
    return rows


# the first rows in every run of the tests, all before an issue is closed
EXTRA = [
    {"momentum": "--arch smallcnn --cycle-momentum"},
    {"images": "--arch smallcnn --auto-augment rand --color-jitter 0.4 0 0 0.1 --augment-on device --random-erase 0.5"},
    {"rates": "--arch smallcnn --optimizer adamw --lr 0.001 --layer-decay 0.7 --no-decay classifier.*"},
    {"timm": "--arch timm:test_vit --image-size 160 --drop-path 0.3 --optimizer muon --lr 0.001 --layer-decay 0.7"},
    {"ffcv": "--arch cifar_resnet20 --blurpool --val-flip"},
]
ROWS = [
    pytest.param(row, marks=pytest.mark.slow if index > 2 else ()) for index, row in enumerate([*covering(), *EXTRA])
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 29, 7)


def trained(options: str, output: Path, data: Path, stop: int = 0) -> dict[str, object]:
    """The last checkpoint; `stop`: the step before which the first of two runs is stopped."""
    config = parse(["--data", str(data), "--output", str(output), *BASE.split(), *options.split()])
    world = World(0, 1, 0, 1, torch.device("cpu"), "none")
    if stop:
        with pytest.raises(Stopped):
            Trainer(config, world).train(StopAt(world, stop))
    Trainer(config, world).train(StopSignal(world))
    state: dict[str, object] = torch.load(output / "checkpoints" / "last.pt", weights_only=True)
    return state


def differing(a: object, b: object, path: str = "") -> list[str]:
    """Return the paths at which two checkpoints differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = a.keys() | b.keys()
        return [found for key in keys for found in differing(a.get(key), b.get(key), f"{path}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in differing(x, y, f"{path}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    return [] if a == b else [path]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(filter(None, row.values())) or "default")
def test_a_stopped_run_ends_like_an_uninterrupted_one(row: dict[str, str], data: Path, tmp_path: Path) -> None:
    options = " ".join(row.values())
    whole, parts = trained(options, tmp_path / "a", data), trained(options, tmp_path / "b", data, stop=3)
    del whole["sha256"], parts["sha256"]
    assert [path for path in differing(whole, parts) if path != "/config/output"] == []
