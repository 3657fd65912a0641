"""Code of the trainer that runs only on a GPU, on a CPU that pretends to be a GPU (tests/gpu/pretend.py)."""

import itertools
import json
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.gpu import pretend
from tests.train.runs import digit_tree, finish, run, start
from tests.train.trainer.test_combinations import problem
from train.checkpoint import HostCopy, Saver, map_tensors, read
from train.config import Config, parse
from train.distributed.world import StopSignal, World, choose_device
from train.distributed.world import start as join
from train.errors import TrainError
from train.experiments import dp, syncbn
from train.experiments.dual_batch import cli
from train.hardware import device_name, near_cores, peak_memory
from train.metrics import Closed, Meter, read_late
from train.models import SmallCNN
from train.optim import has_fused_kernel, load_state, make_optimizer
from train.precision import choose_precision
from train.timing import OwnWork
from train.trainer import Trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
METHODS = ("auto", "fsdp --optimizer adamw --ema-decay 0.9", pytest.param("model", marks=pytest.mark.slow), "pipeline")
ALONE = World(0, 1, 0, 1, GPU, "none")


def test_the_device() -> None:
    config = Config(data="")
    with pretend.gpu(2):
        assert [choose_device(config, rank, 2) for rank in range(2)] == [GPU, torch.device("cuda", 1)]
        assert choose_device(replace(config, device="cpu"), 0, 2) == CPU
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.benchmark
        choose_device(replace(config, tf32=False), 0, 1)
        assert not torch.backends.cudnn.allow_tf32
        with pytest.raises(TrainError, match="3 processes on this machine, but 2 GPUs"):
            choose_device(config, 0, 3)
    with pretend.gpu(0), pytest.raises(TrainError, match="torch found no GPU"):
        choose_device(replace(config, device="cuda"), 0, 1)


