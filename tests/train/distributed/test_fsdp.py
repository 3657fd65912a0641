"""--parallel fsdp and hsdp: the same training as DDP, with checkpoints that any number of processes can read."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.train.experiments.test_parallel_methods import distance
from tests.train.runs import OLD, ROOT, Rank, digit_tree, finish, run, start
from train.distributed.fsdp import blocks, check_mean, only_products, unrounded
from train.distributed.world import World
from train.errors import TrainError
from train.models import make_model

pytestmark = pytest.mark.skipif(OLD, reason="torch before 2.6")

WORKER = (str(ROOT / "tests" / "train" / "programs" / "fsdp_worker.py"),)
COMPILING = ("-m", "tests.train.programs.compiling")
# ten updates of two micro-batches each; the last one and the validation are divided unevenly
OPTIONS = "--arch smallcnn --image-size 16 --epochs 1 --lr 2 --clip-norm 1 --dtype float64 --accumulate 2 --workers 1"
AVERAGED = ("--ema-decay", "0.9")
LAYOUT = ("--memory-format", "channels_last")  # what a GPU has by default; fully_shard refuses such weights
REST = ("--batch-size", "4", "--log-every", "1", "--print-digest", "--device", "cpu")
COMMON = (*OPTIONS.split(), *LAYOUT, *AVERAGED, *REST)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 157, 17)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    """An uninterrupted run on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, 2, "--data", data, "--parallel", "fsdp", "--checkpoints", folder / "checkpoints", *COMMON)


def best(ranks: list[Rank]) -> dict[str, torch.Tensor]:
    folder = ranks[0].output.parent / "checkpoints"
    return weights(torch.load(folder / "best.pt", weights_only=True))


def weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint and their averages."""
    return {f"{part}.{name}": value for part in ("model", "ema") for name, value in state[part].items()}


def test_a_run_equals_ddps(data: Path, tmp_path: Path, whole: list[Rank]) -> None:
    other = run(tmp_path, 2, "--data", data, "--parallel", "ddp", *COMMON)[0]
    assert len(other.metrics("step")) == 10
    assert distance(best(whole), weights(other.checkpoint())) < 1e-12
    assert whole[0].metrics("epoch")[0]["val"] == pytest.approx(other.metrics("epoch")[0]["val"], rel=1e-12)
    assert whole[0].digest == whole[1].digest


def test_a_torch_that_sums_where_a_mean_is_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.7.1 does over gloo."""

    def summed(mean: torch.Tensor, given: torch.Tensor, op: object) -> None:
        mean.fill_(given.sum())

    monkeypatch.setattr("torch.distributed.reduce_scatter_tensor", summed)
    with pytest.raises(TrainError, match="sums gradients over processes in place of averaging them on cpu"):
        check_mean(World(0, 2, 0, 2, torch.device("cpu"), "gloo"))


def test_all_ranks_start_from_rank_0s_weights(tmp_path: Path) -> None:
    """Otherwise the shards would be of different models."""
    data = digit_tree(tmp_path / "data", 32, 10)
    options = ["--data", data, "--parallel", "fsdp", *COMMON, "--arch", "tests.train.programs.unlike:build"]
    alike, unlike = (
        run(tmp_path / unlike, 2, *options, "--checkpoints", tmp_path / unlike / "checkpoints", env={"UNLIKE": unlike})
        for unlike in ("0", "1")
    )
    assert unlike[0].digest == alike[0].digest


@pytest.mark.parametrize("what", ["bf16", "bf16+compile"])
def test_bf16_equals_ddps(what: str, tmp_path: Path) -> None:
    """Autocast keeps the weights of norms in fp32, so they are not gathered in bf16. Sums of two have one order.

    Compiled, a block with a norm inside is one graph: there are no hooks between.
    """
    ranks = start(tmp_path, 2, what, tmp_path, program=WORKER)
    assert finish(ranks) == [0, 0], ranks[0].text
    result = json.loads(ranks[0].lines[-1])
    assert result["moved"] > 0.01
    assert result["distance"] == 0
    assert (result["graphs"], result["calls"]) == ((3, 5 * 20) if "compile" in what else (0, 0))


@pytest.mark.parametrize(
    ("arch", "rounded"), [("vit_b_16", {True}), ("resnet18", {True}), ("convnext_tiny", {True, False})]
)
def test_blocks_are_gathered_in_16_bits_where_autocast_rounds_all_their_weights(arch: str, rounded: set[bool]) -> None:
    """ConvNeXt has blocks with a scale, which autocast does not round."""
    with torch.device("meta"):
        model = make_model(arch, 10)
    assert {only_products(block) for block in blocks(model) if block not in unrounded(model)} == rounded


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.ci)])
def test_fp16_equals_ddps_and_an_overflow_in_one_shard_is_known_to_all(world: int, tmp_path: Path) -> None:
    """To the bit on two ranks; on three, sums differ by less than fp16 differs from fp32."""
    ranks = start(tmp_path, world, "fp16", tmp_path, program=WORKER)
    assert finish(ranks) == [0] * world, ranks[0].text
    every = [json.loads(rank.lines[-1]) for rank in ranks]
    for result in every:
        assert result["moved"] > 0.01
        assert result["rounding"] > 1e-5
        assert result["distance"] <= (0 if world == 2 else result["rounding"])
        assert result["applied"] == [False, True]
        assert result["scales"][1:] == [result["scales"][0] / 2] * 2
        assert result["still"]
    assert [result["overflow"] for result in every] == [rank == 1 for rank in range(world)]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.ci)])
