"""All options of the trainer: group, help text, default and limits."""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train.arguments import check_limits, option, parsed
from train.errors import TrainError
from train.foreign import RECOMMENDED, about_timm, builder, is_foreign, is_timm, recommended
from train.own import CALLS as OWN
from train.own import is_own, own


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data set, augmentation and loading."""

    data: str = option(
        "data",
        "data set: folder with train/CLASS/ and val/CLASS/, .tar of it, tar shards, CIFAR, packed file, "
        "synthetic[:N], or your function MODULE:FUNCTION",
        MISSING,
    )
    image_size: int = option("data", "training image size in pixels", 224, minimum=8)
    phases: tuple[str, ...] = option(
        "data", "progressive resizing, SIZE@FRACTION: image size from that fraction of the epochs on", (), nargs="+"
    )
    val_resize: int = option(
        "data", "size of the shorter side before the validation crop; 0: image size x 256/224", 0, minimum=0
    )
    augment: str = option(
        "data",
        "crop: random resized crop; shift: random shift by up to 1/8 of the image size; none: same as in validation; "
        "or your function of an image and a seed, after crop and flip",
        "crop",
        choices=("crop", "shift", "none"),
        own=True,
    )
    crop_scale: float = option("data", "minimum area fraction of a random resized crop", 0.08, above=0, maximum=1)
    flip: float = option("data", "horizontal flip probability", 0.5, minimum=0, maximum=1)
    auto_augment: str = option(
        "data",
        "augmentation policy; trivial: TrivialAugment (wide); rand: RandAugment (torchvision operations, bilinear)",
        "none",
        choices=("none", "trivial", "rand"),
    )
    rand_operations: int = option("data", "RandAugment: number of operations per image", 2, minimum=1)
    rand_magnitude: int = option("data", "RandAugment: magnitude, 0 to 30", 9, minimum=0, maximum=30)
    color_jitter: tuple[float, ...] = option(
        "data",
        "colour jitter: maximum change of brightness, contrast, saturation and hue",
        (0.0, 0.0, 0.0, 0.0),
        nargs=4,
    )
    random_erase: float = option("data", "random erasing probability", 0.0, minimum=0, maximum=1)
    augment_on: str = option(
        "data",
        "where to compute --auto-augment, --color-jitter and --random-erase; device: in batches on the GPU",
        "cpu",
        choices=("cpu", "device"),
    )
    repeats: int = option(
        "data", "repeated augmentation: number of differently augmented copies of an image per step", 1, minimum=1
    )
    mean: tuple[float, ...] = option("data", "channel means for normalisation, in 0..1", (0.485, 0.456, 0.406), nargs=3)
    std: tuple[float, ...] = option(
        "data", "channel standard deviations for normalisation", (0.229, 0.224, 0.225), nargs=3
    )
    decoder: str = option(
        "data",
        "decoder for training images; auto: the fastest available (roi is compiled on first use)",
        "auto",
        choices=("auto", "roi", "torchvision", "pil"),
    )
    workers: int = option(
        "data", "data loading threads per process; -1: the process's share of the CPU cores", -1, minimum=-1
    )
    max_damaged: int = option("data", "number of damaged images that each process may skip", 10, minimum=0)
    headspace: bool = option("data", "train on one repeated batch, to measure the cost of data loading", False)
    prefetch: int = option("data", "number of batches to prefetch", 3, minimum=1)

    def check(self) -> None:
        """Raises TrainError."""
        if not (min(self.color_jitter) >= 0 and self.color_jitter[3] <= 0.5):
            jitter = " ".join(map(str, self.color_jitter))
            raise TrainError(f"--color-jitter {jitter}: values must be at least 0, and hue (the last) at most 0.5")
        for phase in self.phases:
            if not re.fullmatch(r"\d+@(0|1|0?\.\d+)", phase):
                raise TrainError(f"--phases {phase}: must have the form SIZE@FRACTION, such as 160@0.3")
            if int(phase.partition("@")[0]) < 8:
                raise TrainError(f"--phases {phase}: the size must be at least 8")
        if not all(value > 0 for value in self.std):
            raise TrainError(f"--std {' '.join(map(str, self.std))}: must be greater than 0")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and its initial weights."""

    arch: str = option(
        "model",
        "architecture: smallcnn, a cifar_* model, any torchvision classifier, timm:NAME, or package.module:function "
        "(called with num_classes); the last two set the default image size, mean and std",
        "resnet50",
    )
    model_kwargs: tuple[str, ...] = option(
        "model", "NAME=VALUE arguments for the model's constructor, such as dropout=0.2", (), nargs="+"
    )
    pretrained: str = option(
        "model",
        "initial weights, on every machine: a checkpoint of this trainer, a torchvision or timm state dict, or "
        ".safetensors; the last layer is reinitialised if the number of classes differs",
        "",
    )
    evaluate: str = option("model", "validate the weights in this file, without training", "")
    freeze: str = option(
        "model",
        "regular expression: parameters in whose name it is found are not trained, and batch norm layers of such "
        "parameters keep their statistics; '^(?!fc\\.)' trains only fc",
        "",
    )
    blurpool: bool = option("model", "use anti-aliased strided convolutions (BlurPool), as in ffcv", False)
    drop_path: float = option(
        "model", "stochastic depth rate of the last block; -1: the model's default", -1.0, minimum=-1, maximum=1
    )
    zero_init_residual: bool = option(
        "model", "torchvision ResNets: zero-initialise residual branches, for large batches", True
    )
    syncbn: str = option(
        "model",
        "synchronised batch norm; custom: on any device; library: torch.nn.SyncBatchNorm, on GPUs only",
        "none",
        choices=("none", "custom", "library"),
    )

    def model_options(self) -> dict[str, Any]:
        """Return --model-kwargs; values that are not Python literals are text."""
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
                raise TrainError(f"--model-kwargs {text}: must have the form NAME=VALUE, such as dropout=0.2")
        try:
            re.compile(self.freeze)
        except re.error as error:
            raise TrainError(f"--freeze {self.freeze}: not a regular expression: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Optimiser, loss, schedule and validation."""

    epochs: int = option("training", "number of epochs", 90, minimum=1)
    batch_size: int = option("training", "batch size per process", 256, minimum=1)
    seed: int = option("training", "random seed for weights, sample order and augmentation", 0, minimum=0)
    lr: float = option("training", "peak learning rate at the reference batch size", 0.1, above=0)
    lr_reference_batch: int = option("training", "global batch size that --lr refers to", 256, minimum=1)
    lr_scaling: str = option(
        "training",
        "factor of --lr: global batch size / reference batch size (linear), its square root (sqrt), or 1 (none)",
        "linear",
        choices=("linear", "sqrt", "none"),
    )
    momentum: float = option("training", "SGD momentum; beta1 of AdamW", 0.9, minimum=0)
    cycle_momentum: bool = option(
        "training",
        "onecycle: cycle momentum from 0.95 to 0.85 and back, as in torch's OneCycleLR, instead of --momentum",
        False,
    )
    weight_decay: float = option("training", "weight decay", 1e-4, minimum=0)
    decay: str = option(
        "training",
        "weights: no decay for biases, norms and the model's no_weight_decay(), as in timm; all: decay all parameters",
        "weights",
        choices=("weights", "all"),
    )
    no_decay: tuple[str, ...] = option(
        "training", "names or patterns of more parameters without weight decay, such as *pos_embedding", (), nargs="+"
    )
    layer_decay: float = option(
        "training",
        "layer-wise learning rate decay for fine-tuning; 1: off",
        1.0,
        above=0,
        maximum=1,
    )
    optimizer: str = option(
        "training",
        "optimiser; muon: for hidden weight matrices, with adamw for all other parameters; or your function of "
        "parameter groups and --lr that returns one",
        "sgd",
        choices=("sgd", "lars", "adamw", "muon"),
        own=True,
    )
    nesterov: bool = option("training", "use Nesterov momentum with SGD", False)
    lars_eta: float = option("training", "LARS trust coefficient", 1e-3, above=0)
    muon_momentum: float = option("training", "Muon momentum", 0.95, minimum=0)
    adam_beta2: float = option("training", "AdamW beta2; beta1 is --momentum", 0.999, minimum=0, maximum=1)
    accumulate: int = option("training", "gradient accumulation: number of batches per process and step", 1, minimum=1)
    clip_norm: float = option("training", "maximum gradient norm; 0: no clipping", 0.0, minimum=0)
    allow_nan: bool = option("training", "continue if the loss is inf or nan", False)
    ema_decay: float = option(
        "training", "decay of the weight EMA, which is used for validation; 0: off", 0.0, minimum=0, maximum=1
    )
    ema_every: int = option("training", "steps between EMA updates", 1, minimum=1)
    loss: str = option(
        "training",
        "ce: cross-entropy; bce: binary cross-entropy, summed over classes; or your function of logits and labels; "
        "validation always uses ce",
        "ce",
        choices=("ce", "bce"),
        own=True,
    )
    label_smoothing: float = option("training", "label smoothing", 0.0, minimum=0, maximum=1)
    mixup: float = option("training", "Mixup alpha; 0: off", 0.0, minimum=0)
    cutmix: float = option("training", "CutMix alpha; 0: off", 0.0, minimum=0)
    schedule: str = option(
        "training",
        "learning rate schedule, updated every step; or your function of a step, from 0, and the number of steps that "
        "returns a factor of --lr",
        "onecycle",
        choices=("onecycle", "cosine", "linear", "multistep"),
        own=True,
    )
    warmup: float = option(
        "training", "warm-up, as a fraction of all steps; -1: 0.3 for onecycle, 0.05 for others", -1.0, maximum=1
    )
    warmup_start: float = option(
        "training", "initial learning rate as a fraction of the peak (not for onecycle)", 0.0, minimum=0, maximum=1
    )
    milestones: tuple[float, ...] = option(
        "training", "multistep: fractions of the run at which the learning rate drops", (1 / 3, 2 / 3, 8 / 9), nargs="+"
    )
    gamma: float = option("training", "multistep: learning rate factor at each milestone", 0.1, above=0)
    div_factor: float = option("training", "onecycle: peak / initial learning rate", 25.0, above=0)
    final_div_factor: float = option("training", "onecycle: initial / final learning rate", 1e4, above=0)
    last_batch: str = option(
        "training", "keep or drop the last, smaller batch of an epoch", "keep", choices=("keep", "drop")
    )

    val_interval: int = option(
        "training", "epochs between validations; the last epoch is always validated", 1, minimum=1
    )
    val_batch_size: int = option("training", "validation batch size per process; 0: same as --batch-size", 0, minimum=0)
    val_flip: bool = option("training", "average the logits of each validation image and its horizontal flip", False)
    metrics: str = option(
        "training",
        "distribution of validation images; exact: every rank computes its share; scatter: rank 0 sends the indices",
        "exact",
        choices=("exact", "scatter"),
    )


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Parallelism over processes and devices."""

    parallel: str = option(
        "parallel",
        "parallel method; dp: DataParallel in one process; ddp: DistributedDataParallel; fsdp: FSDP2, sharded weights; "
        "hsdp: sharded over the processes of a node, replicated on every node; model: one stage per process; pipeline: "
        "model with micro-batches; dual_batch: parameter server; auto: ddp "
        "with several processes, else single",
        "auto",
        choices=("auto", "single", "dp", "ddp", "fsdp", "hsdp", "model", "pipeline", "dual_batch"),
    )
    replicas: int = option("parallel", "dp: number of replicas; 0: one per GPU, or 2 on CPU", 0, minimum=0)
    micro_batches: int = option(
        "parallel", "pipeline: number of micro-batches per batch; 0: one per stage", 0, minimum=0
    )
    pipeline_schedule: str = option("parallel", "pipeline schedule", "gpipe", choices=("gpipe", "1f1b"))

    @property
    def shards_weights(self) -> bool:
        """Whether every rank has only a shard of each weight."""
        return self.parallel in ("fsdp", "hsdp")


@dataclass(frozen=True, kw_only=True)
class DualBatchOptions:
    """Dual batch size learning."""

    dual_small: int = option(
        "dual batch", "number of workers with a small batch; --batch-size is the large one", 0, minimum=0
    )
    dual_ratio: float = option("dual batch", "duration of a round relative to large batches only", 1.0, above=0)
    dual_a: tuple[float, ...] = option(
        "dual batch", "seconds per sample: one value, or one per worker", (0.0,), nargs="+"
    )
    dual_b: tuple[float, ...] = option(
        "dual batch", "seconds per batch: one value, or one per worker", (0.0,), nargs="+"
    )
    dual_merge: str = option("dual batch", "weight merge method", "asp", choices=("asp", "bsp", "ssp"))
    dual_variant: str = option(
        "dual batch",
        "published: the paper's merge, truncated sizes; follow_up: W <- (W + f*w)/(1 + f), rounded sizes",
        "published",
        choices=("published", "follow_up"),
    )
    dual_staleness: int = option("dual batch", "ssp: maximum number of pushes that a worker may be ahead", 3, minimum=0)


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Data types and memory format."""

    amp: str = option(
        "precision",
        "mixed precision; auto: bf16 if the GPU supports it, else fp16 with loss scaling, none on CPU; O0-O3: see apex",
        "auto",
        choices=("auto", "none", "bf16", "fp16", "O0", "O1", "O2", "O3"),
    )
    dtype: str = option(
        "precision",
        "data type of weights and inputs; float64 is for numerical tests",
        "float32",
        choices=("float32", "float64"),
    )
    tf32: bool = option("precision", "use TF32 for fp32 matrix products and convolutions on GPUs", True)
    memory_format: str = option(
        "precision",
        "auto: channels_last on GPUs, except for --parallel pipeline",
        "auto",
        choices=("auto", "channels_last", "contiguous"),
    )


POWERSGD = re.compile(r"powersgd:([1-9]\d{0,3})")
ADAM = ("adamw", "muon")  # optimizers with Adam's betas
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile


@dataclass(frozen=True, kw_only=True)
class SystemOptions:
    """Use of the machine."""

    checkpoint_activations: bool = option(
        "system", "compute the activations of each block again in the backward pass: less memory, more time", False
    )
    compile: bool = option(
        "system", "compile the model with torch.compile; with fsdp and hsdp, each block of it by itself", False
    )
    compile_mode: str = option(
        "system",
        "torch.compile's mode; max-autotune*: try more kernels; reduce-overhead and max-autotune: use CUDA graphs",
        "default",
        choices=("default", *CUDA_GRAPHS, "max-autotune-no-cudagraphs"),
    )
    bucket_mb: float = option("system", "DDP gradient bucket size in MiB", 25.0, above=0)
    gradient_compression: str = option(
        "system",
        "ddp: compress gradients for the all-reduce; none; bf16: half of the traffic; powersgd:RANK: matrices of that "
        "rank, such as powersgd:4, for slow links (approximate; waits for the device at each bucket)",
        "none",
    )
    static_graph: bool = option("system", "use DDP with a static graph", False)
    device: str = option(
        "system", "auto: the process's GPU if available, else cpu", "auto", choices=("auto", "cpu", "cuda")
    )
    bind_cores: bool = option("system", "bind each process to the CPU cores near its GPU", True)
    deterministic: bool = option(
        "system", "use deterministic algorithms: slower, and an error if torch has none for an operation", False
    )
    threads: int = option("system", "CPU threads of torch per process; 0: torch's default", 0, minimum=0)
    timeout: float = option("system", "timeout in seconds for collectives and for reads of images", 600.0, above=0)

    @property
    def powersgd_rank(self) -> int:
        """The rank of --gradient-compression powersgd:RANK; 0 for another one."""
        found = POWERSGD.fullmatch(self.gradient_compression)
        return int(found[1]) if found else 0

    def check(self) -> None:
        """Raises TrainError."""
        if self.gradient_compression not in ("none", "bf16") and not self.powersgd_rank:
            raise TrainError(
                f"--gradient-compression {self.gradient_compression}: must be none, bf16 or powersgd:RANK, such as "
                f"powersgd:4"
            )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Results and checkpoints."""

    output: str = option("output", "output folder; if empty: $LAUNCHER_OUTPUT or ./output", "")
    resume: str = option(
        "output",
        "auto: resume from the last checkpoint in the output folder; none; a path to a checkpoint; or the URL of a "
        "--mirror, unless the output folder has a newer checkpoint",
        "auto",
    )
    mirror: str = option(
        "output", "upload each checkpoint during training to this URL too, such as s3://bucket/run (fsspec)", ""
    )
    checkpoints: str = option("output", "checkpoint folder; if empty: checkpoints/ in the output folder", "")
    log_every: int = option("output", "steps between log lines", 10, minimum=1)
    profile: bool = option(
        "output", "write a profiler trace of a few steps to profile/trace.json (for Perfetto)", False
    )
    replicate: bool = option(
        "output",
        "write checkpoints on every node, not only on rank 0; the newest complete one is loaded",
        False,
    )
    checkpoint_every: str = option(
        "output", "save checkpoints also every N steps (500) or at a time interval (30s, 5m, 1h) within an epoch", ""
    )
    keep: int = option("output", "number of epoch checkpoints to keep, in addition to last and best", 0, minimum=0)
    published_tags: bool = option(
        "output", "also write the tags Loss/Val and Accuracy/Val of the published two-node run", False
    )
    log_to: str = option(
        "output", "MODULE:FUNCTION: your function of each record of metrics.jsonl, such as for W&B, on rank 0", ""
    )
    print_digest: bool = option("output", "print the SHA-256 of each rank's weights at the end", False)

    @property
    def replicated(self) -> bool:
        """Whether every node stores checkpoints: with the option, and always in a job with min_nodes."""
        return self.replicate or "LAUNCHER_MIN_NODES" in os.environ

    @property
    def checkpoint_folder(self) -> Path:
        """The folder for saving and loading checkpoints."""
        return Path(self.checkpoints) if self.checkpoints else Path(self.output) / "checkpoints"

    def check(self) -> None:
        """Raises TrainError."""
        Every(self.checkpoint_every)
        if self.log_to and not is_own(self.log_to):
            raise TrainError(f"--log-to {self.log_to}: must be MODULE:FUNCTION, a function of yours")
        for name, url in (("mirror", self.mirror), ("resume", self.resume)):
            if name == "mirror" and url and "://" not in url:
                raise TrainError(f"--mirror {url}: not a URL, such as s3://bucket/run or file:///folder")
            if "://" in url and "@" in url.split("://", 1)[1].split("/", 1)[0]:
                raise TrainError(f"--{name}: a URL with credentials would appear in logs; set the store's variables")


SECONDS = {"s": 1, "m": 60, "h": 3600}


class Every:
    """--checkpoint-every: steps, such as `500`, or a time on rank 0's clock, such as `5m`; empty: never."""

    def __init__(self, text: str) -> None:
        """Raises TrainError if `text` is neither steps nor a time."""
        match = re.fullmatch(r"([1-9]\d*)([smh]?)", text or "1")
        if match is None:
            raise TrainError(f"--checkpoint-every {text}: neither steps, such as 500, nor a time, such as 5m")
        number, unit = int(match[1]), match[2]
        self._steps = number if text and not unit else 0
        self._seconds = number * SECONDS[unit] if unit else 0
        self._since = time.monotonic()

    def steps_done(self, step: int) -> bool:
        """Whether a checkpoint is due after this step of the run; the same on all ranks."""
        return bool(self._steps) and step > 0 and step % self._steps == 0

    def time_is_up(self) -> bool:
        """Whether the time has passed. If so, the clock restarts."""
        if not self._seconds or time.monotonic() - self._since < self._seconds:
            return False
        self._since = time.monotonic()
        return True


@dataclass(frozen=True, kw_only=True)
class Config(
    # fields, and so --help, are in the order of the bases from last to first
    DualBatchOptions,
    OutputOptions,
    SystemOptions,
    PrecisionOptions,
    ParallelOptions,
    TrainingOptions,
    ModelOptions,
    DataOptions,
):
    """The validated options of a run. Field `batch_size` is option `--batch-size`."""

    # options that were not given and that the model may set once it is built: see `settled`
    left_to_model: frozenset[str] = frozenset()

    def settled(self, about: Mapping[str, Any]) -> Config:
        """Return the options with those that are left to the model as it recommends, in a mapping `about` as in timm.

        Raises:
            TrainError: such a value is invalid.
        """
        side = None if "image_size" in self.left_to_model else self.image_size
        found = {name: value for name, value in recommended(about, side).items() if name in self.left_to_model}
        config = replace(self, left_to_model=frozenset(), **found)
        config.check()
        return config

    def side(self, epoch: int) -> int:
        """Return the size of training images in epoch `epoch` (from 0): that of the current phase, else image_size."""
        side = self.image_size
        for phase in self.phases:
            size, _, share = phase.partition("@")
            if epoch >= float(share) * self.epochs:
                side = int(size)
        return side

    def sides(self) -> list[int]:
        """Return all image sizes of the run, in training and validation."""
        return sorted({self.image_size, *(self.side(epoch) for epoch in range(self.epochs))})

    def check(self) -> None:
        """Raise TrainError if a value is outside its limits or malformed."""
        check_limits(self)
        for group in (DataOptions, ModelOptions, SystemOptions, OutputOptions):
            group.check(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values, for JSON and checkpoints."""
        return {name: value for name, value in asdict(self).items() if name != "left_to_model"}


def declared(argv: list[str]) -> tuple[Config, frozenset[str]]:
    """Return the options as given, and the names of those in `argv`; without a foreign model's own, torch or data.

    Raises:
        TrainError: see `parse`.
    """
    text = (
        "Train an image classifier on CPU (gloo) or GPUs (NCCL), as a single process or with torchrun. With --check, "
        "only check the options, without torch."
    )
    values, given = parsed(Config, argv, "python -m train", text)
    values["output"] = values["output"] or os.environ.get("LAUNCHER_OUTPUT", "output")
    config = Config(**values)
    config.check()
    return config, given


def parse(argv: list[str]) -> Config:
    """Parse and validate the options.

    Raises:
        TrainError: an option is unknown or missing, or its value is invalid.
    """
    config, given = declared(argv)
    for name in OWN:
        if is_own(text := getattr(config, name.replace("-", "_"))):
            own(name, text)  # it can be imported and called
    if not is_foreign(config.arch):
        return config
    config = replace(config, left_to_model=frozenset(RECOMMENDED) - given)
    if is_timm(config.arch):
        return config.settled(about_timm(config.arch))
    builder(config.arch)  # its module can be imported; the model is built once the classes are known
    return config
