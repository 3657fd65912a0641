"""The parts of a step against their formulas: batch norm, loss scale, optimisers, averages, mixes."""

import copy
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from tests.train.runs import OLD, finish, start
from tests.train.steps import accumulate
from train import foreach
from train.config import Config
from train.data.batch import Batch
from train.distributed.ddp import DDPStep, compiled
from train.distributed.methods import make_step
from train.distributed.world import World
from train.ema import EMA
from train.errors import TrainError
from train.experiments.masters import Masters
from train.experiments.syncbn import SyncBatchNorm, convert, convert_by_library
from train.loss import Mix, apply_mix, binary_cross_entropy, cross_entropy, draw_mix, losses
from train.models import SmallCNN, configured_model, make_model, parameter_count
from train.optim import LARS, make_optimizer
from train.precision import LossScale, choose_precision
from train.step import Plan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("steps")
    ranks = start(folder, 2, program=("-m", "tests.train.programs.step_worker"))
    assert finish(ranks) == [0, 0], ranks[0].text
    return [json.loads(next(line for line in rank.lines if line.startswith("{"))) for rank in ranks]


@pytest.mark.parametrize("case", ["equal 2d", "uneven 2d", "empty 2d", "one row each"])
def test_synchronised_batch_norm_equals_batch_norm_of_the_whole_batch(reports: list[dict[str, Any]], case: str) -> None:
    assert max(report["norm"][case] for report in reports) < 1e-7  # running statistics are fp32 numbers in both


@pytest.mark.parametrize("case", ["uneven 1d float32", "empty float32", "mean 100 float32", "mean 100 uneven float32"])
def test_synchronised_batch_norm_is_within_1e5_in_single_precision(reports: list[dict[str, Any]], case: str) -> None:
    assert max(report["norm"][case] for report in reports) < 1e-5


def test_synchronised_batch_norm_in_bf16_rounds_only_its_results() -> None:
    """Its weights stay in fp32, so the scaled output is rounded once and the weights' gradients are not rounded."""
    torch.manual_seed(0)
    ours, oracle = SyncBatchNorm(8), nn.BatchNorm2d(8).double()
    for module in (ours, oracle):
        with torch.no_grad():
            module.weight.copy_(torch.linspace(0.5, 2, 8))
            module.bias.copy_(torch.linspace(-1, 1, 8))
    x, incoming = (torch.randn(16, 8, 9, 9).bfloat16() for _ in range(2))
    wide, mine = x.double().requires_grad_(), x.clone().requires_grad_()
    expected, out = oracle(wide), ours(mine)
    expected.backward(incoming.double())
    out.backward(incoming)
    assert (out == expected.bfloat16()).double().mean() > 0.999
    for a, b in ((ours.weight.grad, oracle.weight.grad), (ours.bias.grad, oracle.bias.grad)):
        assert a.dtype == torch.float32
        assert float((a.double() - b).abs().max() / b.abs().max()) < 1e-5
    assert (mine.grad == wide.grad.bfloat16()).double().mean() > 0.99


