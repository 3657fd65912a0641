"""Models for 32x32 images: ResNets, MobileNetV2 with and without batch norm, VGG16, those of experiments 2 and 3."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

# expansion, width, blocks, stride of the first block: Sandler et al., arXiv 1801.04381, table 2, with strides for 32x32
MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: max-pool


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise, 1x1 projection; a shortcut if the stride is 1, projected if the widths differ."""

    def __init__(self, channels: int, width: int, expansion: int, stride: int, norm: bool) -> None:
        super().__init__()
        inner = expansion * channels
        self.stride = stride
        self.expand = _conv(channels, inner, 1, norm=norm)
        self.depthwise = _conv(inner, inner, 3, stride, groups=inner, norm=norm)
        self.project = _conv(inner, width, 1, norm=norm)
        self.shortcut: nn.Module = nn.Identity()
        if stride == 1 and channels != width:
            self.shortcut = _conv(channels, width, 1, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> (N, width, H/stride, W/stride)."""
        out: Tensor = self.project(functional.relu(self.depthwise(functional.relu(self.expand(x)))))
        return out + self.shortcut(x) if self.stride == 1 else out


def _conv(channels: int, width: int, size: int, stride: int = 1, groups: int = 1, *, norm: bool) -> nn.Sequential:
    """Convolution, with batch norm or a bias."""
    conv = nn.Conv2d(channels, width, size, stride, size // 2, groups=groups, bias=not norm)
    return nn.Sequential(conv, nn.BatchNorm2d(width)) if norm else nn.Sequential(conv)


def cifar_mobilenet_v2(num_classes: int, norm: bool = True) -> nn.Module:
    """MobileNetV2 for 32x32 images, 2,296,922 parameters with 10 classes; layers: stem, 17 blocks, head."""
    layers: list[nn.Module] = [nn.Sequential(*_conv(3, 32, 3, norm=norm), nn.ReLU(inplace=True))]
    channels = 32
    for expansion, width, blocks, stride in MOBILENET_V2:
        for block in range(blocks):
            layers.append(InvertedResidual(channels, width, expansion, stride if block == 0 else 1, norm))
            channels = width
    head = (*_conv(channels, 1280, 1, norm=norm), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Sequential(*head, nn.Linear(1280, num_classes)))


def cifar_mobilenet_v2_nobn(num_classes: int) -> nn.Module:
    """MobileNetV2 for 32x32 images without batch norm."""
    return cifar_mobilenet_v2(num_classes, norm=False)


def cifar_vgg16(num_classes: int) -> nn.Module:
    """VGG16 with batch norm and one linear layer, for 32x32 images (the side is halved five times)."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG16:
        if width:
            layers += [*_conv(channels, width, 3, norm=True), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def cifar_convnet(num_classes: int) -> nn.Module:
    """Experiment 3's model, 825,988 parameters with 100 classes; its only batch norm follows a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(inplace=True)),
        *(nn.Conv2d(32, 32, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
        *(nn.Linear(6272, 128), nn.BatchNorm1d(128, affine=False), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Linear(128, num_classes),
    )


class _Residual(nn.Module):
    """Two 3x3 convolutions as in Keras; a projected shortcut where the side is halved."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        first = _keras_conv(channels, width, 3, stride)
        self.body = nn.Sequential(*first, nn.ReLU(inplace=True), *_keras_conv(width, width, 3))
        self.shortcut = nn.Identity() if stride == 1 else _keras_conv(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> (N, width, H/stride, W/stride)."""
        return functional.relu(self.body(x) + self.shortcut(x))


def _keras_conv(channels: int, width: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution with a bias, he_normal weights and padding `same`, then batch norm with Keras's defaults.

    `same` pads an even side of a 3x3 convolution with stride 2 only at its end, by one.
    """
    conv = nn.Conv2d(channels, width, size, stride, size // 2 if stride == 1 else 0)
    std = math.sqrt(2 / (channels * size * size)) / 0.87962566103423978  # of a normal distribution cut at two sigma
    nn.init.trunc_normal_(conv.weight, std=std, a=-2 * std, b=2 * std)
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    pad = nn.ZeroPad2d((0, 1, 0, 1)) if (size, stride) == (3, 2) else nn.Identity()
    return nn.Sequential(pad, conv, nn.BatchNorm2d(width, eps=1e-3, momentum=0.01))  # Keras's momentum is 0.99


def cifar_resnet18_keras(num_classes: int) -> nn.Module:
    """Experiment 2's model: `cifar_resnet18` with Keras's biases, initial weights, padding and batch norm."""
    layers: list[nn.Module] = [*_keras_conv(3, 64, 3), nn.ReLU(inplace=True)]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [_Residual(channels, width, 1 if channels == width else 2), _Residual(width, width, 1)]
        channels = width
    head = nn.Linear(channels, num_classes)
    nn.init.xavier_uniform_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


class BasicBlock(nn.Module):
    """Basic residual block: He et al., arXiv 1512.03385, figure 5 left."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> (N, width, H/stride, W/stride)."""
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def _cifar_resnet(num_classes: int, widths: tuple[int, ...], blocks: int) -> nn.Module:
    """ResNet with stem stride 1, no max-pool, `blocks` blocks per width; all stages except the first halve the side."""
    stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)]
    channels = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(BasicBlock(channels, width, 2 if stage and not block else 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def cifar_resnet18(num_classes: int) -> nn.Module:
    """ResNet-18 for 32x32 images, 11.2 million parameters."""
    return _cifar_resnet(num_classes, (64, 128, 256, 512), 2)


def cifar_resnet20(num_classes: int) -> nn.Module:
    """ResNet-20 for 32x32 images (He et al., section 4.2, with projection shortcuts), 0.27 million parameters."""
    return _cifar_resnet(num_classes, (16, 32, 64), 3)
