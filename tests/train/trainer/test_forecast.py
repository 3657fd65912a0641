"""The forecast of the disk space for checkpoints, against the files."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.train.runs import Rank, run
from train.__main__ import main
from train.checkpoint import Saver
from train.config import Config
from train.forecast import files

COMMON = (
    "--data synthetic:8 --arch cifar_resnet20 --image-size 8 --batch-size 4 --epochs 1 --workers 1 --threads 1 "
    "--device cpu"
)
MUON = "--arch timm:vit_tiny_patch16_224 --model-kwargs img_size=32 depth=2 --image-size 32 --optimizer muon"
FORECAST = re.compile(
    r"train: (warning: )?checkpoints of this run: about (\d+) x ([\d.]+) MB \((.*?)\)(?: and ([\d.]+) MB \(best\))?; "
    r"(\S+) has ([\d.]+) [MG]B free"
)


def told(rank: Rank) -> re.Match[str]:
    (found,) = [match for line in rank.lines if (match := FORECAST.fullmatch(line))]
    return found


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, ""),
        (1, "--optimizer adamw --ema-decay 0.9"),
        pytest.param(1, "--momentum 0", marks=pytest.mark.ci),
        pytest.param(1, "--optimizer lars --dtype float64", marks=pytest.mark.ci),
        pytest.param(1, "--amp O2", marks=pytest.mark.ci),
        pytest.param(1, MUON, marks=pytest.mark.slow),
        pytest.param(2, "--gradient-compression powersgd:1", marks=pytest.mark.ci),
        pytest.param(2, "--parallel model --optimizer adamw", marks=pytest.mark.ci),
    ],
)
def test_the_size_is_that_of_the_file(world: int, options: str, tmp_path: Path) -> None:
    ranks = run(tmp_path, world, *COMMON.split(), *options.split())
    found, folder = told(ranks[0]), tmp_path / "0" / "checkpoints"
    assert found.group(1, 2, 4, 6) == (None, "2", "last, previous, best, the next while it is written", str(folder))
    assert float(found[3]) * 1e6 == pytest.approx((folder / "last.pt").stat().st_size, rel=0.1)
    assert not [line for rank in ranks[1:] for line in rank.lines if FORECAST.search(line)]


def test_the_size_of_shards_is_that_of_all_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    options = [*COMMON.split(), "--arch", "cifar_convnet", "--image-size", "32"]  # a few large tensors
    first = run(tmp_path, 2, *options, "--parallel", "fsdp", "--keep", "3", "--checkpoints", folder)[0]
    found = told(first)
    assert found[4] == "last, previous, 3 epochs, the next while it is written"
    size = sum(path.stat().st_size for path in (folder / "last.sharded").iterdir())
    assert float(found[3]) * 1e6 == pytest.approx(size, rel=0.1)
    assert float(found[5]) * 1e6 == pytest.approx((folder / "best.pt").stat().st_size, rel=0.1)


@pytest.mark.parametrize("keep", [0, 1, 3])
@pytest.mark.parametrize("within", [False, True])
def test_as_many_files_as_are_on_the_disk(keep: int, within: bool, tmp_path: Path) -> None:
    """The best one is the first; saved at the end of an epoch, and twice inside it."""
    saver, most = Saver(tmp_path, keep), 0
    for epoch in range(1, 9):
        for save in range(3 if within else 1):
            saver.save({"number": torch.ones(1)}, best=epoch == 1, epoch=None if save else epoch)
            saver.wait()
            most = max(most, len({path.stat().st_ino for path in tmp_path.glob("*.pt")}))
    saver.close()
    config = Config(data="", keep=keep, checkpoint_every="5" if within else "")
    assert files(config, epochs=8) == most + 1, "and one that is being written"


def test_too_little_space_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of the same run that are there already take no further space."""
    options = [*COMMON.split(), "--output", str(tmp_path), "--keep", "2", "--epochs"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000))
    for epochs, warned in (("3", True), ("6", False)):
        assert main([*options, epochs]) == 0
        out = capsys.readouterr().out
        assert ("train: warning: checkpoints of this run: about 4 x 2.2 MB (" in out) == warned, out
        assert "last, previous, best, 2 epochs, the next while it is written" in out
        assert f"{tmp_path / 'checkpoints'} has 3.0 MB free" in out
