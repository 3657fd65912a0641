"""Options of how and where a run is computed; those of what is computed are in `train.config`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from train.arguments import option
from train.every import Every


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How several processes or devices share the work."""

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


@dataclass(frozen=True, kw_only=True)
class DualBatchOptions:
    """The plan and the merge of a dual-batch run."""

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


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Types of numbers, and layout."""

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
        "precision",
        "auto: channels_last on a GPU, but for pipelines",
        "auto",
        choices=("auto", "channels_last", "contiguous"),
    )


@dataclass(frozen=True, kw_only=True)
class SystemOptions:
    """How the machine is used."""

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


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Results and checkpoints."""

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

    @property
    def replicated(self) -> bool:
        """Whether every node has the checkpoints: as the option says, and always in a job with min_nodes."""
        return self.replicate or "LAUNCHER_MIN_NODES" in os.environ

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints are saved, and looked for."""
        return Path(self.checkpoints) if self.checkpoints else Path(self.output) / "checkpoints"

    def check(self) -> None:
        """Raises TrainError."""
        Every(self.checkpoint_every)
