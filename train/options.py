"""Options for parallelism, precision, system and output; options for data, model and training are in `train.config`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from train.arguments import option
from train.every import Every


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Parallelism over processes and devices."""

    parallel: str = option(
        "parallel",
        "parallel method; dp: DataParallel in one process; ddp: DistributedDataParallel; fsdp: FSDP2, sharded weights; "
        "model: one stage per process; pipeline: model with micro-batches; dual_batch: parameter server; auto: ddp "
        "with several processes, else single",
        "auto",
        choices=("auto", "single", "dp", "ddp", "fsdp", "model", "pipeline", "dual_batch"),
    )
    replicas: int = option("parallel", "dp: number of replicas; 0: one per GPU, or 2 on CPU", 0, minimum=0)
    micro_batches: int = option(
        "parallel", "pipeline: number of micro-batches per batch; 0: one per stage", 0, minimum=0
    )
    pipeline_schedule: str = option("parallel", "pipeline schedule", "gpipe", choices=("gpipe", "1f1b"))


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


@dataclass(frozen=True, kw_only=True)
class SystemOptions:
    """Use of the machine."""

    compile: bool = option("system", "compile the model with torch.compile", False)
    bucket_mb: float = option("system", "DDP gradient bucket size in MiB", 25.0, above=0)
    gradient_compression: str = option(
        "system",
        "ddp: compress gradients for the all-reduce; bf16 halves the traffic",
        "none",
        choices=("none", "bf16"),
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


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Results and checkpoints."""

    output: str = option("output", "output folder; if empty: $LAUNCHER_OUTPUT or ./output", "")
    resume: str = option(
        "output", "auto: resume from the last checkpoint in the output folder; none; or path to a checkpoint", "auto"
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
