"""Rates by layer, weight decay by name, stochastic depth and Muon, against timm, torchvision and torch."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.runs import digit_tree, run
from tests.train.trainer.test_combinations import problem
from train.__main__ import main
from train.config import Config, parse
from train.errors import TrainError
from train.models import SmallCNN, configured_model, make_model
from train.optim import hidden_matrices, layers, load_state, make_optimizer, parameter_groups, set_rate

CONFIG = Config(data="", weight_decay=0.05)


class Net(nn.Module):
    """A stem, two blocks with a matrix each, a norm, a classifier, a position embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(4, 8))
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)) for _ in "ab")
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def no_weight_decay(self) -> set[str]:
        return {"position"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x + self.position)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(self.norm(x).mean(1))
        return logits


def by_name(config: Config, model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return each parameter's weight decay and learning rate factor."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(config, model, list(model.parameters()))
    return {names[id(p)]: (g["weight_decay"], g.get("lr_scale", 1.0)) for g in groups for p in g["params"]}


def test_a_transformers_layers_start_with_its_blocks() -> None:
    found = layers(make_model("vit_b_16", 10))
    assert {found[name] for name in ("class_token", "conv_proj.weight", "encoder.pos_embedding")} <= {0, 1}
    blocks = [found[f"encoder.layers.encoder_layer_{index}.mlp.0.weight"] for index in range(12)]
    assert blocks == list(range(blocks[0], blocks[0] + 12))
    assert found["encoder.layers.encoder_layer_3.ln_1.weight"] == found["encoder.layers.encoder_layer_3.mlp.3.bias"]
    assert found["heads.head.weight"] == found["heads.head.bias"] == blocks[-1] + 1 == max(found.values())


def test_a_resnets_layers_are_its_blocks() -> None:
    found = layers(make_model("resnet18", 10))
    assert found["conv1.weight"] == found["bn1.weight"] < found["layer1.0.conv1.weight"]
    assert found["layer2.0.conv1.weight"] == found["layer2.0.downsample.0.weight"] == found["layer1.1.conv2.weight"] + 1
    assert found["fc.weight"] == found["fc.bias"] == found["layer4.1.bn2.weight"] + 1


def test_rates_fall_from_layer_to_layer_and_the_schedule_keeps_that() -> None:
    model = SmallCNN(10)
    optimizer = make_optimizer(replace(CONFIG, layer_decay=0.5), model)
    set_rate(optimizer, 0.8)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    matrices = [rates[id(p)] for p in model.parameters() if p.ndim > 1]
    assert matrices == pytest.approx([0.8 * 0.5**depth for depth in range(6, -1, -1)])
    fresh = make_optimizer(replace(CONFIG, layer_decay=0.5), model)
    load_state(fresh, optimizer.state_dict())
    set_rate(fresh, 0.8)
    assert [group["lr"] for group in fresh.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_what_is_not_decayed() -> None:
    found = {name: decay for name, (decay, _) in by_name(replace(CONFIG, no_decay=("blocks.1.*",)), Net()).items()}
    assert {name for name, decay in found.items() if decay} == {
        "stem.weight",
        "blocks.0.0.weight",
        "blocks.0.2.weight",
        "head.weight",
    }
    assert all(decay for decay, _ in by_name(replace(CONFIG, decay="all"), Net()).values())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
def test_muon_has_the_matrices_of_hidden_layers() -> None:
    hidden = {"stem.weight", *(f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in (0, 2))}
    assert hidden_matrices(Net()) == hidden
    with pytest.raises(TrainError, match="no linear layers except its classifier"):
        make_optimizer(replace(CONFIG, optimizer="muon"), SmallCNN(10))


def trained(model: nn.Module, optimizers: list[Any], steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(torch.randn(6, 4, 8)), torch.randint(0, 3, (6,)))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
def test_muon_with_adamw_equals_separate_optimisers_and_resumes_from_a_checkpoint() -> None:
    torch.manual_seed(0)
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    config = replace(CONFIG, optimizer="muon", lr=0.01, muon_momentum=0.9, momentum=0.8, adam_beta2=0.95)
    optimizer = make_optimizer(config, ours)
    matrices = hidden_matrices(theirs)
    named = dict(theirs.named_parameters())
    decayed = [named["head.weight"]]
    others = [p for name, p in named.items() if name not in matrices and name != "head.weight"]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], lr=0.01, betas=(0.8, 0.95)
    )
    muon = torch.optim.Muon(
        [named[name] for name in named if name in matrices],
        lr=0.01,
        momentum=0.9,
        weight_decay=0.05,
        adjust_lr_fn="match_rms_adamw",
    )
    trained(ours, [optimizer], 3, seed=1)
    trained(theirs, [muon, adamw], 3, seed=1)
    again = make_optimizer(config, ours)
    load_state(again, optimizer.state_dict())
    trained(ours, [again], 3, seed=2)
    trained(theirs, [muon, adamw], 3, seed=2)
    assert all(torch.equal(p, named[name]) for name, p in ours.named_parameters())


def test_the_rate_of_stochastic_depth() -> None:
    from torchvision import models
    from torchvision.ops import StochasticDepth

    def rates(model: nn.Module) -> list[float]:
        return [part.p for part in model.modules() if isinstance(part, StochasticDepth)]

    for arch in ("efficientnet_b0", "convnext_tiny"):
        theirs = models.get_model(arch, weights=None, num_classes=10, stochastic_depth_prob=0.05)
        assert rates(configured_model(replace(CONFIG, arch=arch, drop_path=0.05), 10)) == rates(theirs)
        assert rates(configured_model(replace(CONFIG, arch=arch), 10)) == rates(models.get_model(arch, num_classes=10))
    swin = rates(configured_model(replace(CONFIG, arch="swin_t", drop_path=0.11), 10))
    assert swin == pytest.approx([0.11 * block / 11 for block in range(12)])


