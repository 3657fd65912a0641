"""An interrupted run ends bitwise identical to an uninterrupted one."""

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.train.runs import DIGITS, SECONDS, Rank, digit_tree, finish, run, start
from train.__main__ import main
from train.checkpoint import write
from train.config import Config, parse
from train.distributed.methods import make_step
from train.distributed.world import World
from train.errors import TrainError
from train.models import make_model
from train.precision import LossScale, choose_precision
from train.trainer import Trainer

# batch norm, random crops and flips: everything with state or randomness
OPTIONS = "--arch cifar_resnet20 --image-size 16 --crop-scale 0.5 --epochs 3 --batch-size 4 --lr 0.5 --log-every 1"
COMMON = (*OPTIONS.split(), "--print-digest", "--workers", "1")
# two ranks add gradients in one order only; unequal shares, together of the size of two equal ones
THREE = ("--batch-size 2", "--batch-size 3", "--batch-size 3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 70, 21)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    """A run that is not interrupted."""
    return run(tmp_path_factory.mktemp("whole"), 3, "--data", data, *COMMON, own=THREE)


@pytest.fixture(scope="module")
def stopped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Rank], list[int]]:
    """SIGTERM to rank 1 only, inside the second epoch."""
    ranks = start(tmp_path_factory.mktemp("stopped"), 3, "--data", data, *COMMON, own=THREE)
    ranks[0].wait_for("Epoch: [2][2/")
    ranks[1].process.send_signal(signal.SIGTERM)
    return ranks, finish(ranks)


@pytest.fixture(scope="module")
def resumed(stopped: tuple[list[Rank], list[int]], data: Path) -> list[Rank]:
    return run(stopped[0][0].output.parent, 3, "--data", data, *COMMON, own=THREE)


def test_sigterm_on_one_rank_stops_all_with_a_checkpoint(stopped: tuple[list[Rank], list[int]]) -> None:
    ranks, codes = stopped
    assert codes == [143] * 3, ranks[0].text
    progress = ranks[0].checkpoint()["progress"]
    assert (progress["epoch"], progress["validated"]) == (1, 1)
    assert 2 <= progress["step"] < 9
    assert f"stopped at epoch 2, step {progress['step']}" in ranks[0].lines[-1]
    assert not ranks[1].output.exists()


def test_resuming_inside_an_epoch_is_bit_exact(whole: list[Rank], resumed: list[Rank]) -> None:
    assert resumed[0].digest == resumed[1].digest == resumed[2].digest == whole[0].digest
    ours, theirs = resumed[0].checkpoint(), whole[0].checkpoint()
    for name, value in theirs["model"].items():  # running statistics too
        assert torch.equal(ours["model"][name], value), name
    for key, state in theirs["optimizer"]["state"].items():
        assert torch.equal(ours["optimizer"]["state"][key]["momentum_buffer"], state["momentum_buffer"])
    assert ours["progress"]["best"] == theirs["progress"]["best"]


def test_reported_numbers_continue_after_resuming(whole: list[Rank], resumed: list[Rank]) -> None:
    ours, theirs = resumed[0].metrics("epoch"), whole[0].metrics("epoch")
    assert [line["epoch"] for line in ours] == [1, 2, 3]
    for a, b in zip(ours, theirs, strict=True):
        assert a["val"] == b["val"]
        assert a["train"] == pytest.approx(b["train"], rel=1e-12)
    assert resumed[0].metrics("start")[1]["step"] == resumed[0].metrics("end")[0]["step"]
    assert [line["step"] for line in resumed[0].metrics("step")] == list(range(1, 28))


def test_resuming_after_a_kill_between_epochs_is_bit_exact(whole: list[Rank], data: Path, tmp_path: Path) -> None:
    ranks = start(tmp_path, 3, "--data", data, *COMMON, own=THREE)
    ranks[0].wait_for("Epoch: [3][1/")  # the checkpoint of epoch 2 is written while epoch 3 begins
    for rank in ranks:
        rank.process.kill()
    assert finish(ranks) == [-signal.SIGKILL] * 3
    again = run(tmp_path, 3, "--data", data, *COMMON, own=THREE)
    assert again[0].digest == whole[0].digest
    curves = EventAccumulator(str(tmp_path / "0" / "tensorboard")).Reload()
    for tag, steps in (("Loss/train", list(range(1, 28))), ("Accuracy/val", [9, 18, 27])):
        assert [event.step for event in curves.Scalars(tag)] == steps, tag


@pytest.mark.ci
def test_resuming_after_a_kill_inside_an_epoch_is_bit_exact(data: Path, tmp_path: Path) -> None:
    """Weights, log lines of an interval (a checkpoint is within one), and the curves, without a gap."""
    options = ["--data", data, *COMMON, "--log-every", 4, "--checkpoint-every", 3]
    whole = run(tmp_path / "whole", 2, *options)
    ranks = start(tmp_path / "killed", 2, *options)
    ranks[0].wait_for("Epoch: [2][8/")
    for rank in ranks:
        rank.process.kill()
    finish(ranks)
    killed = ranks[0].checkpoint()["progress"]
    assert (killed["epoch"], killed["step"]) in ((1, 3), (1, 6))  # the file of step 6 may not have been complete
    again = run(tmp_path / "killed", 2, *options)
    assert f"resumed {again[0].output}/checkpoints/last.pt at epoch 2, step {killed['step']}" in again[0].text
    assert again[0].digest == whole[0].digest
    last = {line["step"]: line for line in again[0].metrics("step")}
    for line in whole[0].metrics("step"):
        for value in ("loss", "top1", "lr"):
            assert last[line["step"]][value] == line[value]
    curves = [EventAccumulator(str(rank.output / "tensorboard")).Reload() for rank in (whole[0], again[0])]
    for tag in ("Loss/train", "Accuracy/train", "LR", "Loss/val"):
        ours, theirs = ([(event.step, event.value) for event in curve.Scalars(tag)] for curve in curves)
        assert ours == theirs, tag


def test_a_checkpoint_falls_on_a_step_that_rank_0_announces(tmp_path: Path) -> None:
    """With a time instead of steps: all ranks save at the time of rank 0's clock."""
    options = ["--data", DIGITS, *COMMON, "--epochs", 40, "--batch-size", 2, "--checkpoint-every", "1s"]
    ranks = start(tmp_path, 2, *options)
    file = tmp_path / "0" / "checkpoints" / "last.pt"
    deadline = time.monotonic() + SECONDS
    while not (file.exists() and ranks[0].checkpoint()["progress"]["step"]):
        assert ranks[0].process.poll() is None, ranks[0].text
        assert time.monotonic() < deadline, ranks[0].text
        time.sleep(0.05)
    for rank in ranks:
        rank.process.kill()
    finish(ranks)
    assert ranks[0].checkpoint()["progress"]["step"] > 0


NAMED = [{"LAUNCHER_RUN": "ours"}, {"LAUNCHER_RUN": "ours"}, {"LAUNCHER_RUN": "another"}]
COUNTED = [{"TORCHELASTIC_RESTART_COUNT": number} for number in ("0", "1", "0")]


@pytest.mark.ci
@pytest.mark.parametrize("envs", [NAMED, COUNTED], ids=["the launcher", "torchrun"])
@pytest.mark.parametrize("how", ["a path", "none"])
def test_a_restarted_run_goes_on_from_its_own_checkpoint(
    data: Path, tmp_path: Path, how: str, envs: list[dict[str, str]]
) -> None:
    """The launcher and torchrun restart a run with the same options: wherever they begin, its progress is kept."""
    options = ["--data", data, *COMMON, "--resume", "none"]
    if how == "a path":
        options[-1] = run(tmp_path / "earlier", 1, "--data", data, *COMMON, "--epochs", 1)[0].output / "checkpoints"
    (stopped,) = start(tmp_path / "later", 1, *options, env=envs[0])
    stopped.wait_for("Epoch: [2][2/")
    stopped.process.send_signal(signal.SIGTERM)
    assert finish([stopped]) == [143], stopped.text
    (again,) = run(tmp_path / "later", 1, *options, env=envs[1])
    assert f"resumed {again.output}/checkpoints/last.pt at epoch 2, step " in again.text
    (other,) = start(tmp_path / "later", 1, *options, env=envs[2])
    (code,) = finish([other])
    if how == "none":
        assert code == 2
        assert "would be overwritten" in other.text
    else:
        assert f"resumed {options[-1]}/last.pt at epoch 2, step 0" in other.text


def test_a_restart_before_the_first_checkpoint_begins_again_where_the_run_began(data: Path, tmp_path: Path) -> None:
    """And not with what an earlier run has left in the folder, here the run that goes back to an earlier epoch."""
    options = "--arch smallcnn --image-size 8 --batch-size 16 --workers 1 --threads 1 --keep 2 --epochs 2"
    (first,) = run(tmp_path, 1, "--data", data, *options.split())
    back = first.output / "checkpoints" / "epoch-0001.pt"
    env = {"TORCHELASTIC_RESTART_COUNT": "1"}
    (again,) = run(tmp_path, 1, "--data", data, *options.split(), "--resume", back, env=env)
    assert f"resumed {back} at epoch 2, step 0" in again.text


OTHER = "--arch smallcnn --image-size 8 --batch-size 16 --workers 1 --threads 1 --keep 3 --lr 1e-9"


def test_best_weights_that_are_not_there_are_made_again(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """best.pt was removed, or is of a later epoch than the checkpoint that is resumed elsewhere."""
    common, a, b = ["--data", str(data), *OTHER.split()], tmp_path / "a", tmp_path / "b"
    assert main([*common, "--output", str(a), "--epochs", "1"]) == 0
    (a / "checkpoints" / "best.pt").unlink()
    assert main([*common, "--output", str(a), "--epochs", "2"]) == 0
    assert "is not here; the next validation makes one" in capfd.readouterr().out
    assert torch.load(a / "checkpoints" / "best.pt", weights_only=True)["progress"]["epoch"] == 2
    state = torch.load(a / "checkpoints" / "epoch-0001.pt", weights_only=True)
    state["progress"]["best"] += 1
    del state["sha256"]
    write(a / "checkpoints" / "epoch-0001.pt", state)
    named = ["--resume", str(a / "checkpoints" / "epoch-0001.pt"), "--output", str(b), "--epochs", "2"]
    assert main([*common, *named]) == 0
    assert "is not here; the next validation makes one" in capfd.readouterr().out
    assert torch.load(b / "checkpoints" / "best.pt", weights_only=True)["progress"]["epoch"] == 2


def test_a_resumed_run_keeps_no_copy_of_its_checkpoint(data: Path, tmp_path: Path) -> None:
    options = "--arch cifar_resnet20 --image-size 8 --batch-size 16 --workers 1 --threads 1 --epochs 1 --ema-decay 0.9"
    more = ["--data", str(data), "--output", str(tmp_path), "--optimizer", "adamw", "--lr", "0.001"]
    assert main([*options.split(), *more]) == 0
    before = tensor_bytes()
    trainer = Trainer(parse([*options.split(), *more, "--epochs", "2"]), World(0, 1, 0, 1, torch.device("cpu"), "none"))
    weights = sum(value.nbytes for value in trainer.model.parameters())
    assert 4 * weights <= tensor_bytes() - before < 5 * weights  # they, two moments, the average
    trainer.close()


def tensor_bytes() -> int:
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}.values())