def test_compiled_blocks_equal_one_process_uncompiled(world: int, tmp_path: Path) -> None:
    """Three updates of two micro-batches, the last one after two validations; every block runs compiled each time."""
    ranks = start(tmp_path, world, "compile", tmp_path, program=WORKER)
    assert finish(ranks) == [0] * world, ranks[0].text
    for result in (json.loads(rank.lines[-1]) for rank in ranks):
        assert result["moved"] > 0.01
        assert result["distance"] < 1e-12
        assert result["alike"], "other names in a checkpoint"
        assert result["about"].startswith("5 blocks with 89% of the weights")
        assert result["graphs"] == [3, 3, 6, 6, 6], "three kinds of blocks, compiled for training and for validation"
        assert result["calls"] == 5 * 10


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_blocks_of_generated_code_equal_one_process_uncompiled(tmp_path: Path) -> None:
    """Sums in another order: 1e-12 is thousands of times the rounding of a value of about 1."""
    ranks = start(tmp_path, 2, "inductor", tmp_path, program=WORKER, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert finish(ranks, 900) == [0, 0], ranks[0].text
    for result in (json.loads(rank.lines[-1]) for rank in ranks):
        assert result["moved"] > 0.01
        assert 0 < result["distance"] < 1e-12


@pytest.mark.ci
def test_compiled_and_uncompiled_runs_go_on_from_each_others_checkpoints(
    data: Path, tmp_path: Path, whole: list[Rank]
) -> None:
    """After the same uncompiled epoch, the second and third one of two runs: each has compiled one of them."""
    digests = []
    for name, compiled in (("first", (False, True)), ("second", (True, False))):
        kept = tmp_path / name / "checkpoints"
        shutil.copytree(whole[0].output.parent / "checkpoints", kept)
        for epochs, more in zip((2, 3), compiled, strict=True):
            options = ["--epochs", epochs, "--checkpoints", kept, *["--compile"] * more]
            ranks = run(tmp_path / name, 2, "--data", data, *COMMON, "--parallel", "fsdp", *options, program=COMPILING)
            assert "resumed" in ranks[0].text
            assert ("train: --compile: 8 blocks with 99% of the weights" in ranks[0].text) == more
            assert ("\n0 graphs" in ranks[0].text) != more
        digests.append(ranks[0].digest)
    assert digests[0] == digests[1]


@pytest.mark.ci
def test_three_ranks_equal_one_process(data: Path, tmp_path: Path) -> None:
    """Weights, their averages and the validation of these."""
    kept = ["--parallel", "fsdp", "--checkpoints", tmp_path / "runs" / "checkpoints"]
    three = run(tmp_path / "runs", 3, "--data", data, *COMMON, *kept)
    (alone,) = run(tmp_path / "alone", 1, "--data", data, *COMMON, "--batch-size", 12)
    assert len(alone.metrics("step")) == 7
    assert distance(best(three), weights(alone.checkpoint())) < 1e-12
    assert three[0].metrics("epoch")[0]["val"] == pytest.approx(alone.metrics("epoch")[0]["val"], rel=1e-12)


@pytest.mark.ci
def test_resuming_inside_an_epoch_is_bit_exact(data: Path, tmp_path: Path, whole: list[Rank]) -> None:
    method = ["--parallel", "fsdp", "--checkpoints", tmp_path / "checkpoints"]
    ranks = start(tmp_path, 2, "--data", data, *method, *COMMON)
    ranks[0].wait_for("Epoch: [1][3/")
    ranks[1].process.send_signal(signal.SIGTERM)
    assert finish(ranks) == [143, 143], ranks[0].text
    again = run(tmp_path, 2, "--data", data, *method, *COMMON)
    assert "resumed" in again[0].text
    assert again[0].digest == whole[0].digest
    assert distance(best(again), best(whole)) == 0


@pytest.mark.ci
def test_four_and_two_ranks_equal_ddp_and_read_the_same_bits(tmp_path: Path) -> None:
    """Saved by four ranks, in bf16 with AdamW; read by two. When the newest is damaged, the one before is read."""
    four = start(tmp_path, 4, "save", tmp_path / "checkpoints", program=WORKER)
    assert finish(four) == [0] * 4, four[0].text
    two = start(tmp_path, 2, "load", tmp_path / "checkpoints", program=WORKER)
    assert finish(two) == [0] * 2, two[0].text
    every = [json.loads(rank.lines[-1]) for rank in four]
    saved, first, second = every[0], *(json.loads(rank.lines[-1]) for rank in two)
    assert saved["moved on"], "the test cannot see a checkpoint of a later moment"
    assert saved["best is last"]
    assert all("Is a directory (rank 0)" in each["failed"] for each in every)
    for each in (saved, first):
        assert each["moved"] > 0.01
        assert each["distance"] < 1e-12
    assert first["digests"] == saved["digests"]
    assert (first["read"], first["then"]) == ("last.sharded", "previous.sharded")
    assert "__1_0.distcp: damaged" in first["why"]
    assert "a folder shared by all machines" in second["refused"]
    assert "refused" not in first


@pytest.mark.ci
def test_shards_inside_a_node_equal_one_process_and_are_read_by_any_number_of_ranks(data: Path, tmp_path: Path) -> None:
    """Four ranks that take themselves to be two nodes, stopped inside the epoch."""
    (alone,) = run(tmp_path / "alone", 1, "--data", data, *COMMON, "--batch-size", "16")
    assert len(alone.metrics("step")) == 5
    kept = tmp_path / "checkpoints"
    hsdp = ["--data", data, *COMMON, "--parallel", "hsdp", "--checkpoints"]
    ranks = start(tmp_path, 4, *hsdp, kept, nodes=2)
    ranks[0].wait_for("Epoch: [1][2/")
    ranks[3].process.send_signal(signal.SIGTERM)
    assert finish(ranks) == [143] * 4, ranks[0].text
    for name, world, options in [
        ("hsdp", 4, ["--parallel", "hsdp", "--compile"]),
        ("fsdp", 4, ["--parallel", "fsdp"]),
        ("fewer", 2, ["--parallel", "fsdp", "--batch-size", "8"]),
    ]:
        shutil.copytree(kept, tmp_path / name / "checkpoints")
        more = [*options, "--checkpoints", tmp_path / name / "checkpoints"]
        again = run(tmp_path / name, world, "--data", data, *COMMON, *more, nodes=2, program=COMPILING)
        assert "resumed" in again[0].text
        assert distance(best(again), weights(alone.checkpoint())) < 1e-12, name
    shards = FileSystemReader(kept / "last.sharded").read_metadata().state_dict_metadata["model.classifier.weight"]
    assert len(shards.chunks) == 2, "each node has all weights"
    whole = run(tmp_path / "whole", 4, *hsdp, tmp_path / "whole" / "checkpoints", nodes=2)
    assert distance(best(whole), weights(alone.checkpoint())) < 1e-12
    assert distance(weights(torch.load(tmp_path / "hsdp" / "checkpoints" / "best.pt")), best(whole)) == 0
    assert len({rank.digest for rank in whole}) == 1


@pytest.mark.parametrize(
    ("arch", "kind", "count"),
    [("resnet50", "Bottleneck", 16), ("vit_b_16", "EncoderBlock", 12), ("swin_t", "SwinTransformerBlock", 12)],
)
def test_a_models_blocks_are_gathered_one_at_a_time(arch: str, kind: str, count: int) -> None:
    with torch.device("meta"):
        found = [type(block).__name__ for block in blocks(make_model(arch, 10))]
    assert found.count(kind) == count
    assert len(found) < count + 8


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_checkpoint(data: Path, tmp_path: Path) -> None:
    """There is room for the shard of one rank."""
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "launcher-test", folder], check=True)
    try:
        ranks = start(tmp_path, 2, "--data", data, *COMMON, "--parallel", "fsdp", "--checkpoints", folder)
        assert finish(ranks) == [2, 2], ranks[0].text
        assert [path.name for path in folder.iterdir()] == []
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    (error,) = [line for rank in ranks for line in rank.lines if "error: " in line]
    assert "No space left on device (rank " in error


@pytest.mark.ci
def test_hsdp_notices_a_silent_rank_of_its_node_after_the_timeout(data: Path, tmp_path: Path) -> None:
    """Rank 2 waits for rank 3 in a group of their node only."""
    options = ["--parallel", "hsdp", "--checkpoints", tmp_path / "checkpoints", "--timeout", 20, "--epochs", 50]
    ranks = start(tmp_path, 4, "--data", data, *COMMON, *options, nodes=2)
    ranks[0].wait_for("Epoch: [1][2/")
    ranks[3].process.send_signal(signal.SIGSTOP)
    assert ranks[2].process.wait(150) == 2, ranks[2].text
    assert "rank 2 of 4 on " in ranks[2].text
    assert "lost another process" in ranks[2].text
    for rank in ranks:
        rank.process.kill()
