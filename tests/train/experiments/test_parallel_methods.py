"""Every parallel method computes the same as one process, compared by checkpoint and metrics."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.runs import Rank, digit_tree, finish, run, start
from tests.train.steps import accumulate
from train.config import Config
from train.data.batch import Batch
from train.distributed.methods import make_step
from train.distributed.world import World
from train.errors import TrainError
from train.experiments.dp import Replicas
from train.experiments.model import stages
from train.models import make_model, parameter_count
from train.precision import choose_precision
from train.step import Plan

CPU = torch.device("cpu")

# 37 images in global batches of 8: five steps per epoch, the last one with 5 images
OPTIONS = "--image-size 16 --val-resize 16 --augment shift --lr 0.5 --workers 1 --log-every 1 --device cpu"
COMMON = OPTIONS.split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 37, 11)


def weights(rank: Rank) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = rank.checkpoint()["model"]
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between corresponding numbers, including running statistics."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def losses(rank: Rank) -> list[Any]:
    return [(step["step"], step["loss"], step["top1"]) for step in rank.metrics("step")]


@pytest.mark.ci
@pytest.mark.parametrize(("arch", "ranks"), [("cifar_mobilenet_v2", 4), ("cifar_resnet20", 3)])
def test_model_parallel_equals_one_process_bit_for_bit(data: Path, tmp_path: Path, arch: str, ranks: int) -> None:
    options = ["--data", data, "--arch", arch, "--batch-size", 8, "--epochs", 1, *COMMON]
    alone = run(tmp_path / "alone", 1, *options)[0]
    staged = run(tmp_path / "staged", ranks, "--parallel", "model", *options)[0]
    one, many = weights(alone), weights(staged)
    assert one.keys() == many.keys()
    assert [name for name in one if not torch.equal(one[name], many[name])] == []
    assert any("running_mean" in name and one[name].abs().max() > 0 for name in one)
    assert losses(alone) == losses(staged)
    assert len(losses(alone)) == 5
    assert alone.metrics("epoch")[0]["val"] == staged.metrics("epoch")[0]["val"]
    assert staged.metrics("start")[0]["parallel"] == "model"


@pytest.mark.ci
def test_model_parallel_resumes_where_it_stopped(data: Path, tmp_path: Path) -> None:
    options = ["--data", data, "--arch", "cifar_resnet20", "--batch-size", 8, "--parallel", "model", *COMMON]
    flat = ["--schedule", "multistep", "--warmup", "0", "--milestones", "1"]
    whole = run(tmp_path / "whole", 2, *options, *flat, "--epochs", 2)[0]
    run(tmp_path / "parts", 2, *options, *flat, "--epochs", 1)
    parts = run(tmp_path / "parts", 2, *options, *flat, "--epochs", 2)[0]
    assert distance(weights(whole), weights(parts)) == 0


@pytest.fixture(scope="module")
def accumulated(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Rank:
    options = ["--batch-size", 2, "--accumulate", 4, "--last-batch", "drop", "--dtype", "float64", "--epochs", 1]
    return run(tmp_path_factory.mktemp("alone"), 1, "--data", data, "--arch", "cifar_resnet20", *options, *COMMON)[0]


@pytest.mark.ci
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines_equal_gradient_accumulation(data: Path, tmp_path: Path, accumulated: Rank, schedule: str) -> None:
    options = ["--batch-size", 8, "--micro-batches", 4, "--last-batch", "drop", "--dtype", "float64", "--epochs", 1]
    method = ["--parallel", "pipeline", "--pipeline-schedule", schedule]
    first = run(tmp_path, 2, "--data", data, "--arch", "cifar_resnet20", *options, *method, *COMMON)[0]
    assert distance(weights(first), weights(accumulated)) < 1e-6
    for ours, theirs in zip(losses(first), losses(accumulated), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.ci
def test_a_pipeline_in_bf16_equals_gradient_accumulation_in_bf16(data: Path, tmp_path: Path) -> None:
    options = ["--data", data, "--arch", "cifar_resnet20", "--last-batch", "drop", "--epochs", 1, "--amp", "bf16"]
    method = ["--parallel", "pipeline", "--micro-batches", 2, "--batch-size", 8]
    alone = run(tmp_path / "alone", 1, "--batch-size", 4, "--accumulate", 2, *options, *COMMON)[0]
    staged = run(tmp_path / "staged", 2, *method, *options, *COMMON)[0]
    assert losses(staged) == losses(alone)
    assert distance(weights(staged), weights(alone)) == 0


def test_data_parallel_equals_ddp(data: Path, tmp_path: Path) -> None:
    """With batch norm, which uses a replica's piece or a rank's piece; the pieces are equal."""
    options = ["--data", data, "--arch", "cifar_resnet20", "--dtype", "float64", "--epochs", 1, *COMMON]
    options += ["--last-batch", "drop"]
    replicas = run(tmp_path / "dp", 1, "--parallel", "dp", "--replicas", 2, "--batch-size", 8, *options)[0]
    ranks = run(tmp_path / "ddp", 2, "--batch-size", 4, *options)[0]
    # A weight is its initial value minus the sum of rate * gradient, at rates of at least 0.02: no gradient differs by
    # as much as 1e-6
    assert distance(weights(replicas), weights(ranks)) < 1e-9
    assert replicas.metrics("start")[0]["devices"] == ranks.metrics("start")[0]["devices"] == 2
    assert len(losses(ranks)) == 4


def test_synchronised_batch_norm_trains_like_one_process(data: Path, tmp_path: Path) -> None:
    """Plain batch norm of the whole batch is the reference, even for the last batch with 3 and 2 images."""
    options = ["--data", data, "--arch", "cifar_resnet20", "--dtype", "float64", "--epochs", 1, *COMMON]
    alone = run(tmp_path / "alone", 1, "--batch-size", 8, *options)[0]
    ranks = run(tmp_path / "ranks", 2, "--batch-size", 4, "--syncbn", "custom", *options)[0]
    assert distance(weights(alone), weights(ranks)) < 1e-6
    assert len(losses(ranks)) == 5
    for ours, theirs in zip(losses(ranks), losses(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_replicas_gradients_are_summed_and_the_first_replicas_statistics_kept() -> None:
    """5 over 3 is 2, 2, 1, as nn.DataParallel splits."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    x = torch.randn(5, 3, dtype=torch.float64)
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    Replicas(module, 3)(x).square().sum().backward()
    for ours, theirs in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=0, atol=1e-12)
    module.train()
    Replicas(module, 2)(x[:4])
    own = nn.BatchNorm1d(4).double()
    own(module[0](x[:2]))
    torch.testing.assert_close(module[1].running_mean, own.running_mean)