@pytest.mark.parametrize("wrong", ["0", "-1", "5 minutes", "1.5m"])
def test_checkpoint_every_is_steps_or_a_time(wrong: str) -> None:
    with pytest.raises(TrainError, match="neither steps, such as 500, nor a time, such as 5m"):
        parse(["--data", "x", f"--checkpoint-every={wrong}"])


def test_resuming_on_one_rank_keeps_the_order_of_images(data: Path, tmp_path: Path) -> None:
    """Stopped on two ranks, resumed on one with the same global batch: equal to 1e-10 in float64."""
    options = [
        "--arch",
        "smallcnn",
        "--image-size",
        "16",
        "--epochs",
        "2",
        "--log-every",
        "1",
        "--dtype",
        "float64",
        "--workers",
        "1",
    ]
    options += ["--data", str(data)]
    ranks = start(tmp_path / "cut", 2, *options, "--batch-size", 4)
    ranks[0].wait_for("Epoch: [1][3/")
    ranks[0].process.send_signal(signal.SIGTERM)
    assert finish(ranks) == [143, 143]
    cut = run(tmp_path / "cut", 1, *options, "--batch-size", 8)[0].checkpoint()["model"]
    full = run(tmp_path / "full", 1, *options, "--batch-size", 8)[0].checkpoint()["model"]
    assert max((cut[name] - full[name]).abs().max().item() for name in full) < 1e-10


