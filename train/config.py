"""Every option of the trainer, declared once: group, help text, default and limits."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train.arguments import option, parsed
from train.errors import TrainError
from train.every import Every
from train.foreign import is_foreign, settings


@dataclass(frozen=True)
class Config:
    """The checked options of one run. Field `batch_size` is `--batch-size`."""

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
    crop_scale: float = option("data", "smallest fraction of the area that a random crop keeps", 0.08, above=0)
    flip: float = option("data", "probability of a horizontal flip", 0.5, least=0)
    auto_augment: str = option(
        "data",
        "trivial: TrivialAugment (wide); rand: RandAugment; with torchvision's operations, bilinear",
        "none",
        choices=("none", "trivial", "rand"),
    )
    rand_operations: int = option("data", "rand: operations per image", 2, least=1)
    rand_magnitude: int = option("data", "rand: their strength, 0 to 30", 9, least=0)
    color_jitter: tuple[float, ...] = option(
        "data", "largest change of brightness, contrast, saturation and hue", (0.0, 0.0, 0.0, 0.0), nargs=4
    )
    random_erase: float = option("data", "probability that a random box is erased", 0.0, least=0)
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
    zero_init_residual: bool = option(
        "model", "torchvision's resnets: residual branches begin at zero, for large batches", True
    )
    syncbn: str = option(
        "model",
        "synchronised batch norm: custom (ours) works everywhere, library (torch's) on GPUs only",
        "none",
        choices=("none", "custom", "library"),
    )

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
        "training", "weights: no decay on biases and norms; all: on everything", "weights", choices=("weights", "all")
    )
    optimizer: str = option("training", "sgd with momentum, lars or adamw", "sgd", choices=("sgd", "lars", "adamw"))
    nesterov: bool = option("training", "sgd: Nesterov momentum", False)
    lars_eta: float = option("training", "trust coefficient of lars", 1e-3, above=0)
    adam_beta2: float = option("training", "second beta of adamw; the first is --momentum", 0.999, least=0)
    accumulate: int = option("training", "batches per process whose gradients are summed for one step", 1, least=1)
    clip_norm: float = option("training", "largest norm of all gradients together; 0: no limit", 0.0, least=0)
    allow_nan: bool = option("training", "go on when the loss is inf or nan", False)
    ema_decay: float = option("training", "decay of the weights' average, used in validation; 0: none", 0.0, least=0)
    ema_every: int = option("training", "steps between two averagings", 1, least=1)
    loss: str = option(
        "training",
        "ce: cross-entropy; bce: binary cross-entropy, summed over the classes; in validation always ce",
        "ce",
        choices=("ce", "bce"),
    )
    label_smoothing: float = option("training", "share of a label spread over all classes", 0.0, least=0)
    mixup: float = option("training", "alpha of mixup; 0: none", 0.0, least=0)
    cutmix: float = option("training", "alpha of cutmix; 0: none", 0.0, least=0)
    schedule: str = option(
        "training",
        "learning-rate schedule, over all steps",
        "onecycle",
        choices=("onecycle", "cosine", "linear", "multistep"),
    )
    warmup: float = option(
        "training", "share of all steps during which the rate rises; -1: onecycle 0.3, others 0.05", -1.0
    )
    warmup_start: float = option("training", "not onecycle: share of the peak at which the rate begins", 0.0, least=0)
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
    metrics: str = option(
        "training",
        "how validation is divided; exact: every rank computes its part; scatter: rank 0 sends out the parts",
        "exact",
        choices=("exact", "scatter"),
    )

    parallel: str = option(
        "parallel",
        "single; dp: replicas in one process; ddp; fsdp: as ddp, with the weights divided over the processes; model: a "
        "stage per process; pipeline: the same with micro-batches; dual_batch: parameter server; auto: ddp on several "
        "processes, else single",
        "auto",
        choices=("auto", "single", "dp", "ddp", "fsdp", "model", "pipeline", "dual_batch"),
    )
    replicas: int = option("parallel", "dp: devices; 0: all GPUs, or 2 on CPU", 0, least=0)
    micro_batches: int = option("parallel", "pipeline: micro-batches per batch; 0: one per stage", 0, least=0)
    pipeline_schedule: str = option("parallel", "pipeline: schedule", "gpipe", choices=("gpipe", "1f1b"))

    dual_small: int = option("dual batch", "workers with a small batch; --batch-size is the large one", 0, least=0)
    dual_ratio: float = option("dual batch", "a round's time relative to all-large", 1.0, above=0)
    dual_a: tuple[float, ...] = option("dual batch", "seconds per sample; one, or one per worker", (0.0,), nargs="+")
    dual_b: tuple[float, ...] = option("dual batch", "seconds per batch; one, or one per worker", (0.0,), nargs="+")
    dual_merge: str = option("dual batch", "how weights are merged", "asp", choices=("asp", "bsp", "ssp"))
    dual_variant: str = option(
        "dual batch",
        "published: the paper's merge, sizes truncated; follow_up: W <- (W + f*w)/(1 + f), sizes rounded",
        "published",
        choices=("published", "follow_up"),
    )
    dual_staleness: int = option("dual batch", "ssp: pushes by which a worker may be ahead", 3, least=0)

    amp: str = option(
        "precision",
        "auto: bf16 if the GPU has it, else fp16 with a loss scale, none on CPU; O0 to O3 as in apex",
        "auto",
        choices=("auto", "none", "bf16", "fp16", "O0", "O1", "O2", "O3"),
    )
    dtype: str = option(
        "precision", "weights and inputs; float64 is for equality tests", "float32", choices=("float32", "float64")
    )
    tf32: bool = option("precision", "fp32 products of a GPU in TF32, with 10 bits of mantissa", True)
    memory_format: str = option(
        "precision", "auto: channels_last on a GPU", "auto", choices=("auto", "channels_last", "contiguous")
    )

    compile: bool = option("system", "torch.compile the model", False)
    bucket_mb: float = option("system", "size of DDP's gradient buckets in MiB", 25.0, above=0)
    gradient_compression: str = option(
        "system", "ddp: type in which gradients travel; bf16 halves the traffic", "none", choices=("none", "bf16")
    )
    static_graph: bool = option("system", "tell DDP that every step runs the same graph", False)
    device: str = option("system", "auto: this process's GPU, else cpu", "auto", choices=("auto", "cpu", "cuda"))
    bind_cores: bool = option("system", "keep a process on the cores near its GPU", True)
    deterministic: bool = option(
        "system", "the same result in every run on the same GPUs; slower, and an error where torch cannot", False
    )
    threads: int = option("system", "torch threads per process on CPU; 0: torch's default", 0, least=0)
    timeout: float = option(
        "system", "seconds until a stuck collective, or a read that does not return, is an error", 600.0, above=0
    )

    output: str = option("output", "folder of the results; default: $LAUNCHER_OUTPUT or ./output", "")
    resume: str = option("output", "auto: from the output folder's last checkpoint; none; or a checkpoint", "auto")
    checkpoints: str = option("output", "folder of the checkpoints; default: checkpoints in the output folder", "")
    log_every: int = option("output", "steps between console lines", 10, least=1)
    profile: bool = option("output", "trace a few steps of the first epoch into profile/trace.json (Perfetto)", False)
    replicate: bool = option(
        "output",
        "each node's first worker writes checkpoints, not rank 0 alone; the newest whole one counts",
        False,
    )
    checkpoint_every: str = option(
        "output", "also a checkpoint every so many steps (500), or so often (30s, 5m, 1h); one an epoch is always", ""
    )
    keep: int = option("output", "epoch checkpoints kept beside last and best", 0, least=0)
    published_tags: bool = option(
        "output", "write Loss/Val and Accuracy/Val too, the names of the published two-node run", False
    )
    print_digest: bool = option("output", "every rank prints the SHA-256 of its weights at the end", False)

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

    @property
    def replicated(self) -> bool:
        """Whether every node has the checkpoints: as the option says, and always in a job with min_nodes."""
        return self.replicate or "LAUNCHER_MIN_NODES" in os.environ

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints are saved, and looked for."""
        return Path(self.checkpoints) if self.checkpoints else Path(self.output) / "checkpoints"

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
    config = _check_values(Config(**values))
    if not is_foreign(config.arch):
        return config
    side = config.image_size if "image_size" in given else None
    recommended = settings(config.arch, config.model_options(), side)
    return _check_values(replace(config, **{name: value for name, value in recommended.items() if name not in given}))


