"""--parallel: which options and numbers of processes each method rejects; without torch, as `launcher plan` asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from train.config import CUDA_GRAPHS, Config
from train.own import is_own


def no_problems(_config: Config, _processes: int) -> Iterator[str]:
    """Accept any options and number of processes."""
    yield from ()


@dataclass(frozen=True)
class Abilities:
    """`cannot`: names of options that the method does not support, as in `combinations.used`.

    `problems`: yields further reasons to reject options or the number of processes, which is 0 if it is not known.
    """

    cannot: frozenset[str] = frozenset()
    problems: Callable[[Config, int], Iterator[str]] = no_problems


def _single(_config: Config, processes: int) -> Iterator[str]:
    if processes > 1:
        yield f"--parallel single runs one process, not {processes}; use ddp, or set processes to 1"


def _dp(_config: Config, processes: int) -> Iterator[str]:
    if processes > 1:
        yield f"--parallel dp runs one process with all devices, not {processes}; set processes to 1, or use ddp"


def _sharded(config: Config, processes: int) -> Iterator[str]:
    if processes == 1:
        yield f"--parallel {config.parallel} shards the weights over processes; start two or more (processes: 2)"
    if config.compile and config.compile_mode in CUDA_GRAPHS:
        yield (
            f"--parallel {config.parallel} with --compile-mode {config.compile_mode}: a CUDA graph reads weights at "
            f"the same addresses each time, and here they are gathered anew for each pass; use --compile-mode default "
            f"or max-autotune-no-cudagraphs"
        )


def _stages(config: Config, processes: int) -> Iterator[str]:
    if processes == 1:
        yield f"--parallel {config.parallel} splits the model over processes; start two or more (processes: 2)"


def _pipeline(config: Config, processes: int) -> Iterator[str]:
    yield from _stages(config, processes)
    pieces = config.micro_batches or processes
    if pieces and config.batch_size % pieces:
        yield f"--batch-size {config.batch_size}: not a multiple of the {pieces} micro-batches of a step"
    if pieces < processes:
        yield f"--micro-batches {pieces}: must be at least the number of stages ({processes})"
    if config.last_batch != "drop":
        yield "--parallel pipeline needs --last-batch drop: its schedules have a fixed batch size"
    if config.memory_format == "channels_last":
        yield "--parallel pipeline does not support --memory-format channels_last: its stages send contiguous tensors"


def _dual_batch(config: Config, processes: int) -> Iterator[str]:
    if is_own(config.optimizer):
        yield f"--parallel dual_batch does not support --optimizer {config.optimizer}; remove the option, or use ddp"
    if processes == 1:
        yield "--parallel dual_batch: needs a server and at least one worker; start two or more processes"
    if config.schedule != "multistep":
        yield f"--parallel dual_batch needs --schedule multistep, not {config.schedule}"
    if config.warmup > 0:  # by default it has none
        yield f"--parallel dual_batch has no warm-up, but --warmup is {config.warmup}; remove the option"


# LARS and Muon need whole tensors, and O2 and O3 their weights in 16 bits
SHARDED = Abilities(frozenset({"half_weights", "optimizer", "static_graph", "replicate"}), _sharded)
# stages do not share overflows or the norm of all gradients; parameter names differ between stages
STAGES = frozenset(
    {"amp", "clip_norm", "ema_decay", "syncbn", "compile", "replicate", "layer_decay", "no_decay"}
    | {"checkpoint_activations", "freeze"}
)
ABILITIES = {
    "single": Abilities(problems=_single),
    "ddp": Abilities(),
    # the replicas do not communicate; nn.DataParallel cannot replicate a compiled module, or a block with another
    # forward
    "dp": Abilities(frozenset({"syncbn", "compile", "checkpoint_activations"}), _dp),
    "fsdp": SHARDED,
    "hsdp": SHARDED,
    "model": Abilities(STAGES, _stages),
    # images would be mixed within a micro-batch only; schedules have a fixed image size
    "pipeline": Abilities(STAGES | {"mixup", "cutmix", "phases"}, _pipeline),
    "dual_batch": Abilities(
        frozenset(
            {"amp", "accumulate", "ema_decay", "syncbn", "compile", "mixup", "cutmix", "repeats"}
            | {"checkpoint_activations", "checkpoint_every", "replicate", "mirror", "pretrained", "evaluate"}
            | {"val_interval", "profile", "metrics", "print_digest", "last_batch", "static_graph", "loss", "data"}
            | {"augment", "freeze", "log_to"}
        ),
        _dual_batch,
    ),
}