def test_resuming_a_finished_run_exits_immediately(resumed: list[Rank], data: Path) -> None:
    before = (resumed[0].output / "checkpoints" / "last.pt").stat().st_mtime_ns
    again = run(resumed[0].output.parent, 1, "--data", data, *COMMON)
    assert "nothing to do: 3 epochs of 3 are done" in again[0].text
    assert (resumed[0].output / "checkpoints" / "last.pt").stat().st_mtime_ns == before


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(whole: list[Rank], data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "0" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("last.pt", "previous.pt"):
        (folder / name).write_bytes((whole[0].output / "checkpoints" / name).read_bytes())
    with (folder / "last.pt").open("r+b") as file:
        file.seek(-200_000, os.SEEK_END)
        file.write(b"\xff" * 64)
    again = run(tmp_path, 3, "--data", data, *COMMON, own=THREE)
    assert "last.pt: damaged" in again[0].text
    assert "resumed" in again[0].text
    assert again[0].digest == whole[0].digest


def test_new_settings_count_after_resuming(data: Path, tmp_path: Path) -> None:
    options = "--arch smallcnn --image-size 8 --batch-size 16 --workers 1 --threads 1"
    common = ["--data", str(data), "--output", str(tmp_path), *options.split()]
    assert main([*common, "--epochs", "1"]) == 0
    new = ["--weight-decay", "0.01", "--momentum", "0.5", "--nesterov"]
    assert main([*common, "--epochs", "2", *new]) == 0
    state = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    settings = [[group[name] for name in ("weight_decay", "momentum", "nesterov")] for group in groups]
    assert settings == [[0.01, 0.5, True], [0.0, 0.5, True]]


def test_a_checkpoint_of_stages_fits_stages_only() -> None:
    config = Config(data="", image_size=8)
    cpu, world = torch.device("cpu"), World(0, 1, 0, 1, torch.device("cpu"), "none")
    step = make_step(config, world, choose_precision(config, cpu), make_model("smallcnn", 10))
    with pytest.raises(TrainError, match="has 2 stages; use the same --parallel"):
        step.load_state({"optimizer": {"stages": [{}, {}]}})


def test_a_loss_scale_starts_fresh_after_a_run_without() -> None:
    scale = LossScale(enabled=True)
    scale.load_state_dict(LossScale(enabled=False).state_dict())
    assert scale.value == 2**16
    halved = LossScale(enabled=True)
    halved.unscale([torch.tensor([float("inf")])])
    scale.load_state_dict(halved.state_dict())
    assert scale.value == 2**15