@pytest.mark.parametrize("arch", ["smallcnn", "resnet18", "tests.train.trainer.test_finetuning:plain"])
def test_stochastic_depth_of_a_model_that_has_none_is_refused(arch: str) -> None:
    with pytest.raises(TrainError, match=r"--drop-path|drop_path_rate"):
        configured_model(replace(CONFIG, arch=arch, drop_path=0.1), 10)


def plain(num_classes: int) -> nn.Module:
    return SmallCNN(num_classes)


@pytest.mark.parametrize(
    ("processes", "options", "why"),
    [
        (2, "--parallel model --layer-decay 0.7", "does not support --layer-decay 0.7"),
        (2, "--parallel pipeline --last-batch drop --no-decay a", "does not support --no-decay"),
        (2, "--parallel model --optimizer muon", "does not support --optimizer muon"),
        (2, "--parallel fsdp --optimizer muon", "does not support --optimizer muon"),
        (1, "--cycle-momentum --optimizer muon", "not onecycle with muon"),
        (1, "--optimizer muon --muon-momentum 1", "--muon-momentum 1.0: must be less than 1"),
    ],
)
def test_what_a_method_cannot_do_is_refused(processes: int, options: str, why: str) -> None:
    assert why in problem(options, processes)


@pytest.mark.parametrize("options", ["--layer-decay 1.1", "--layer-decay 0", "--drop-path 2", "--drop-path -2"])
def test_settings_out_of_range_are_refused(options: str) -> None:
    with pytest.raises(TrainError, match=options.split()[0]):
        parse(["--data", "unused", *options.split()])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224", "resnet18"])
def test_the_groups_are_those_of_timm(name: str) -> None:
    timm_optim, timm = import_module("timm.optim"), import_module("timm")
    model = timm.create_model(name, num_classes=5)
    for rate in (1.0, 0.65):
        listed = getattr(model, "no_weight_decay", set)()
        if rate == 1:
            groups = timm_optim.param_groups_weight_decay(model, 0.05, no_weight_decay_list=listed)
        else:
            groups = timm_optim.param_groups_layer_decay(model, 0.05, no_weight_decay_list=listed, layer_decay=rate)
        names = {id(parameter): key for key, parameter in model.named_parameters()}
        theirs = {names[id(p)]: (g["weight_decay"], g.get("lr_scale", 1.0)) for g in groups for p in g["params"]}
        ours = by_name(replace(CONFIG, layer_decay=rate), model)
        assert ours.keys() == theirs.keys()
        assert all(ours[key] == pytest.approx(theirs[key], rel=1e-9) for key in ours)


@pytest.mark.slow
def test_a_timm_model_is_fine_tuned_resumed_and_exported(tmp_path: Path) -> None:
    """With all options combined, and timm's default drop path rates."""
    timm = import_module("timm")
    config = replace(CONFIG, arch="timm:test_vit", drop_path=0.2)
    theirs = timm.create_model("test_vit", num_classes=10, drop_path_rate=0.2)
    rates = [
        [part.drop_prob for part in m.modules() if hasattr(part, "drop_prob")]
        for m in (configured_model(config, 10), theirs)
    ]
    assert rates[0] == rates[1]
    assert max(rates[0]) == pytest.approx(0.2)
    data = digit_tree(tmp_path / "data", 40, 20)
    options = "--arch timm:test_vit --optimizer muon --lr 0.001 --layer-decay 0.75 --drop-path 0.2 --augment-on device"
    options += " --auto-augment rand --random-erase 0.25 --batch-size 8 --workers 1 --threads 1 --device cpu"
    common = ["--data", str(data), *options.split()]
    assert main([*common, "--epochs", "2", "--output", str(tmp_path / "out")]) == 0
    assert main([*common, "--epochs", "3", "--output", str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / "checkpoints" / "last.pt"
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    theirs.load_state_dict(saved["model"])
    side = saved["config"]["image_size"]
    images = torch.rand(3, 3, side, side)
    mean, std = (torch.tensor(saved["config"][name]).view(3, 1, 1) for name in ("mean", "std"))
    expected = theirs.eval()((images - mean) / std).detach()
    for kind in ("pt2", "onnx"):
        assert main(["export", str(file), str(tmp_path / f"model.{kind}")]) == 0
    exported = torch.export.load(tmp_path / "model.pt2").module()(images)
    session = import_module("onnxruntime").InferenceSession(tmp_path / "model.onnx")
    for found in (exported, torch.tensor(session.run(None, {"images": images.numpy()})[0])):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_rates_by_layer_are_resumed_in_a_sharded_run(tmp_path: Path) -> None:
    """At a constant rate, two epochs in one run equal two runs of one epoch."""
    data = digit_tree(tmp_path / "data", 40, 20)
    options = "--arch smallcnn --image-size 16 --batch-size 4 --workers 1 --parallel fsdp --optimizer adamw --lr 0.002"
    options += " --schedule multistep --warmup 0 --milestones 1 --last-batch drop --print-digest"
    found = {}
    for name, decay, epochs in (("whole", 0.6, "2"), ("parts", 0.6, "12"), ("other", 0.9, "2")):
        for until in epochs:
            common = ["--data", data, *options.split(), "--layer-decay", decay, "--checkpoints", tmp_path / name]
            found[name] = run(tmp_path / f"{name}-{until}", 2, *common, "--epochs", until)[0]
    assert "train: resumed" in found["parts"].text
    assert found["parts"].digest == found["whole"].digest != found["other"].digest