def test_synchronised_batch_norm_reduces_once_forward_once_backward_and_never_in_evaluation(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        assert report["calls"] == {"forward": ["all_reduce"], "backward": ["all_reduce"], "evaluation": []}


def test_an_overflow_on_one_rank_makes_all_ranks_skip(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["overflow"] == {
            "bad": False,
            "bad scale": 2.0**15,
            "bad moved": False,
            "good": True,
            "good scale": 2.0**15,
            "good moved": True,
        }


def test_gradients_are_reduced_once_per_update_for_any_number_of_micro_batches(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["reductions"] == {
            "update of 1": 1,
            "update of 4": 1,
            "norm forward": 1,
            "norm backward": 1,
            "norm in evaluation": 0,
        }


def test_gradients_of_frozen_parameters_are_not_reduced(reports: list[dict[str, Any]]) -> None:
    model = SmallCNN(10)
    every, last = parameter_count(model), parameter_count(model.classifier)
    assert [report["frozen"] for report in reports] == [{"": every, "features": last}] * 2


def test_gradients_are_reduced_in_bf16_on_request(reports: list[dict[str, Any]]) -> None:
    """Each rank's half of the mean is rounded to 8 bits before they are added, and their sum after."""
    for report in reports:
        assert report["compression"]["against bf16"] < 1e-6
        assert 1e-4 < report["compression"]["against fp32"] < 1e-2


def test_running_statistics_are_sent_for_validation_not_in_every_step(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        assert report["statistics"]["sent in steps"] == {"batch norm": False, "spectral norm": True}
        assert report["statistics"]["changed by validation"] == (rank == 1)
        assert report["statistics"]["scores"] == pytest.approx(reports[0]["statistics"]["alone"], rel=1e-9)


def test_16_bit_products_on_a_cpu_equal_those_of_tensor_cores() -> None:
    """16-bit inputs, fp32 sums, rounded once, forward and backward; torch's kernels sum weight gradients in fp16."""
    precision = choose_precision(Config(data="", amp="O2"), CPU)
    torch.manual_seed(0)
    x, weight = torch.randn(32, 8, 12, 12).half(), (torch.randn(16, 8, 3, 3) / 8).half()
    incoming = torch.randn(32, 16, 12, 12).half()
    ours, wide = weight.clone().requires_grad_(), weight.float().requires_grad_()
    with precision.context(CPU):
        out = nn.functional.conv2d(x, ours, padding=1)
        scores = nn.functional.linear(out.mean((2, 3)), weight.new_ones(3, 16))
    expected = nn.functional.conv2d(x.float(), wide, padding=1)
    assert out.dtype == scores.dtype == torch.float16
    assert torch.equal(out, expected.half())
    out.backward(incoming)
    expected.backward(incoming.float())
    assert ours.grad is not None
    assert wide.grad is not None
    assert ours.grad.dtype == torch.float16
    assert torch.equal(ours.grad, wide.grad.half())


def test_a_converted_model_keeps_its_weights_and_has_no_plain_batch_norm_left() -> None:
    model = make_model("cifar_resnet20", 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = convert(model)
    assert not any(type(module) is nn.BatchNorm2d for module in converted.modules())
    assert all(torch.equal(before[name], value) for name, value in converted.state_dict().items())


def trained_once(model: nn.Module) -> list[torch.Tensor]:
    """Logits, gradients and running statistics after a forward and backward pass."""
    out = model.train()(torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    out.square().sum().backward()
    return [out, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def test_synchronised_batch_norm_keeps_what_timms_layers_do_besides() -> None:
    """EfficientNet's BatchNormAct2d normalises, drops and activates."""
    model = make_model("timm:test_efficientnet", 10).double()
    expected, names = trained_once(copy.deepcopy(model)), list(model.state_dict())
    library = convert_by_library(copy.deepcopy(model)).eval()  # on GPUs only in training
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(library(x), copy.deepcopy(model).eval()(x))
    converted = convert(model)
    assert list(converted.state_dict()) == names
    assert not any(type(module).__name__ == "BatchNormAct2d" for module in converted.modules())
    for ours, theirs in zip(trained_once(converted), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class Shifted(nn.BatchNorm2d):
    """A layer of a user, which is more than a batch norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize("convert_", [convert, convert_by_library])
def test_other_layers_that_are_batch_norms_are_refused_by_name(convert_: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(TrainError, match=r"--syncbn \w+: 1 is a Shifted of tests\.train\.trainer\.test_step"):
        convert_(nn.Sequential(nn.Conv2d(3, 8, 3), Shifted(8)))


def test_a_batch_norm_in_two_places_stays_one() -> None:
    model = nn.Module()
    model.first = model.second = nn.BatchNorm2d(3)
    converted = convert(nn.Sequential(model))
    assert isinstance(converted[0].first, SyncBatchNorm)
    assert converted[0].first is converted[0].second


def test_in_a_single_process_it_equals_batch_norm() -> None:
    x = torch.randn(6, 4, 3, 3)
    assert torch.allclose(SyncBatchNorm(4)(x), nn.BatchNorm2d(4)(x), atol=1e-5)


def test_loss_scale_halves_doubles_and_stops_at_its_cap() -> None:
    scale = LossScale(enabled=True)
    assert scale.value == 2**16
    assert not scale.unscale([torch.tensor([1.0]), torch.tensor([float("nan")])])
    assert scale.value == 2**15
    for _ in range(1999):
        assert scale.unscale([torch.ones(1)])
    assert scale.value == 2**15
    assert not scale.unscale([torch.tensor([float("inf")])])  # and restarts counting
    for _ in range(2000 * 12):
        assert scale.unscale([torch.ones(1)])
    assert scale.value == 2**24
    gradient = torch.full((3,), 2.0**24)
    assert scale.unscale([gradient])
    assert gradient.tolist() == [1, 1, 1]


@settings(deadline=None)
@given(
    values=st.lists(st.lists(st.floats(width=32), min_size=1, max_size=5), min_size=1, max_size=4),
    kind=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
def test_operations_on_many_tensors_equal_a_loop(values: list[list[float]], kind: torch.dtype) -> None:
    tensors = [torch.tensor(row, dtype=torch.float64).clamp(-100, 100).to(kind) for row in values]
    expected = [tensor * 0.125 for tensor in tensors]
    foreach.multiply_(tensors, 0.125)
    for ours, theirs in zip(tensors, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert foreach.finite(tensors) == all(bool(tensor.isfinite().all()) for tensor in expected)
    assert not foreach.finite([*tensors, torch.tensor([1.0, float("inf")], dtype=kind)])


def test_precision_levels_match_the_table() -> None:
    def level(amp: str) -> tuple[object, ...]:
        p = choose_precision(Config(data="", amp=amp), CPU)
        return p.weights, p.autocast, p.masters, p.scaled

    half, full = torch.float16, torch.float32
    assert level("auto") == level("O0") == level("none") == (full, None, False, False)
    assert level("bf16") == (full, torch.bfloat16, False, False)
    assert level("O1") == level("fp16") == (full, half, False, True)
    assert level("O2") == (half, None, True, True)
    assert level("O3") == (half, None, False, False)
    for amp, norm in (("O2", full), ("O3", half)):
        model = choose_precision(Config(data="", amp=amp), CPU).cast(make_model("cifar_resnet20", 10), CPU)
        types = {type(m): m.weight.dtype for m in model.modules() if getattr(m, "weight", None) is not None}
        assert types[nn.BatchNorm2d] == norm
        assert types[nn.Conv2d] == types[nn.Linear] == half


def test_o2_keeps_every_bit_of_batch_norm() -> None:
    """fp16 has no number above 65504, and 123.4567 would become 123.44."""
    model = make_model("cifar_resnet20", 10)
    model[1].running_var.fill_(1e5)
    model[1].running_mean.fill_(123.4567)
    kept = {name: value.clone() for name, value in model[1].state_dict().items()}
    cast = choose_precision(Config(data="", amp="O2"), CPU).cast(model, CPU)
    assert all(torch.equal(value, kept[name]) for name, value in cast[1].state_dict().items())


def test_a_weight_without_a_gradient_in_a_step_stays_as_it_is_with_fp32_masters() -> None:
    """As without masters: neither momentum nor decay of a weight that the step did not use."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]).half()
    masters = Masters(model)
    for used in ((0, 1), (0,), (1,)):
        for index, layer in enumerate(model):
            layer.weight.grad = torch.full((1, 1), 3.0 + index).half() if index in used else None
        masters.take_gradients()
        given = [None if master.grad is None else float(master.grad) for master in masters.parameters]
        assert given == [3.0 + index if index in used else None for index in (0, 1)]


def test_fp16_weights_gather_micro_batches_in_fp32() -> None:
    """A hundred small gradients after a large one: fp16 would lose each, because it has 11 bits."""
    weight = nn.Linear(1, 1, bias=False).half()
    masters = Masters(weight)
    for micro_batch in range(100):
        last = micro_batch == 99
        if last:
            masters.add_back()
        value = 2048.0 if micro_batch == 0 else 0.5
        gradient = torch.full((1, 1), value, dtype=torch.float16)
        weight.weight.grad = gradient if weight.weight.grad is None else weight.weight.grad + gradient
        if not last:
            masters.set_aside()
            assert weight.weight.grad == 0
    masters.take_gradients()
    assert masters.parameters[0].grad is not None
    assert float(masters.parameters[0].grad) == pytest.approx(2048 + 99 * 0.5, abs=2.0)  # fp16 would stay at 2048


def test_an_overflow_in_an_early_micro_batch_is_not_lost() -> None:
    weight = nn.Linear(1, 1, bias=False).half()
    masters = Masters(weight)
    weight.weight.grad = torch.full((1, 1), float("inf"), dtype=torch.float16)
    masters.set_aside()
    assert weight.weight.grad == 0
    masters.add_back()
    masters.take_gradients()
    assert not LossScale(enabled=True).unscale([parameter.grad for parameter in masters.parameters])
    weight.weight.grad.zero_()
    masters.add_back()  # of the next step, which has nothing aside
    assert weight.weight.grad == 0


def test_accumulated_steps_of_fp16_weights_equal_one_step() -> None:
    images = torch.randint(256, (8, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = []
    for pieces in (1, 4):
        config = Config(data="", image_size=8, amp="O2", weight_decay=0.0)
        precision = choose_precision(config, CPU)
        torch.manual_seed(0)
        model = precision.cast(SmallCNN(10), CPU)
        step = make_step(config, World(0, 1, 0, 1, CPU, "none"), precision, model)
        step.scale.value = 2.0**8
        before = [parameter.detach().clone() for parameter in step.parameters]
        for piece in range(pieces):
            part = slice(piece * 8 // pieces, (piece + 1) * 8 // pieces)
            labels = torch.arange(8)[part]
            batch = Batch(images[part], labels, torch.ones(len(labels)), 8, last=piece == pieces - 1)
            accumulate(step, batch, Plan(0.1, 0))
        assert step.update(Plan(0.1, 0))
        found.append([new.detach() - old for new, old in zip(step.parameters, before, strict=True)])
    for one, four in zip(*found, strict=True):
        assert float((one - four).norm()) < 0.05 * float(one.norm())


def test_a_short_batch_leaves_the_full_ones_their_static_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        sizes = [size for value in inputs if isinstance(value, torch.Tensor) for size in value.shape]
        graphs.append(all(isinstance(size, int) for size in sizes) and all(isinstance(v, torch.Tensor) for v in inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    config = Config(data="", image_size=8, compile=True)
    step = make_step(config, World(0, 1, 0, 1, CPU, "none"), choose_precision(config, CPU), SmallCNN(10))
    for size in (8, 8, 5, 8, 5):
        images = torch.ones(size, 8, 8, 3).byte()
        accumulate(step, Batch(images, torch.arange(size), torch.ones(size), size, last=True), Plan(0.1, 0))
    assert graphs == [True, True], "a graph of a size of its own each, and no further one"


def counting(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Compile without a compiler; the list has an item for each graph: whether gradients are computed."""
    graphs = list[bool]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    return graphs


def sample(count: int, side: int = 8) -> Batch:
    return Batch(torch.ones(count, side, side, 3).byte(), torch.arange(count), torch.ones(count), count, last=True)


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_every_kind_of_batch_is_compiled_in_training_and_in_validation(
    average: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More often than torch's limit of eight."""
    graphs = counting(monkeypatch)
    phases = ["8@0", "12@0.3", "16@0.6"]
    config = Config(data="", image_size=16, epochs=3, phases=phases, compile=True, ema_decay=average)
    assert config.sides() == [8, 12, 16]
    step = make_step(config, World(0, 1, 0, 1, CPU, "none"), choose_precision(config, CPU), SmallCNN(10))
    for _ in range(2):
        for side in config.sides():
            for count in (8, 5, 2):
                step.model.train()
                accumulate(step, sample(count, side), Plan(0.1, 0))
                step.update(Plan(0.1, 0))
        for count in (8, 5, 2):
            step.evaluated.eval()
            with torch.no_grad():
                step.objective.forward_loss(step.evaluated, sample(count, 16))
    assert graphs == [True] * 9 + [False] * 3


@pytest.mark.skipif(OLD, reason="torch before 2.6 only warns")
def test_what_would_run_uncompiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, config = counting(monkeypatch), Config(data="", image_size=8, compile=True)
    step = make_step(config, World(0, 1, 0, 1, CPU, "none"), choose_precision(config, CPU), SmallCNN(10))
    for count in range(2, 8):
        accumulate(step, sample(count), Plan(0.1, 0))
    with pytest.raises(TrainError, match=r"compiled 6 times.*images of shape \(8, 3, 8, 8\) need another time"):
        accumulate(step, sample(8), Plan(0.1, 0))
    assert len(graphs) == 6


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_the_mode_reaches_the_compiler(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], mode: str = "default") -> object:
        modes.append(mode)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()  # what was compiled before counts, too
    model = compiled(SmallCNN(10), Config(data="", compile=True, compile_mode=mode))
    model(torch.ones(2, 3, 8, 8))
    assert modes == [mode]


def parameter(values: object, gradient: object) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values))
    made.grad = torch.tensor(gradient)
    return made


def test_lars_follows_its_formula() -> None:
    weight, bias = parameter([[3.0, 4.0]], [[0.6, 0.8]]), parameter([1.0], [0.5])
    optimizer = LARS([{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}], lr=1.0)
    optimizer.step()
    # |w| 5, |g| 1: local = .001*5/(1 + .5) = 1/300; g + wd*w = [.9, 1.2]
    assert torch.allclose(weight, torch.tensor([[2.997, 3.996]]), atol=1e-7)
    assert torch.allclose(bias, torch.tensor([0.5]))
    still = parameter([[0.0, 0.0]], [[1.0, 0.0]])
    LARS([still], lr=0.1).step()
    assert torch.allclose(still, torch.tensor([[-0.1, 0.0]]))


def test_lars_on_many_tensors_equals_a_loop_over_them() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (2, 3, 3), (1, 1))]
    theirs = [parameter.detach().clone() for parameter in ours]
    velocities = [torch.zeros_like(parameter) for parameter in theirs]
    optimizer = LARS(ours, lr=0.5, momentum=0.8, weight_decay=0.1)
    for _ in range(3):
        for index, parameter in enumerate(ours):
            gradient = parameter.grad = torch.randn_like(parameter)
            weight, rate = theirs[index], 0.5
            if weight.ndim > 1:
                rate *= 1e-3 * float(weight.norm()) / (float(gradient.norm()) + 0.1 * float(weight.norm()))
                gradient = gradient + 0.1 * weight
            velocities[index] = 0.8 * velocities[index] + rate * gradient
            theirs[index] = weight - velocities[index]
        optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-5, atol=1e-7)


def test_norms_and_biases_are_not_decayed_by_default() -> None:
    model = SmallCNN(10)
    for decay, expected in (("weights", {1e-2: {2, 4}, 0.0: {1}}), ("all", {1e-2: {1, 2, 4}})):
        config = Config(data="", decay=decay, weight_decay=1e-2)
        groups = make_optimizer(config, model).param_groups
        assert {group["weight_decay"]: {p.ndim for p in group["params"]} for group in groups} == expected


def test_the_average_follows_its_formula() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    ema, expected = EMA(model, 0.5, list(model.parameters())), 0.0
    for update in range(20):
        nn.init.constant_(model.weight, update + 1.0)
        ema.update(update)
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * (update + 1)
        assert float(ema.model.state_dict()["weight"]) == pytest.approx(expected, rel=1e-5)
    assert not ema.model.training


@pytest.mark.parametrize("amp", ["O2", "none"])
def test_the_average_moves_by_less_than_16_bits_resolve(amp: str) -> None:
    """A weight of 1 that rises by 1e-4 per update: fp16 has no number between 1 and 1.00098."""
    config = Config(data="", image_size=8, amp=amp, ema_decay=0.999)
    precision = choose_precision(config, CPU)
    step = make_step(config, World(0, 1, 0, 1, CPU, "none"), precision, precision.cast(SmallCNN(10), CPU))
    assert step.ema
    expected = weight = 1.0
    name = "features.1.weight"
    step.ema.load({name: torch.ones(16)})
    index = [name for name, _ in step.model.named_parameters()].index(name)
    for update in range(1000, 1010):
        weight += 1e-4
        torch.nn.init.constant_(step.parameters[index], weight)
        decay = min(0.999, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * weight
        step.ema.update(update)
    assert float(step.ema.averages[name][0]) - 1 == pytest.approx(expected - 1, rel=1e-2)
    assert float(step.ema.model.state_dict()[name][0]) == pytest.approx(expected, abs=1e-3)


def test_weights_are_averaged_at_the_given_interval() -> None:
    config = Config(data="", image_size=8, ema_decay=0.5, ema_every=3)
    model = SmallCNN(10)
    step = make_step(config, World(0, 1, 0, 1, CPU, "none"), choose_precision(config, CPU), model)
    assert step.ema
    changed = []
    for update in range(7):
        before = step.ema.averages["classifier.weight"].clone()
        accumulate(step, Batch(torch.ones(2, 8, 8, 3).byte(), torch.arange(2), torch.ones(2), 2, last=True), Plan(1, 0))
        step.update(Plan(rate=1.0, update=update))
        changed.append(not torch.equal(before, step.ema.averages["classifier.weight"]))
    assert changed == [True, False, False, True, False, False, True]


def test_the_average_includes_batch_norm_statistics() -> None:
    model = nn.BatchNorm1d(2)
    ema = EMA(model, 0.0, list(model.parameters()))
    model(torch.randn(8, 2) + 5)
    ema.update(100)
    assert torch.equal(ema.model.state_dict()["running_mean"], model.state_dict()["running_mean"])
    assert ema.model.num_batches_tracked == 1


class Counting(nn.Module):
    """Changes one buffer in its forward pass and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        out: torch.Tensor = self.head(self.norm(x).mean((2, 3)))
        return out


def test_a_rehearsal_leaves_only_gradients_of_zero() -> None:
    config = Config(data="", image_size=8, ema_decay=0.5)
    model = Counting()
    before = {name: (value, value.clone()) for name, value in model.named_buffers()}
    alone: Any = model  # in DDP's place
    step = DDPStep(config, World(0, 1, 0, 1, CPU, "none"), choose_precision(config, CPU), model, alone)
    batch = Batch(torch.arange(8 * 8 * 3 * 2).view(2, 8, 8, 3).byte(), torch.arange(2), torch.ones(2), 2, last=True)
    step.rehearse(batch)
    for name, value in model.named_buffers():
        assert value is before[name][0], name  # the one that the average follows
        assert torch.equal(value, before[name][1]), name
    assert [parameter.grad.abs().sum() for parameter in model.parameters() if parameter.grad is not None] == [0] * 4


class Tied(nn.Module):
    """A head with the weights of the first layer, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("shift", self.mean)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_tied_weights_are_averaged_once_an_update(kind: torch.dtype) -> None:
    model = Tied().to(kind)
    masters = [parameter.detach().float() for parameter in model.parameters()]  # as with --amp O2
    ema = EMA(model, 0.5, masters if kind == torch.float16 else list(model.parameters()))
    ema.load({name: torch.zeros_like(value) for name, value in ema.averages.items()})
    for each in (*masters, *model.parameters(), *model.buffers()):
        nn.init.ones_(each)
    ema.update(100)
    averaged = ema.model.state_dict()
    for name in ("first.weight", "head.weight", "head.bias", "mean", "shift"):
        assert averaged[name].unique().tolist() == ema.averages[name].unique().tolist() == [0.5], name
    assert ema.model.head.weight is ema.model.first.weight


def test_mixup_and_cutmix_mix_by_the_reported_share() -> None:
    images = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 3, 16, 16).contiguous()
    blended = apply_mix(Mix(0.75, None), images)
    assert blended[1, 0, 0, 0] == pytest.approx(0.75)
    config = Config(data="", cutmix=1.0)
    for seed in range(50):
        mix = draw_mix(config, seed, 16)
        assert mix
        assert mix.box
        own = (apply_mix(mix, images)[1] == 1).float().mean()
        assert float(own) == pytest.approx(mix.share, abs=1e-6)
    shares = [m.share for seed in range(300) if (m := draw_mix(Config(data="", mixup=0.2), seed, 16))]
    assert 0.4 < sum(shares) / len(shares) < 0.6
    assert draw_mix(Config(data=""), 0, 16) is None


def test_a_mixed_images_loss_is_that_of_its_mixed_label() -> None:
    logits, labels = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 5, 2, 2])
    ours = losses(partial(cross_entropy, smoothing=0.1), logits, labels, Mix(0.7, None))
    one_hot = nn.functional.one_hot(labels, 6).double()
    target = 0.9 * (0.7 * one_hot + 0.3 * one_hot.roll(1, 0)) + 0.1 / 6
    assert torch.allclose(ours, nn.functional.cross_entropy(logits, target, reduction="none"))


def test_binary_cross_entropy_is_that_of_the_soft_label_summed_over_the_classes() -> None:
    logits, labels = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 5, 2, 2])
    one_hot = nn.functional.one_hot(labels, 6).double()
    target = 0.9 * (0.7 * one_hot + 0.3 * one_hot.roll(1, 0)) + 0.1 / 6
    expected = -(target * logits.sigmoid().log() + (1 - target) * (-logits).sigmoid().log()).sum(1)
    assert torch.allclose(
        losses(partial(binary_cross_entropy, smoothing=0.1), logits, labels, Mix(0.7, None)), expected
    )


def test_residual_branches_start_at_zero_only_with_the_option() -> None:
    norms = [make_model("resnet18", 10, zero).state_dict()["layer1.0.bn2.weight"].abs().max() for zero in (True, False)]
    assert norms == [0, 1]


def test_options_of_a_models_constructor_by_name() -> None:
    config = Config(data="", arch="mobilenet_v2", model_kwargs=("dropout=0.4", "width_mult=0.5"))
    model = configured_model(config, 10)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.4]
    assert parameter_count(model) < parameter_count(make_model("mobilenet_v2", 10)) / 2


def test_the_initial_loss_is_at_chance_level() -> None:
    torch.manual_seed(0)
    model = SmallCNN(10)
    loss = cross_entropy(model(torch.randn(64, 3, 32, 32)), torch.arange(64) % 10).mean()
    assert float(loss.detach()) == pytest.approx(math.log(10), abs=0.2)
    assert copy.deepcopy(model)(torch.randn(2, 3, 8, 8)).shape == (2, 10)
