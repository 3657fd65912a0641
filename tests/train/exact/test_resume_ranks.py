"""A run resumed between epochs ends bitwise like an uninterrupted one: methods and options on three ranks or more.

`test_resume.py` has what else a resume must keep, with three ranks.
"""

from pathlib import Path

import pytest

from tests.train.runs import Rank, digit_tree, run

BASE = "--image-size 16 --epochs 2 --workers 1 --threads 1 --device cpu --lr 0.5 --keep 2 --print-digest"
CIFAR, SMALL = "--arch cifar_resnet20", "--arch smallcnn"
AVERAGED = "--ema-decay 0.9"
UNEQUAL = ("--batch-size 4", "--batch-size 1 --accumulate 3", "--batch-size 6")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 60, 9)


def ended(folder: Path, data: Path, options: str, own: tuple[str, ...], nodes: int, *more: object) -> list[Rank]:
    common = ["--data", data, "--checkpoints", folder / "checkpoints", *BASE.split(), *options.split(), *more]
    return run(folder, len(own), *common, own=own, nodes=nodes)


@pytest.mark.parametrize(
    ("options", "own", "nodes"),
    [
        pytest.param(
            f"{CIFAR} {AVERAGED} --syncbn custom", UNEQUAL, 1, id="averaged, synchronised", marks=pytest.mark.ci
        ),
        pytest.param(SMALL, ("--batch-size 3",) * 4, 1, id="4 ranks", marks=pytest.mark.ci),
        pytest.param(
            f"{SMALL} --amp bf16 --gradient-compression bf16 --bucket-mb 0.05",
            ("--batch-size 3", "--batch-size 5", "--batch-size 2", "--batch-size 2"),
            1,
            id="4 ranks, unequal, bf16",
            marks=pytest.mark.ci,
        ),
        pytest.param(f"{CIFAR} --static-graph", ("--batch-size 4",) * 3, 1, id="static graph", marks=pytest.mark.slow),
        pytest.param(f"{CIFAR} --amp O2", ("--batch-size 4",) * 3, 1, id="O2", marks=pytest.mark.slow),
        pytest.param(
            f"{CIFAR} {AVERAGED} --parallel fsdp", ("--batch-size 4",) * 3, 1, id="fsdp", marks=pytest.mark.ci
        ),
        pytest.param(f"{SMALL} --parallel hsdp", ("--batch-size 3",) * 4, 2, id="hsdp", marks=pytest.mark.ci),
    ],
)
def test_a_resumed_run_ends_like_an_uninterrupted_one(
    options: str, own: tuple[str, ...], nodes: int, data: Path, tmp_path: Path
) -> None:
    whole = ended(tmp_path / "whole", data, options, own, nodes)
    (first,) = (tmp_path / "whole" / "checkpoints").glob("epoch-0001.*")
    resumed = ended(tmp_path / "resumed", data, options, own, nodes, "--resume", first)
    assert f"resumed {first} at epoch 2, step 0" in resumed[0].text
    assert {rank.digest for rank in (*whole, *resumed)} == {whole[0].digest}
    after = [[line for line in ranks[0].metrics("epoch") if line["epoch"] == 2] for ranks in (whole, resumed)]
    assert after[0][0]["train"] == after[1][0]["train"]  # what is reported leaves the rehearsal out
    assert after[0][0]["val"] == after[1][0]["val"]
