"""--checkpoint-activations: the same training, to the bit, with less memory."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.models.vision_transformer import VisionTransformer

from tests.train.runs import digit_tree, run
from train.errors import TrainError
from train.models import make_model
from train.recompute import recompute_blocks

COMMON = "--arch cifar_resnet20 --image-size 16 --epochs 1 --batch-size 4 --lr 0.5 --workers 1 --device cpu"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads for such small models wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def resnet() -> nn.Module:
    return ResNet(Bottleneck, [2, 1, 1, 1], num_classes=10)


def convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], stochastic_depth_prob=0.5, num_classes=10)


def transformer() -> nn.Module:
    return VisionTransformer(32, 8, 4, 2, 32, 64, dropout=0.2, attention_dropout=0.2, num_classes=10)


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return partial(make_model, f"timm:{name}", 10, options=options)


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model without and with the option, the latter as a copy, like the model of averaged weights."""
    torch.manual_seed(0)
    plain = build().double().train()
    other = copy.deepcopy(plain)
    recompute_blocks(other, "mine")
    return plain, copy.deepcopy(other)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Loss, gradients and buffers after two steps, and what the generator of random numbers gives next."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(torch.rand(4, 3, 32, 32, dtype=torch.float64)), torch.arange(4))
        loss.backward()
        optimizer.step()
    found = {f"gradient of {name}": value.grad for name, value in model.named_parameters() if value.grad is not None}
    return found | model.state_dict() | {"loss": loss.detach(), "next": torch.rand(1)}


def in_full(name: str, **options: Any) -> Any:
    return pytest.param(partial(make_model, name, 10, options=options), marks=pytest.mark.ci, id=name)


@pytest.mark.parametrize(
    "build",
    [
        resnet,
        convnext,
        transformer,
        in_full("resnet18"),
        in_full("convnext_tiny", stochastic_depth_prob=0.5),
        in_full("vit_b_16", image_size=32, dropout=0.2),
        in_full("swin_t"),
        in_full("efficientnet_b0"),
        in_full("densenet121", drop_rate=0.2),
        pytest.param(of_timm("resnet18", drop_path_rate=0.5, drop_rate=0.2), marks=pytest.mark.slow),
        pytest.param(of_timm("vit_tiny_patch16_224", img_size=32, drop_path_rate=0.5), marks=pytest.mark.slow),
        pytest.param(of_timm("convnext_atto", drop_path_rate=0.5), marks=pytest.mark.slow),
    ],
)
def test_loss_gradients_and_statistics_are_the_same_bits(build: Callable[[], nn.Module]) -> None:
    plain, recomputed = map(trained, pair(build))
    assert plain.keys() == recomputed.keys()
    assert not [name for name, value in plain.items() if not torch.equal(value, recomputed[name])]
    counts = [value for name, value in plain.items() if name.endswith("num_batches_tracked")]
    assert all(count == 2 for count in counts)


def kept(model: nn.Module) -> int:
    """Bytes that are kept for the backward pass: what autograd saves, apart from weights, and the blocks' inputs."""
    own = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    alive: list[Tensor] = []
    found: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor.detach())  # no other tensor gets its memory
        return tensor

    hooks = [
        part.register_forward_pre_hook(lambda _, inputs: [count(each) for each in inputs] and None)
        for part in model.modules()
        if "forward" in vars(part)
    ]
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(torch.rand(4, 3, 32, 32, dtype=torch.float64))
    for hook in hooks:
        hook.remove()
    return sum(found.values())


@pytest.mark.parametrize("build", [resnet, convnext, transformer])
def test_less_is_kept_for_the_backward_pass(build: Callable[[], nn.Module]) -> None:
    plain, recomputed = map(kept, pair(build))
    assert recomputed < plain / 2


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(TrainError, match="--arch vgg11 has no blocks"):
        recompute_blocks(make_model("vgg11", 10), "vgg11")


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, "--dtype float64 --ema-decay 0.9"),
        (2, "--dtype float64"),
        (2, "--dtype float64 --parallel fsdp"),
        pytest.param(1, "--amp bf16", marks=pytest.mark.ci),
        pytest.param(1, "--amp fp16", marks=pytest.mark.ci),
        pytest.param(2, "--dtype float64 --accumulate 2 --syncbn custom", marks=pytest.mark.ci),
        pytest.param(2, "--dtype float64 --static-graph", marks=pytest.mark.ci),
        pytest.param(2, "--amp bf16 --parallel fsdp", marks=pytest.mark.ci),
        pytest.param(4, "--amp bf16 --parallel hsdp", marks=pytest.mark.ci),
        pytest.param(2, "--amp bf16 --parallel fsdp --accumulate 2 --syncbn custom", marks=pytest.mark.ci),
    ],
)
def test_a_run_has_the_same_weights_and_statistics(world: int, options: str, tmp_path: Path) -> None:
    data = digit_tree(tmp_path / "data", 40, 10)
    found = []
    for more in ([], ["--checkpoint-activations"]):
        folder = tmp_path / f"with{len(more)}"
        kept = ["--checkpoints", folder / "checkpoints"]
        run(folder, world, "--data", data, *COMMON.split(), *options.split(), *kept, *more, nodes=max(1, world // 2))
        found.append(torch.load(folder / "checkpoints" / "best.pt", weights_only=True))
    for part in ("model", "ema"):
        states = [state[part] or {} for state in found]
        assert states[0].keys() == states[1].keys()
        assert not [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
