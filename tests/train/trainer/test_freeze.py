"""--freeze: which parameters are trained, and that nothing else of the model changes."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.runs import digit_tree, run
from tests.train.trainer.test_combinations import problem
from train.__main__ import main
from train.config import Config, parse
from train.errors import TrainError
from train.experiments.dp import Replicas
from train.freeze import freeze, frozen_norms, train_mode
from train.hardware import forward_flops, training_flops
from train.models import make_model
from train.optim import parameter_groups

PROBE = r"^(?!fc\.)"


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_a_linear_probe_trains_only_the_last_layer() -> None:
    model = make_model("resnet18", 10)
    said = freeze(model, PROBE)
    assert trained(model) == ["fc.weight", "fc.bias"]
    assert said == (
        f"train: --freeze {PROBE}: 60 tensors with 11,176,512 parameters and 20 batch norm layers stay as they are; "
        f"trained: fc.weight, fc.bias"
    )
    train_mode(model, PROBE)
    assert [part.training for part in model.modules() if isinstance(part, nn.BatchNorm2d)] == [False] * 20
    assert model.training
    assert model.fc.training
    (group,) = (group for group in parameter_groups(Config(data=""), model, list(model.fc.parameters()))[:1])
    assert group["params"][0] is model.fc.weight


@pytest.mark.parametrize("pattern", ["layer9", "nothing", PROBE.replace("fc", "head"), "."])
def test_a_pattern_that_leaves_nothing_to_do_is_refused_with_the_names(pattern: str) -> None:
    with pytest.raises(TrainError) as refused:
        freeze(make_model("resnet18", 10), pattern)
    every = pattern in (PROBE.replace("fc", "head"), ".")
    found = "all of the model's parameters; one must be trained" if every else "none of the model's parameters"
    assert str(refused.value).startswith(f"--freeze {pattern}: matches {found}: conv1.weight, bn1.weight, bn1.bias, ")
    assert "layer2.0.conv1.weight and 14 more of layer2" in str(refused.value)
    assert str(refused.value).endswith("fc.weight, fc.bias")


def test_what_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(TrainError, match=r"--freeze \(: not a regular expression"):
        parse(["--data", "unused", "--freeze", "("])


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False)
        self.three, self.head = nn.InstanceNorm2d(3, affine=True), nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [("one", "a"), (r"^one\.(weight|bias)$", "a"), ("weight", ""), ("two", "b"), ("^(?!head)", "ab"), ("", "")],
)
def test_a_batch_norm_is_frozen_with_all_of_its_parameters(pattern: str, kinds: str) -> None:
    """One without parameters, with its statistics. Other norms have none."""
    model = Norms()
    assert frozen_norms(model, pattern) == [{"a": model.one, "b": model.two}[kind] for kind in kinds]


def test_the_replicas_of_data_parallel_have_frozen_batch_norm_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    freeze(model, "^[01]")
    replicas, images = Replicas(model, 2), torch.rand(4, 3, 2, 2)
    train_mode(model, "^[01]")
    torch.testing.assert_close(replicas(images), model(images))


def test_mfu_leaves_out_the_gradients_that_are_not_computed() -> None:
    model = make_model("resnet18", 10)
    assert training_flops(model, 32) == 3 * forward_flops(model, 32)
    freeze(model, PROBE)
    assert forward_flops(model, 32) < training_flops(model, 32) < 1.01 * forward_flops(model, 32)


@pytest.mark.parametrize("kind", ["model", "pipeline --last-batch drop", "dual_batch --schedule multistep"])
def test_not_for_stages_and_a_parameter_server(kind: str) -> None:
    assert "does not support --freeze conv" in problem(f"--parallel {kind} --freeze conv")


OPTIONS = (
    "--arch cifar_resnet20 --image-size 16 --epochs 2 --batch-size 4 --lr 0.5 --workers 1 --device cpu --threads 1"
)


def test_a_run_is_resumed_with_the_same_value_only(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(data), "--output", str(tmp_path), *OPTIONS.split(), "--freeze", r"^(?!14\.)"]
    assert main([*options, "--epochs", "1"]) == 0
    for other in ("^0", ""):
        assert main([*options, "--freeze", other]) == 2
        said = capsys.readouterr().err
        assert rf"was saved with --freeze ^(?!14\.), not {other or 'unset'}; use the same value; to train" in said
    assert main(options) == 0
    assert "train: resumed" in capsys.readouterr().out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 40, 10)


@pytest.mark.parametrize(
    "more",
    [
        "--ema-decay 0.9 --weight-decay 0.1 --decay all",
        "--parallel fsdp --optimizer adamw",
        pytest.param("--syncbn custom --checkpoint-activations", marks=pytest.mark.ci),
        pytest.param("--amp O2 --ema-decay 0.9", marks=pytest.mark.ci),
    ],
)
def test_a_pretrained_backbone_stays_to_the_bit(more: str, data: Path, tmp_path: Path) -> None:
    """Weights, statistics and averages, across two epochs with validation on two ranks."""
    torch.manual_seed(1)
    backbone = make_model("cifar_resnet20", 10)
    for _ in range(2):
        backbone.train()(torch.rand(8, 3, 16, 16))
    before = backbone.state_dict()
    pattern = r"^(?!14\.)"  # of which 14 is the last layer
    assert float(before["1.running_mean"].abs().max()) > 0
    torch.save(before, tmp_path / "backbone.pt")
    kept = ["--checkpoints", tmp_path / "checkpoints", "--pretrained", tmp_path / "backbone.pt"]
    (first, _) = run(tmp_path, 2, "--data", data, *OPTIONS.split(), *more.split(), *kept, "--freeze", pattern)
    assert f"train: --freeze {pattern}: " in first.text
    assert "trained: 14.weight, 14.bias" in first.text
    best = torch.load(tmp_path / "checkpoints" / "best.pt", weights_only=True)
    kind = torch.float16 if "O2" in more else torch.float32  # in which the frozen weights of O2 are kept
    for part in ("model", *(["ema"] if best["ema"] else [])):
        pairs = {name: (value.to(kind), before[name].to(kind)) for name, value in best[part].items()}
        assert [name for name, pair in pairs.items() if not torch.equal(*pair)] == ["14.weight", "14.bias"], part
