"""Unsupported combinations of options: without torch as far as they are known, then with device and processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from train.config import ADAM, CUDA_GRAPHS, Config
from train.distributed.abilities import ABILITIES, Abilities
from train.errors import TrainError
from train.own import is_own, own

SCALED_OR_HALF = ("fp16", "O2", "O3")


def check_early(config: Config, given: Mapping[str, str], code: bool = True) -> None:
    """Check what is known before the processes join or, for `launcher plan`, before a machine is touched.

    `given`: torchrun's variables, as far as they are known; `code`: whether the user's functions are here.

    Raises:
        TrainError: the first combination that is not supported.
    """
    processes, local, nodes = (int(given.get(f"{of}WORLD_SIZE", 0)) for of in ("", "LOCAL_", "GROUP_"))
    if config.parallel == "hsdp" and nodes == 1:
        raise TrainError("--parallel hsdp needs two or more nodes, and here is one; use fsdp")
    kind, amp, device = ("" if each == "auto" else each for each in (config.parallel, config.amp, config.device))
    if not kind and processes:
        kind = "ddp" if processes > 1 else "single"
    if not amp and (device == "cpu" or config.dtype == "float64"):
        amp = "none"
    problems = chain(
        _problems(config, kind, {"O0": "none", "O1": "fp16"}.get(amp, amp), processes, device),
        _problems_of_nodes(kind, [local] * processes if processes == local * nodes else []),
        _problems_of_code(config) if code else (),
    )
    for problem in problems:
        raise TrainError(problem)


def check(config: Config, kind: str, amp: str, local_sizes: Sequence[int], device: str) -> None:
    """Check the options. `kind` and `amp`: the selected --parallel and --amp, never auto; `device`: cpu or cuda.

    `local_sizes`: for each process, the number of processes on its node.

    Raises:
        TrainError: the first combination that is not supported.
    """
    problems = chain(
        _problems(config, kind, amp, len(local_sizes), device),
        _problems_of_nodes(kind, local_sizes),
        _problems_of_code(config),
    )
    for problem in problems:
        raise TrainError(problem)


def _problems(config: Config, kind: str, amp: str, processes: int, device: str) -> Iterator[str]:
    """Yield the reasons to reject these options; "" and 0: not known yet."""
    can = ABILITIES.get(kind, Abilities())
    if found := [text for name, text in used(config, amp).items() if name in can.cannot]:
        yield f"--parallel {kind} does not support {', '.join(found)}; remove the option, or use ddp"
    yield from can.problems(config, processes)
    if config.gradient_compression != "none" and kind not in ("ddp", ""):
        yield f"--gradient-compression {config.gradient_compression} needs ddp on several processes, not {kind}"
    if config.powersgd_rank:
        yield from _problems_of_powersgd(config, amp)
    if config.warmup >= 0 and is_own(config.schedule):
        yield f"--warmup {config.warmup} with --schedule {config.schedule}: your function has the factors of all steps"
    if config.label_smoothing and is_own(config.loss):
        yield f"--label-smoothing with --loss {config.loss}: smooth the labels in your function"
    if config.syncbn == "library" and device == "cpu":
        yield "--syncbn library: torch's SyncBatchNorm works on GPUs only; use --syncbn custom"
    if config.dtype == "float64" and amp not in ("none", ""):
        yield f"--dtype float64 with --amp {config.amp}: mixed precision needs float32 weights"
    yield from _problems_of_speed(config, amp, device)
    if config.static_graph and config.accumulate > 1:
        yield f"--static-graph with --accumulate {config.accumulate}: DDP does not support the combination"
    if config.optimizer == "muon" and kind in ("model", "pipeline"):
        yield f"--parallel {kind} does not support --optimizer muon; use ddp, or --optimizer adamw"
    if config.cycle_momentum and (config.schedule != "onecycle" or config.optimizer not in ("sgd", "lars")):
        yield f"--cycle-momentum needs onecycle with sgd or lars, not {config.schedule} with {config.optimizer}"
    if config.nesterov and (config.optimizer != "sgd" or config.momentum == 0):
        yield f"--nesterov needs --optimizer sgd with momentum, not {config.optimizer} with {config.momentum}"
    if config.optimizer in ADAM and max(config.momentum, config.adam_beta2) >= 1:
        yield f"--optimizer {config.optimizer} needs --momentum and --adam-beta2 less than 1"
    if config.optimizer == "muon" and config.muon_momentum >= 1:
        yield f"--muon-momentum {config.muon_momentum}: must be less than 1"


def _problems_of_nodes(kind: str, local_sizes: Sequence[int]) -> Iterator[str]:
    if kind == "hsdp" and local_sizes and (len(set(local_sizes)) > 1 or not 1 < local_sizes[0] < len(local_sizes)):
        yield (
            f"--parallel hsdp needs two or more nodes, each with the same number of processes, two or more; here they "
            f"have {', '.join(map(str, _nodes(local_sizes)))}; use fsdp"
        )


def _problems_of_code(config: Config) -> Iterator[str]:
    if is_own(config.optimizer) and config.shards_weights and not is_elementwise(config.optimizer):
        function = config.optimizer.partition(":")[2]
        yield (
            f"--parallel {config.parallel} with --optimizer {config.optimizer}: each rank updates a shard of every "
            f"weight, which is right only if a value's update depends on that value alone; if so, write "
            f"{function}.elementwise = True below your function"
        )


def is_elementwise(text: str) -> bool:
    """Whether the user says so of the optimiser of --optimizer MODULE:FUNCTION."""
    return bool(getattr(own("optimizer", text), "elementwise", False))


def _problems_of_powersgd(config: Config, amp: str) -> Iterator[str]:
    """What one step's gradients lack is added to the next one's: it must have their scale, and end."""
    asked = f"--gradient-compression {config.gradient_compression}"
    if amp in SCALED_OR_HALF:
        found = f"--amp auto, which is {amp} on this GPU" if config.amp == "auto" else f"--amp {amp}"
        yield f"{asked} with {found}: its errors would have the loss scale of the step before; use --amp bf16 or none"
    if config.allow_nan:
        yield f"{asked} with --allow-nan: an inf or nan would stay in its errors; remove --allow-nan"


def _problems_of_speed(config: Config, amp: str, device: str) -> Iterator[str]:
    if config.checkpoint_activations and config.compile:
        yield "--checkpoint-activations with --compile: torch.compile cannot trace the second pass; remove one of them"
    if config.checkpoint_activations and amp in ("O2", "O3") and device == "cpu":
        yield f"--checkpoint-activations with --amp {amp} works on GPUs only; use --amp bf16"
    if config.compile_mode != "default" and not config.compile:
        yield f"--compile-mode {config.compile_mode} needs --compile"
    several = f"--accumulate {config.accumulate}" if config.accumulate > 1 else ""
    if not several and "LAUNCHER_MIN_NODES" in os.environ:  # fewer nodes take more micro-batches each
        several = "the job's min_nodes"
    if config.compile_mode in CUDA_GRAPHS and several:
        yield (
            f"--compile-mode {config.compile_mode} with {several}: a CUDA graph overwrites the gradients of the "
            f"micro-batch before; use --compile-mode default or max-autotune-no-cudagraphs"
        )


def _nodes(local_sizes: Sequence[int]) -> list[int]:
    """Return the number of processes of each node; ranks of a node are adjacent."""
    found, rank = [], 0
    while rank < len(local_sizes):
        found.append(local_sizes[rank])
        rank += local_sizes[rank]
    return found


def used(config: Config, amp: str) -> dict[str, str]:
    """Return the options in use that some methods do not support, with their text on the command line."""
    found = {
        "amp": amp in SCALED_OR_HALF,
        "accumulate": config.accumulate > 1,
        "clip_norm": config.clip_norm > 0,
        "ema_decay": config.ema_decay > 0,
        "syncbn": config.syncbn != "none",
        "mixup": config.mixup > 0,
        "cutmix": config.cutmix > 0,
        "compile": config.compile,
        "checkpoint_activations": config.checkpoint_activations,
        "phases": bool(config.phases),
        "checkpoint_every": bool(config.checkpoint_every),
        "replicate": config.replicated,
        "mirror": bool(config.mirror),
        "repeats": config.repeats > 1,
        "pretrained": bool(config.pretrained),
        "evaluate": bool(config.evaluate),
        "freeze": bool(config.freeze),
        "optimizer": config.optimizer in ("lars", "muon"),
        "layer_decay": config.layer_decay < 1,
        "no_decay": bool(config.no_decay),
        "static_graph": config.static_graph,
        "val_interval": config.val_interval > 1,
        "profile": config.profile,
        "metrics": config.metrics != "exact",
        "print_digest": config.print_digest,
        "last_batch": config.last_batch != "keep",
        "loss": is_own(config.loss),
        "data": is_own(config.data),
        "log_to": bool(config.log_to),
        "augment": is_own(config.augment),
    }
    texts = {name: f"--{name.replace('_', '-')} {getattr(config, name)}" for name, on in found.items() if on}
    if "replicate" in texts and not config.replicate:
        texts["replicate"] = "the job's min_nodes"
    if "amp" in texts and config.amp == "auto":
        texts["amp"] = f"--amp auto, which is {amp} on this GPU (--amp none works)"
    if "amp" in texts and amp != "fp16":
        texts["half_weights"] = texts["amp"]
    return texts