def test_mobilenet_and_its_stages_are_as_published() -> None:
    model = make_model("cifar_mobilenet_v2", 10)
    assert parameter_count(model) == 2_296_922
    x, shapes = torch.zeros(2, 3, 32, 32), []
    model.eval()
    for stage in stages(model, "cifar_mobilenet_v2", 4):
        x = stage(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(2, 16, 32, 32), (2, 64, 8, 8), (2, 160, 4, 4), (2, 10)]
    bare = make_model("cifar_mobilenet_v2_nobn", 10)
    assert not [part for part in bare.modules() if isinstance(part, nn.BatchNorm2d)]


@pytest.mark.parametrize("arch", ["smallcnn", "cifar_vgg16", "resnet18", "vgg11"])
def test_stages_in_sequence_equal_the_model(arch: str) -> None:
    torch.manual_seed(0)
    model = make_model(arch, 10).eval()
    x = torch.randn(1, 3, 32, 32)
    expected = model(x)
    for stage in stages(model, arch, 3):
        x = stage(x)
    assert torch.equal(x, expected)


def test_a_model_that_is_not_a_chain_is_refused() -> None:
    with pytest.raises(TrainError, match="cannot be split into stages"):
        stages(make_model("googlenet", 10), "googlenet", 2)
    with pytest.raises(TrainError, match="into 99 stages"):
        stages(make_model("smallcnn", 10), "smallcnn", 99)


def test_an_unsupported_method_is_refused_once(data: Path, tmp_path: Path) -> None:
    """Other combinations are in test_combinations.py."""
    options = ["--arch", "smallcnn", "--batch-size", 8, "--parallel", "dp", *COMMON]
    ranks = start(tmp_path, 2, "--data", data, *options)
    assert finish(ranks) == [2, 2]
    assert [rank.text.count("one process with all devices") for rank in ranks] == [1, 0]


def test_replicas_compute_in_the_runs_precision() -> None:
    """Each on a separate thread, where autocast has its defaults."""
    config = Config(data="", image_size=8, amp="bf16", parallel="dp", replicas=2)
    world, model, seen = World(0, 1, 0, 1, CPU, "none"), make_model("smallcnn", 10), list[torch.dtype]()
    model.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
    step = make_step(config, world, choose_precision(config, CPU), model)
    images = torch.zeros(4, 8, 8, 3, dtype=torch.uint8)
    accumulate(step, Batch(images, torch.arange(4), torch.ones(4), 4, last=True), Plan(0.1, 0))
    assert seen == [torch.bfloat16] * 2


@pytest.mark.ci
@pytest.mark.parametrize(
    ("world", "victim", "method"),
    [
        (3, 1, "--parallel model"),
        (3, 2, "--parallel model"),
        (2, 1, "--parallel pipeline --last-batch drop"),
        (2, 1, "--parallel ddp"),
        (2, 0, "--parallel ddp"),
    ],
)
def test_a_killed_process_ends_the_others_with_one_line(
    data: Path, tmp_path: Path, world: int, victim: int, method: str
) -> None:
    options = ["--batch-size", 8, "--epochs", 500, "--timeout", 10, *method.split(), *COMMON]
    ranks = start(tmp_path, world, "--data", data, "--arch", "smallcnn", *options)
    ranks[0].wait_for("Epoch: [1] val")
    os.kill(ranks[victim].process.pid, signal.SIGKILL)
    killed = time.monotonic()
    codes = finish(ranks)
    assert time.monotonic() - killed < 120  # the time limit is 10 s; a hang would not end
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [2] * (world - 1), "\n\n".join(rank.text for rank in ranks)
    for rank in ranks:
        if rank is not ranks[victim]:
            assert re.search(r"^train: error: rank \d of \d on \S+ lost another process: ", rank.text, re.MULTILINE)
            assert "Traceback" not in rank.text
