"""Every node stores checkpoints, and the newest complete one is loaded; nodes are processes with separate folders."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.train.runs import Rank, digit_tree, run
from train.checkpoint import digest
from train.combinations import check
from train.config import Config
from train.errors import TrainError

# batch norm's running statistics and their average are each rank's own, so what two nodes write could differ
OPTIONS = "--arch cifar_resnet20 --image-size 8 --epochs 2 --batch-size 8 --ema-decay 0.9 --workers 1 --print-digest"
SMALL = "--arch smallcnn --image-size 8 --epochs 1 --batch-size 4 --dtype float64"
LAST, PREVIOUS = "checkpoints/last.pt", "checkpoints/previous.pt"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--data", str(digit_tree(tmp_path_factory.mktemp("data"), 32, 10)), *OPTIONS.split(), "--replicate"]


@pytest.fixture(scope="module")
def whole(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return run(tmp_path_factory.mktemp("whole"), 2, *options, nodes=2)


@pytest.fixture
def copied(whole: list[Rank], tmp_path: Path) -> Path:
    """Both nodes after the first of two epochs."""
    for rank in whole:
        target = tmp_path / rank.output.name / LAST
        target.parent.mkdir(parents=True)
        shutil.copy(rank.output / PREVIOUS, target)
    return tmp_path


def content(rank: Rank, name: str = "last.pt") -> str:
    """Return its digest without the options, because --output differs."""
    return digest({key: value for key, value in rank.checkpoint(name).items() if key not in ("sha256", "config")})


def test_every_node_writes_the_same(whole: list[Rank]) -> None:
    assert whole[0].checkpoint()["progress"]["validated"] == 2
    assert content(whole[0]) == content(whole[1])
    assert sorted(path.name for path in (whole[1].output / "checkpoints").iterdir()) == [
        "best.pt",
        "last.pt",
        "previous.pt",
    ]


@pytest.mark.parametrize("fault", ["wiped", "truncated"])
def test_a_node_without_a_complete_checkpoint_gets_one_from_another(
    copied: Path, options: list[str], whole: list[Rank], fault: str
) -> None:
    """Rank 0 has none, in a new generation, which first saves it on every node."""
    if fault == "wiped":
        shutil.rmtree(copied / "0")
    else:
        (copied / "0" / LAST).write_bytes((copied / "0" / LAST).read_bytes()[:5000])
    again = run(copied, 2, *options, nodes=2, env={"LAUNCHER_GENERATION": "2"})
    assert f"resumed {copied}/1/{LAST} of rank 1 on " in again[0].text
    assert ("last.pt: damaged" in again[0].text) == (fault == "truncated")
    assert again[0].digest == whole[0].digest
    assert again[0].checkpoint()["generation"] == 2
    assert content(again[0]) == content(again[1])


def change(file: Path, **values: object) -> None:
    state = torch.load(file, weights_only=True) | values
    del state["sha256"]
    torch.save(state | {"sha256": digest(state)}, file)


def test_generations_of_an_earlier_run_are_older_than_those_of_this_one(
    copied: Path, options: list[str], whole: list[Rank]
) -> None:
    """Node 1 was a spare: it has only the checkpoint copied by `up --resume`."""
    shutil.copy(whole[1].output / LAST, copied / "1" / LAST)
    change(copied / "1" / LAST, generation=9, run="earlier")
    change(copied / "0" / LAST, generation=1)
    again = run(copied, 2, *options, nodes=2, env={"LAUNCHER_GENERATION": "2"})
    assert f"resumed {copied}/0/{LAST} at epoch 2, step 0" in again[0].text
    assert again[0].digest == whole[0].digest


def test_a_superseded_generation_is_not_used(copied: Path, options: list[str], whole: list[Rank]) -> None:
    """Node 0 was unreachable: it is an epoch ahead, in an older generation."""
    change(copied / "1" / LAST, generation=3)
    shutil.copy(whole[0].output / LAST, copied / "0" / LAST)
    again = run(copied, 2, *options, nodes=2, env={"LAUNCHER_GENERATION": "4"})
    assert "of rank 1 on " in again[0].text
    assert "at epoch 2, step 0" in again[0].text
    assert again[0].digest == whole[0].digest


def test_one_rank_writes_if_nodes_share_the_folder(options: list[str], tmp_path: Path) -> None:
    ranks = run(tmp_path, 2, *options, "--output", tmp_path / "shared", "--epochs", "1", nodes=2)
    assert sorted(path.name for path in (tmp_path / "shared" / "checkpoints").iterdir()) == ["best.pt", "last.pt"]
    assert ranks[0].digest == ranks[1].digest


def test_a_world_that_lacks_a_node_takes_the_same_global_batches(options: list[str], tmp_path: Path) -> None:
    """One rank instead of two: two micro-batches a step, none larger than the job's own."""
    small = [*options[:2], *SMALL.split()]
    full = run(tmp_path / "full", 2, *small)[0]
    lacking = run(tmp_path / "lacking", 1, *small, env={"LAUNCHER_FULL_WORLD": "2"})[0]
    for name, weights in full.checkpoint()["model"].items():
        assert (lacking.checkpoint()["model"][name] - weights).abs().max() < 1e-10
    assert [rank.metrics("start")[0]["global_batch"] for rank in (full, lacking)] == [8, 8]


@pytest.mark.parametrize("kind", ["model", "pipeline", "fsdp", "hsdp", "dual_batch"])
def test_only_a_replicated_model_is_replicated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainError, match=f"--parallel {kind} does not support --replicate True"):
        check(Config(data="", replicate=True), kind, "none", [1, 1], "cpu")
    monkeypatch.setenv("LAUNCHER_MIN_NODES", "2")
    with pytest.raises(TrainError, match=f"--parallel {kind} does not support the job's min_nodes"):
        check(Config(data=""), kind, "none", [1, 1], "cpu")
