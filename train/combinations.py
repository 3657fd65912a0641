"""Options that do not go together, refused in one place, when the device and the number of processes are known."""

from __future__ import annotations

from collections.abc import Iterator

from train.config import Config
from train.errors import TrainError

SCALED_OR_HALF = ("fp16", "O2", "O3")


def check(config: Config, kind: str, amp: str, processes: int, device: str) -> None:
    """`kind` and `amp` are what --parallel and --amp select here, never auto; `device` is cpu or cuda.

    Raises:
        TrainError: the first combination that is not supported.
    """
    for problem in _problems(config, kind, amp, processes, device):
        raise TrainError(problem)


def _problems(config: Config, kind: str, amp: str, processes: int, device: str) -> Iterator[str]:
    yield from _processes(kind, processes)
    unsupported = _unsupported(config, amp)
    if found := [text for name, text in unsupported.items() if name in UNSUPPORTED[kind]]:
        yield f"--parallel {kind} does not support {', '.join(found)}; leave it out, or use ddp"
    if kind == "pipeline":
        yield from _pipeline(config, processes)
    if kind == "dual_batch" and config.schedule != "multistep":
        yield f"--parallel dual_batch needs --schedule multistep, as published, not {config.schedule}"
    if config.gradient_compression != "none" and kind != "ddp":
        yield f"--gradient-compression {config.gradient_compression} needs ddp on several processes, not {kind}"
    if config.syncbn == "library" and device == "cpu":
        yield "--syncbn library: torch's SyncBatchNorm works on GPUs only; use --syncbn custom"
    if config.dtype == "float64" and amp != "none":
        yield f"--dtype float64 with --amp {config.amp}: mixed precision needs float32 weights"
    if config.static_graph and config.accumulate > 1:
        yield f"--static-graph with --accumulate {config.accumulate}: DDP has no static graph without synchronisation"
    if config.cycle_momentum and (config.schedule != "onecycle" or config.optimizer == "adamw"):
        yield f"--cycle-momentum needs onecycle with sgd or lars, not {config.schedule} with {config.optimizer}"
    if config.nesterov and (config.optimizer != "sgd" or config.momentum == 0):
        yield f"--nesterov needs --optimizer sgd with momentum, not {config.optimizer} with {config.momentum}"
    if config.optimizer == "adamw" and max(config.momentum, config.adam_beta2) >= 1:
        yield "--optimizer adamw needs --momentum and --adam-beta2 below 1"


# what a method cannot do; names as in `_unsupported`
UNSUPPORTED: dict[str, frozenset[str]] = {
    "single": frozenset(),
    "ddp": frozenset(),
    "dp": frozenset({"syncbn"}),  # the replicas do not communicate
    # all stages would have to know of an overflow in one, or of the norm of all gradients
    "model": frozenset({"amp", "clip_norm", "ema_decay", "syncbn", "compile", "replicate"}),
    # mixing would be within a micro-batch, and its schedules have a fixed image size
    "pipeline": frozenset(
        {"amp", "clip_norm", "ema_decay", "syncbn", "compile", "mixup", "cutmix", "phases", "replicate"}
    ),
    # an overflow in one rank's part would have to be known to all; averages and LARS's norms are of whole tensors
    "fsdp": frozenset({"amp", "ema_decay", "optimizer", "compile", "static_graph", "replicate"}),
    "dual_batch": frozenset(
        {"amp", "accumulate", "ema_decay", "syncbn", "compile", "mixup", "cutmix", "repeats"}
        | {"checkpoint_every", "replicate", "pretrained", "evaluate"}
    ),
}


def _unsupported(config: Config, amp: str) -> dict[str, str]:
    """The options in use that some method cannot do -> how the user wrote them."""
    used = {
        "amp": amp in SCALED_OR_HALF,
        "accumulate": config.accumulate > 1,
        "clip_norm": config.clip_norm > 0,
        "ema_decay": config.ema_decay > 0,
        "syncbn": config.syncbn != "none",
        "mixup": config.mixup > 0,
        "cutmix": config.cutmix > 0,
        "compile": config.compile,
        "phases": bool(config.phases),
        "checkpoint_every": bool(config.checkpoint_every),
        "replicate": config.replicated,
        "repeats": config.repeats > 1,
        "pretrained": bool(config.pretrained),
        "evaluate": bool(config.evaluate),
        "optimizer": config.optimizer == "lars",
        "static_graph": config.static_graph,
    }
    texts = {name: f"--{name.replace('_', '-')} {getattr(config, name)}" for name, on in used.items() if on}
    if "replicate" in texts and not config.replicate:
        texts["replicate"] = "the job's min_nodes"
    if "amp" in texts and config.amp == "auto":
        texts["amp"] = f"--amp auto, which is {amp} on this GPU (--amp none works)"
    return texts


def _processes(kind: str, processes: int) -> Iterator[str]:
    if kind == "single" and processes > 1:
        yield f"--parallel single runs one process, not {processes}; use ddp, or set processes to 1"
    if kind == "dp" and processes > 1:
        yield f"--parallel dp runs one process with all devices, not {processes}; set processes to 1, or use ddp"
    if kind in ("model", "pipeline") and processes == 1:
        yield f"--parallel {kind} splits the model over processes; start two or more (processes: 2)"
    if kind == "fsdp" and processes == 1:
        yield "--parallel fsdp divides the weights over processes; start two or more (processes: 2)"
    if kind == "dual_batch" and processes == 1:
        yield "--parallel dual_batch: one process serves, the others are workers; start two or more"


def _pipeline(config: Config, stages: int) -> Iterator[str]:
    pieces = config.micro_batches or stages
    if config.batch_size % pieces:
        yield f"--batch-size {config.batch_size}: not a multiple of the {pieces} micro-batches of a step"
    if pieces < stages:
        yield f"--micro-batches {pieces}: must be at least the number of stages ({stages}), to keep them all busy"
    if config.last_batch != "drop":
        yield "--parallel pipeline needs --last-batch drop: its schedules have a fixed batch size"