@pytest.mark.parametrize(
    ("capability", "name", "scaled"), [((7, 5), "fp16", True), ((8, 0), "bf16", False), ((9, 0), "bf16", False)]
)
def test_precision_and_layout(capability: tuple[int, int], name: str, scaled: bool) -> None:
    with pretend.gpu(capability=capability):
        found = choose_precision(Config(data=""), GPU)
        assert (found.name, found.scaled, found.weights) == (name, scaled, torch.float32)
        assert found.layout == found.weights_layout == torch.channels_last
        divided = choose_precision(Config(data="", parallel="fsdp"), GPU)
        assert (divided.layout, divided.weights_layout) == (torch.channels_last, torch.contiguous_format)
        assert choose_precision(Config(data="", parallel="pipeline"), GPU).layout == torch.contiguous_format
        assert choose_precision(Config(data="", dtype="float64"), GPU).name == "none"
        assert choose_precision(Config(data="", memory_format="contiguous"), GPU).layout == torch.contiguous_format


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_optimiser_is_fused(kind: str) -> None:
    """With the same result. Not SGD for sharded weights, nor for fp64, for which some GPUs have no kernel."""
    assert not has_fused_kernel(nn.Parameter(torch.ones(1)))
    config = Config(data="", optimizer=kind, nesterov=kind == "sgd")
    torch.manual_seed(0)
    models = [SmallCNN(10) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with pretend.gpu():
        sharded = make_optimizer(replace(config, parallel="fsdp"), models[0])
        assert sharded.defaults["fused"] == (kind == "adamw")
        assert not make_optimizer(config, SmallCNN(10).double()).defaults["fused"]
        fused = make_optimizer(config, models[0])
    plain = make_optimizer(config, models[1])
    assert (fused.defaults["fused"], plain.defaults["fused"]) == (True, False)
    pairs = list(zip(models[0].parameters(), models[1].parameters(), strict=True))
    for _ in range(3):
        for ours, theirs in pairs:  # the same gradients: AdamW makes much of rounding in small ones
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        for optimizer in (fused, plain):
            optimizer.step()
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lars"])
def test_a_resumed_optimiser_has_the_layout_of_its_weights(kind: str) -> None:
    """Rank 0's momenta arrive contiguous, and a checkpoint may have another layout: fused kernels do not check."""
    config, found = Config(data="", optimizer=kind), list[list[torch.Tensor]]()

    def advance(optimizer: torch.optim.Optimizer, model: nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
        optimizer.step()

    for resumed in (False, True):
        torch.manual_seed(0)
        model = SmallCNN(10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with pretend.gpu():
            optimizer = make_optimizer(config, model)
            advance(optimizer, model, 1)
            if resumed:
                state = map_tensors(optimizer.state_dict(), lambda tensor: tensor.contiguous().clone())
                optimizer = make_optimizer(config, model)
                load_state(optimizer, state)
            advance(optimizer, model, 2)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica per GPU, created by torch's DataParallel."""
    monkeypatch.setattr(nn, "DataParallel", lambda model, devices: (model, devices))
    with pretend.gpu(4):
        assert dp.devices(Config(data=""), ALONE) == 4
        assert dp.devices(Config(data="", replicas=2), ALONE) == 2
        with pytest.raises(TrainError, match="--replicas 5: there are 4 GPUs"):
            dp.devices(Config(data="", replicas=5), ALONE)
        model = SmallCNN(10)
        assert dp.wrap(model, ALONE, Config(data="")) == (model, [0, 1, 2, 3])


def test_options_of_a_gpu() -> None:
    assert problem("--syncbn library", device="cuda") == ""


def test_the_machine() -> None:
    with pretend.gpu():
        assert device_name(GPU) == pretend.NAME
        assert peak_memory(GPU) == 1e-6
        assert near_cores(0) == frozenset()


def test_costs_are_measured_on_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["fit", "--arch", "smallcnn", "--image-size", "8", "--batches", "2", "256", "--repeats", "2", "--json"]
    # Steps of 2 and of 256 samples in turn, timed at their start and end: each takes 1 s and 1 s per 256 samples.
    times = itertools.accumulate(itertools.cycle([1, 1 + 2 / 256, 1, 2]))
    monkeypatch.setattr("train.experiments.dual_batch.fit.time", SimpleNamespace(perf_counter=lambda: next(times)))
    with pretend.gpu():
        cli.main(options)
    found = json.loads(capsys.readouterr().out)
    assert (found["a"], found["b"]) == (pytest.approx(1 / 256), pytest.approx(1))
    with pretend.gpu(0), pytest.raises(TrainError, match="torch found no GPU"):
        cli.main([*options, "--device", "cuda"])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_synchronised_batch_norm_by_kernels(layout: torch.memory_format, kind: torch.dtype) -> None:
    """Passes with single kernels on a GPU equal the others, also at a mean of 100; an empty batch is not an error."""
    assert not syncbn.has_kernels(torch.ones(1))
    torch.manual_seed(0)
    x = (torch.randn(9, 4, 5, 5) * 3 + (100 if kind is torch.float32 else 0)).to(kind).contiguous(memory_format=layout)
    incoming = torch.randn(9, 4, 5, 5).to(kind)
    found: list[list[torch.Tensor]] = []
    for gpu in (False, True):
        layer, mine = syncbn.SyncBatchNorm(4), x.clone().requires_grad_()
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2, 4))
        with pretend.gpu() if gpu else nullcontext():
            out = layer(mine)
            out.backward(incoming)
            empty = syncbn.SyncBatchNorm(4)(torch.empty(0, 4, 5, 5, requires_grad=True))
        assert empty.shape == (0, 4, 5, 5)
        assert out.is_contiguous(memory_format=layout)
        assert mine.grad is not None
        parts = [out, mine.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]
        found.append([part.detach().float() for part in parts if part is not None])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < (1e-5 if kind is torch.float32 else 1e-2)


class Numbered(NamedTuple):
    number: int

    def figures(self) -> list[float]:
        return [self.number]


def of(closed: Closed[str] | None) -> list[tuple[list[float], float]]:
    return [(closed.sums.tolist(), closed.figures.item())] if closed else []


def reports(device: torch.device) -> list[Any]:
    """Return a meter's reports in order: seven steps in intervals of two, with a checkpoint after the fifth."""
    seen: list[Any] = []
    with pretend.gpu():
        meter: Meter[str] = Meter(replace(ALONE, device=device))
        for step in range(1, 8):
            meter.add(torch.full((4,), 0.1 * step, dtype=torch.float64))
            if step == 5:
                seen += of(meter.flush())
                meter.reduce()
                seen.append(("saved", meter.epoch.tolist(), meter.interval.tolist()))
            if step % 2 == 0:
                seen += of(meter.close("interval", Numbered(step)))
                seen.append("closed")
        seen += of(meter.flush())
    return [*seen, meter.epoch.tolist(), meter.interval.tolist()]


def test_values_that_are_read_late_are_the_same() -> None:
    """On a GPU an interval is reported when the next one ends, before a checkpoint, or at the end; with equal sums."""
    assert not read_late(CPU)
    at_once, late = reports(CPU), reports(GPU)
    assert at_once[:2] == [([0.1 + 0.2] * 4, 2.0), "closed"]
    assert late[0] == "closed"
    assert [line for line in at_once if line != "closed"] == [line for line in late if line != "closed"]


def test_own_work_is_measured_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """By events, which are read after they have occurred, the last ones when the interval is reported."""

    def batch(own: OwnWork, waited: float) -> None:
        own.request()
        time.sleep(0.02)
        own.arrive(waited)
        time.sleep(0.04)
        own.computed()

    def refuse(*_: object) -> None:
        raise AssertionError("the step waits for the device")

    for call in ("synchronize", "wait"):
        monkeypatch.setattr(pretend.Event, call, refuse)
    with pretend.gpu():
        own = OwnWork(GPU, forward=True)
        batch(own, waited=600.0)  # on the clock, but for most of that the GPU still computed
        happened = pretend.Event.query
        monkeypatch.setattr(pretend.Event, "query", lambda self: False)
        batch(own, waited=0.0)
        monkeypatch.setattr(pretend.Event, "query", happened)
        data, transfer, forward = own.seconds()
        assert 0.02 <= data < 300
        assert transfer >= 0.02
        assert forward >= 0.08
        waits = OwnWork(GPU, forward=False)  # for other ranks
        batch(waits, waited=0.5)
        assert waits.seconds()[2] == 0


def test_a_checkpoint_has_the_state_at_its_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step changes the weights immediately, while they are copied; it waits for the copy on the device."""

    def saved(folder: Path) -> list[bool]:
        weights = {name: torch.zeros(1000, 4) for name in ("a", "b")}
        right = []
        with pretend.gpu(lag=0.05):
            saver = Saver(folder, 0, GPU)
            for number in range(3):
                for weight in weights.values():
                    weight.fill_(number)
                saver.save({"format": 1, "number": number, "model": dict(weights)})
                for weight in weights.values():
                    weight.fill_(-1)
                saver.wait()
                found = read(folder / "last.pt")
                right.append(all(bool((value == number).all()) for value in found["model"].values()))
            saver.close()
        return right

    assert saved(tmp_path / "right") == [True] * 3
    monkeypatch.setattr(pretend.Event, "wait", lambda self, stream=None: None)
    assert saved(tmp_path / "wrong") != [True] * 3, "the test cannot see a step that does not wait"


def test_the_memory_of_a_copy_is_used_again() -> None:
    copy, state = HostCopy(CPU), {"a": torch.ones(3), "b": [torch.zeros(2, 2), "text"], "c": torch.ones(2, 3, 4, 4)}
    first = copy.take(state)
    state["a"] += 1
    assert first["a"].tolist() == [1, 1, 1]
    addresses = [first["a"].data_ptr(), first["b"][0].data_ptr()]
    state["c"] = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    second = copy.take(state)
    assert [second["a"].data_ptr(), second["b"][0].data_ptr()] == addresses
    assert second["a"].tolist() == [2, 2, 2]
    assert second["c"].is_contiguous(memory_format=torch.channels_last)
    assert second["b"][1] == "text"


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.ci
def test_a_run_equals_that_on_a_cpu(tmp_path: Path) -> None:
    """One process: layout, bf16, late copies in a separate stream, fused updates, values that are read late.

    And augmentation on the device, of images that have arrived.
    """
    data = digit_tree(tmp_path / "data", 90, 20)
    options = (
        f"--data {data} --arch smallcnn --image-size 16 --batch-size 16 --epochs 2 --log-every 2 --lr 0.5 --workers 1 "
        f"--auto-augment trivial --random-erase 0.3 --augment-on device"
    )
    for name, explicit in (("cpu", "--device cpu --amp bf16 --memory-format channels_last"), ("gpu", "")):
        config = parse(f"{options} {explicit} --output {tmp_path / name}".split())
        with pretend.gpu(lag=0.002) if name == "gpu" else nullcontext():
            world = join(config)
            assert world.device.type == ("cuda" if name == "gpu" else "cpu")
            Trainer(config, world).train(StopSignal(world))
    ours, theirs = (metrics(tmp_path / name, "step") for name in ("gpu", "cpu"))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [2, 4, 6, 8, 10, 12]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=0.02)
    assert metrics(tmp_path / "gpu", "epoch")[-1]["val"]["images"] == 20
    (begun,) = metrics(tmp_path / "gpu", "start")
    assert (begun["amp"], begun["device"]) == ("bf16", pretend.NAME)


@pytest.mark.ci
@pytest.mark.parametrize("parallel", METHODS)
def test_two_processes(parallel: str, tmp_path: Path) -> None:
    """A model with convolutions, in the layout that a GPU has by default, by each method, stopped and resumed."""
    data = digit_tree(tmp_path / "data", 64, 16)
    options = (
        f"--data {data} --arch smallcnn --image-size 16 --batch-size 8 --lr 0.1 --workers 1 --parallel {parallel} "
        f"--epochs 2 --log-every 1 --last-batch drop --print-digest"
    ).split()
    program = ("-m", "tests.train.programs.pretending")
    whole = run(tmp_path / "whole", 2, *options, "--checkpoints", tmp_path / "a", program=program)
    assert "train: 2 processes, cuda, backend cpu:gloo,cuda:nccl" in whole[0].text
    assert "amp bf16" in whole[0].text
    assert len(whole[0].metrics("epoch")) == 2
    parts = start(tmp_path / "parts", 2, *options, "--checkpoints", tmp_path / "b", program=program)
    parts[0].wait_for("Epoch: [1][1/")
    parts[1].process.send_signal(signal.SIGTERM)
    assert finish(parts) == [143, 143], parts[0].text
    again = run(tmp_path / "parts", 2, *options, "--checkpoints", tmp_path / "b", program=program)
    assert "resumed" in again[0].text
    assert again[0].digest == whole[0].digest