def _check_values(config: Config) -> Config:
    for name in (
        "crop_scale",
        "flip",
        "warmup",
        "ema_decay",
        "label_smoothing",
        "adam_beta2",
        "random_erase",
        "warmup_start",
    ):
        if not getattr(config, name) <= 1:
            raise TrainError(f"--{name.replace('_', '-')} {getattr(config, name)}: a share, so at most 1")
    if config.rand_magnitude > 30:
        raise TrainError(f"--rand-magnitude {config.rand_magnitude}: must be at most 30")
    if not (min(config.color_jitter) >= 0 and config.color_jitter[3] <= 0.5):
        jitter = " ".join(map(str, config.color_jitter))
        raise TrainError(f"--color-jitter {jitter}: none below 0, and the hue's (the last) at most 0.5")
    for phase in config.phases:
        if not re.fullmatch(r"\d+@(0|1|0?\.\d+)", phase):
            raise TrainError(f"--phases {phase}: not of the form SIDE@SHARE, such as 160@0.3")
        if int(phase.partition("@")[0]) < 8:
            raise TrainError(f"--phases {phase}: the side must be at least 8")
    Every(config.checkpoint_every)
    for text in config.model_kwargs:
        if not re.match(r"[a-z_]\w*=.", text):
            raise TrainError(f"--model-kwargs {text}: not of the form NAME=VALUE, such as dropout=0.2")
    if not all(value > 0 for value in config.std):
        raise TrainError(f"--std {' '.join(map(str, config.std))}: must be above 0")
    return config
