"""Every option of the trainer, declared once: group, help text, default and limits."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import MISSING, asdict, dataclass, replace
from typing import Any

from train.arguments import check_limits, option, parsed
from train.errors import TrainError
from train.foreign import is_foreign, settings
from train.options import DualBatchOptions, OutputOptions, ParallelOptions, PrecisionOptions, SystemOptions


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Images, and what is done to them."""

    data: str = option(
        "data",
        "folder with train/ and val/ of class folders, a .tar of it, tar shards, CIFAR, a packed file, synthetic[:N]",
        MISSING,
    )
    image_size: int = option("data", "side of a training image in pixels", 224, least=8)
    phases: tuple[str, ...] = option(
        "data", "progressive resizing, SIDE@SHARE: after that share of the epochs, train at that side", (), nargs="+"
    )
    val_resize: int = option("data", "shorter side before the validation crop; 0: image size x 256/224", 0, least=0)
    augment: str = option(
        "data",
        "crop: random resized crop; shift: random shift by an eighth of the side; none: as in validation",
        "crop",
        choices=("crop", "shift", "none"),
    )
    crop_scale: float = option("data", "smallest fraction of the area that a random crop keeps", 0.08, above=0, most=1)
    flip: float = option("data", "probability of a horizontal flip", 0.5, least=0, most=1)
    auto_augment: str = option(
        "data",
        "trivial: TrivialAugment (wide); rand: RandAugment; with torchvision's operations, bilinear",
        "none",
        choices=("none", "trivial", "rand"),
    )
    rand_operations: int = option("data", "rand: operations per image", 2, least=1)
    rand_magnitude: int = option("data", "rand: their strength, 0 to 30", 9, least=0, most=30)
    color_jitter: tuple[float, ...] = option(
        "data", "largest change of brightness, contrast, saturation and hue", (0.0, 0.0, 0.0, 0.0), nargs=4
    )
    random_erase: float = option("data", "probability that a random box is erased", 0.0, least=0, most=1)
    augment_on: str = option(
        "data",
        "where --auto-augment, --color-jitter and --random-erase are computed; device: by batches, with the same draws",
        "cpu",
        choices=("cpu", "device"),
    )
    repeats: int = option(
        "data", "repeated augmentation: an image comes so often in a step, with other augmentation", 1, least=1
    )
    mean: tuple[float, ...] = option("data", "channel means, in 0..1", (0.485, 0.456, 0.406), nargs=3)
    std: tuple[float, ...] = option("data", "channel standard deviations", (0.229, 0.224, 0.225), nargs=3)
    decoder: str = option(
        "data",
        "decoder of training images; auto: the fastest that works here (roi is compiled on first use)",
        "auto",
        choices=("auto", "roi", "simplejpeg", "torchvision", "pil"),
    )
    workers: int = option("data", "decoding threads per process; -1: its share of the cores", -1, least=-1)
    max_damaged: int = option("data", "damaged images to skip before the run fails", 10, least=0)
    headspace: bool = option("data", "train on one repeated batch, to measure the cost of data loading", False)
    prefetch: int = option("data", "batches decoded ahead", 3, least=1)

    def check(self) -> None:
        """Raises TrainError."""
        if not (min(self.color_jitter) >= 0 and self.color_jitter[3] <= 0.5):
            jitter = " ".join(map(str, self.color_jitter))
            raise TrainError(f"--color-jitter {jitter}: none below 0, and the hue's (the last) at most 0.5")
        for phase in self.phases:
            if not re.fullmatch(r"\d+@(0|1|0?\.\d+)", phase):
                raise TrainError(f"--phases {phase}: not of the form SIDE@SHARE, such as 160@0.3")
            if int(phase.partition("@")[0]) < 8:
                raise TrainError(f"--phases {phase}: the side must be at least 8")
        if not all(value > 0 for value in self.std):
            raise TrainError(f"--std {' '.join(map(str, self.std))}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, and the weights that it begins with."""

    arch: str = option(
        "model",
        "smallcnn, a cifar_* model, any classifier of torchvision, timm:NAME, or package.module:function, which gets "
        "num_classes; the last two say the default image size, mean and std",
        "resnet50",
    )
    model_kwargs: tuple[str, ...] = option(
        "model", "NAME=VALUE, passed to the model's constructor, such as dropout=0.2", (), nargs="+"
    )
    pretrained: str = option(
        "model",
        "weights to begin with: a checkpoint of ours, or a state dict of torchvision or timm; with another number of "
        "classes the last layer is new. On every machine",
        "",
    )
    evaluate: str = option("model", "only validate the weights in this file, without training", "")
    blurpool: bool = option("model", "blur the input of strided convolutions, as ffcv does", False)
    drop_path: float = option(
        "model", "stochastic depth: rate of the last block; -1: the model's own", -1.0, least=-1, most=1
    )
    zero_init_residual: bool = option(
        "model", "torchvision's resnets: residual branches begin at zero, for large batches", True
    )
    syncbn: str = option(
        "model",
        "synchronised batch norm: custom (ours) works everywhere, library (torch's) on GPUs only",
        "none",
        choices=("none", "custom", "library"),
    )

    def model_options(self) -> dict[str, Any]:
        """--model-kwargs; a value that is no Python literal is text."""
        found = {}
        for text in self.model_kwargs:
            name, _, value = text.partition("=")
            try:
                found[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                found[name] = value
        return found

    def check(self) -> None:
        """Raises TrainError."""
        for text in self.model_kwargs:
            if not re.match(r"[a-z_]\w*=.", text):
                raise TrainError(f"--model-kwargs {text}: not of the form NAME=VALUE, such as dropout=0.2")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Steps, optimiser, loss, schedule and validation."""

    epochs: int = option("training", "passes over the training set", 90, least=1)
    batch_size: int = option("training", "images per step and process", 256, least=1)
    seed: int = option("training", "seed of weights, order and augmentation", 0, least=0)
    lr: float = option("training", "peak learning rate at the reference batch", 0.1, above=0)
    lr_reference_batch: int = option("training", "global batch that --lr refers to", 256, least=1)
    lr_scaling: str = option(
        "training", "linear: lr x global batch / reference batch", "linear", choices=("linear", "none")
    )
    momentum: float = option("training", "momentum of SGD", 0.9, least=0)
    cycle_momentum: bool = option(
        "training",
        "onecycle: momentum from 0.95 to 0.85 and back, as torch does it, in place of --momentum",
        False,
    )
    weight_decay: float = option("training", "L2 penalty", 1e-4, least=0)
    decay: str = option(
        "training",
        "weights: not on biases, norms and what the model names in no_weight_decay(), as timm's; all: on everything",
        "weights",
        choices=("weights", "all"),
    )
    no_decay: tuple[str, ...] = option(
        "training", "names or patterns of further parameters without decay, such as *pos_embedding", (), nargs="+"
    )
    layer_decay: float = option(
        "training",
        "fine-tuning: factor of the rate from each layer to the one before it; 1: one rate",
        1.0,
        above=0,
        most=1,
    )
    optimizer: str = option(
        "training",
        "sgd with momentum, lars, adamw; muon: for the matrices of hidden layers, with adamw for the rest",
        "sgd",
        choices=("sgd", "lars", "adamw", "muon"),
    )
    nesterov: bool = option("training", "sgd: Nesterov momentum", False)
    lars_eta: float = option("training", "trust coefficient of lars", 1e-3, above=0)
    muon_momentum: float = option("training", "muon: momentum of its matrices", 0.95, least=0)
    adam_beta2: float = option("training", "second beta of adamw; the first is --momentum", 0.999, least=0, most=1)
    accumulate: int = option("training", "batches per process whose gradients are summed for one step", 1, least=1)
    clip_norm: float = option("training", "largest norm of all gradients together; 0: no limit", 0.0, least=0)
    allow_nan: bool = option("training", "go on when the loss is inf or nan", False)
    ema_decay: float = option(
        "training", "decay of the weights' average, used in validation; 0: none", 0.0, least=0, most=1
    )
    ema_every: int = option("training", "steps between two averagings", 1, least=1)
    loss: str = option(
        "training",
        "ce: cross-entropy; bce: binary cross-entropy, summed over the classes; in validation always ce",
        "ce",
        choices=("ce", "bce"),
    )
    label_smoothing: float = option("training", "share of a label spread over all classes", 0.0, least=0, most=1)
    mixup: float = option("training", "alpha of mixup; 0: none", 0.0, least=0)
    cutmix: float = option("training", "alpha of cutmix; 0: none", 0.0, least=0)
    schedule: str = option(
        "training",
        "learning-rate schedule, over all steps",
        "onecycle",
        choices=("onecycle", "cosine", "linear", "multistep"),
    )
    warmup: float = option(
        "training", "share of all steps during which the rate rises; -1: onecycle 0.3, others 0.05", -1.0, most=1
    )
    warmup_start: float = option(
        "training", "not onecycle: share of the peak at which the rate begins", 0.0, least=0, most=1
    )
    milestones: tuple[float, ...] = option(
        "training", "multistep: shares of the run after which the rate drops", (1 / 3, 2 / 3, 8 / 9), nargs="+"
    )
    gamma: float = option("training", "multistep: factor at each milestone", 0.1, above=0)
    div_factor: float = option("training", "onecycle: peak / first rate", 25.0, above=0)
    final_div_factor: float = option("training", "onecycle: first / last rate", 1e4, above=0)
    last_batch: str = option(
        "training", "keep or drop the last, smaller batch of an epoch", "keep", choices=("keep", "drop")
    )

    val_interval: int = option("training", "epochs between two validations; the last epoch always has one", 1, least=1)
    val_batch_size: int = option("training", "images per validation batch and process; 0: --batch-size", 0, least=0)
    val_flip: bool = option("training", "validate the mean of the logits of an image and of its mirror image", False)
    metrics: str = option(
        "training",
        "how validation is divided; exact: every rank computes its part; scatter: rank 0 sends out the parts",
        "exact",
        choices=("exact", "scatter"),
    )


@dataclass(frozen=True, kw_only=True)
class Config(
    # a dataclass has the fields of its last base first, and so has --help
    OutputOptions,
    SystemOptions,
    PrecisionOptions,
    DualBatchOptions,
    ParallelOptions,
    TrainingOptions,
    ModelOptions,
    DataOptions,
):
    """The checked options of one run. Field `batch_size` is `--batch-size`."""

    def side(self, epoch: int) -> int:
        """The side of training images in epoch `epoch` (from 0): that of the current phase, else image_size."""
        side = self.image_size
        for phase in self.phases:
            size, _, share = phase.partition("@")
            if epoch >= float(share) * self.epochs:
                side = int(size)
        return side

    def sides(self) -> list[int]:
        """The sides of all images of the run, in training and validation."""
        return sorted({self.image_size, *(self.side(epoch) for epoch in range(self.epochs))})

    def check(self) -> None:
        """Raises TrainError: a value is outside its limits, or not of its form."""
        check_limits(self)
        for group in (DataOptions, ModelOptions, OutputOptions):
            group.check(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and checkpoints."""
        return asdict(self)


def parse(argv: list[str]) -> Config:
    """The checked options.

    Raises:
        TrainError: a value is outside its limits.
        SystemExit: 2, from argparse, for unknown options.
    """
    text = "Trains an image classifier, alone or under torchrun, on CPU (gloo) or GPUs (NCCL)."
    values, given = parsed(Config, argv, "python -m train", text)
    values["output"] = values["output"] or os.environ.get("LAUNCHER_OUTPUT", "output")
    config = Config(**values)
    config.check()
    if not is_foreign(config.arch):
        return config
    side = config.image_size if "image_size" in given else None
    recommended = settings(config.arch, config.model_options(), side)
    config = replace(config, **{name: value for name, value in recommended.items() if name not in given})
    config.check()
    return config
