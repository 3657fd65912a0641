"""Unsupported combinations of options are refused by name, before anything is read."""

import re
import runpy
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from tests.train.runs import OLD, REFUSED_BY_OLD, ROOT
from train.combinations import check, check_early
from train.config import Config, declared, parse
from train.errors import TrainError

FAMILY = {"O0": "none", "O1": "fp16"}


def problem(
    options: str, processes: int = 2, amp: str | None = None, device: str = "cpu", local_sizes: Sequence[int] = ()
) -> str:
    """The message for these options; `amp` is what --amp auto selects on this device."""
    config = parse(["--data", "unused", *options.split()])
    kind = config.parallel if config.parallel != "auto" else "ddp" if processes > 1 else "single"
    if OLD and kind in REFUSED_BY_OLD:
        pytest.skip("torch before 2.6")
    amp = amp or FAMILY.get(config.amp, config.amp).replace("auto", "none")
    try:
        check(config, kind, amp, local_sizes or [processes] * processes, device)
    except TrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("processes", "options", "why"),
    [
        (1, "--parallel model", "start two or more"),
        (1, "--parallel pipeline", "start two or more"),
        (1, "--parallel dual_batch", "start two or more"),
        (2, "--parallel single", "one process, not 2"),
        (2, "--parallel dp", "one process with all devices"),
        (1, "--parallel dp --syncbn custom", "does not support --syncbn custom"),
        (1, "--parallel dp --compile", "does not support --compile"),
        (2, "--parallel model --ema-decay 0.9 --clip-norm 1", "does not support --clip-norm 1.0, --ema-decay 0.9"),
        (2, "--parallel model --amp O2", "does not support --amp O2"),
        (2, "--parallel pipeline --batch-size 8 --micro-batches 3", "not a multiple of the 3"),
        (3, "--parallel pipeline --batch-size 8 --micro-batches 2", "at least the number of stages (3)"),
        (2, "--parallel pipeline", "--last-batch drop"),
        (2, "--parallel pipeline --last-batch drop --memory-format channels_last", "--memory-format channels_last"),
        (2, "--parallel pipeline --mixup 0.2 --phases 8@0", "does not support --mixup 0.2, --phases"),
        (1, "--parallel fsdp", "start two or more"),
        (2, "--parallel fsdp --compile --compile-mode reduce-overhead", "a CUDA graph reads weights at the same addr"),
        (2, "--parallel fsdp --compile --checkpoint-activations", "torch.compile cannot trace the second pass"),
        (2, "--parallel fsdp --optimizer lars --static-graph", "does not support --optimizer lars, --static-graph"),
        (2, "--parallel fsdp --amp O2", "does not support --amp O2"),
        (2, "--parallel hsdp --amp O3", "--parallel hsdp does not support --amp O3"),
        (2, "--parallel model --amp O3", "does not support --amp O3; remove"),
        (2, "--parallel dual_batch --schedule multistep --repeats 2", "does not support --repeats 2"),
        (2, "--parallel dual_batch --schedule multistep --pretrained a.pt", "does not support --pretrained a.pt"),
        (2, "--parallel dual_batch", "--schedule multistep"),
        (2, "--parallel dual_batch --schedule multistep --warmup 0.1", "has no warm-up, but --warmup is 0.1"),
        (2, "--parallel dual_batch --val-interval 2 --profile", "does not support --val-interval 2, --profile True"),
        (2, "--parallel dual_batch --metrics scatter --print-digest", "support --metrics scatter, --print-digest True"),
        (2, "--parallel dual_batch --last-batch drop --static-graph", "--static-graph True, --last-batch drop"),
        (2, "--parallel dual_batch --accumulate 2", "does not support --accumulate 2"),
        (2, "--static-graph --accumulate 2", "--static-graph with --accumulate 2"),
        (1, "--loss torch.nn.functional:cross_entropy --label-smoothing 0.1", "smooth the labels in your function"),
        (1, "--schedule operator:truediv --warmup 0.1", "your function has the factors of all steps"),
        (2, "--parallel dual_batch --loss torch.nn.functional:cross_entropy", "does not support --loss torch.nn.func"),
        (1, "--checkpoint-activations --compile", "torch.compile cannot trace the second pass"),
        (1, "--checkpoint-activations --amp O3", "with --amp O3 works on GPUs only"),
        (1, "--checkpoint-activations --parallel dp", "does not support --checkpoint-activations True"),
        (2, "--checkpoint-activations --parallel model", "does not support --checkpoint-activations True"),
        (2, "--checkpoint-activations --parallel dual_batch --schedule multistep", "--checkpoint-activations True"),
        (1, "--compile-mode reduce-overhead", "--compile-mode reduce-overhead needs --compile"),
        (1, "--compile --compile-mode max-autotune --accumulate 2", "a CUDA graph overwrites the gradients"),
        (1, "--gradient-compression bf16", "needs ddp on several processes, not single"),
        (1, "--gradient-compression powersgd:2", "needs ddp on several processes, not single"),
        (2, "--gradient-compression powersgd:2 --parallel fsdp", "needs ddp on several processes, not fsdp"),
        (2, "--gradient-compression powersgd:2 --parallel model", "needs ddp on several processes, not model"),
        (2, "--gradient-compression powersgd:2 --amp fp16", "--amp fp16: its errors would have the loss scale"),
        (2, "--gradient-compression powersgd:2 --amp O2", "--amp O2: its errors would have the loss scale"),
        (2, "--gradient-compression powersgd:2 --allow-nan", "an inf or nan would stay in its errors"),
        (1, "--cycle-momentum --schedule cosine", "needs onecycle with sgd or lars, not cosine with sgd"),
        (1, "--cycle-momentum --optimizer adamw", "not onecycle with adamw"),
        (2, "--syncbn library", "works on GPUs only"),
        (1, "--dtype float64 --amp bf16", "mixed precision needs float32"),
        (1, "--nesterov --momentum 0", "--nesterov needs"),
        (1, "--nesterov --optimizer lars", "--nesterov needs"),
        (1, "--optimizer adamw --momentum 1", "less than 1"),
    ],
)
def test_refused(processes: int, options: str, why: str) -> None:
    assert why in problem(options, processes)


def test_cuda_graphs_are_refused_where_fewer_nodes_would_take_more_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAUNCHER_MIN_NODES", "1")
    assert "with the job's min_nodes" in problem("--compile --compile-mode reduce-overhead")
    assert not problem("--compile --compile-mode max-autotune-no-cudagraphs")


@pytest.mark.parametrize(
    ("local_sizes", "found"),
    [([4] * 4, "4"), ([1] * 4, "1, 1, 1, 1"), ([2, 2, 1], "2, 1"), ([1, 2, 2], "1, 2"), ([2] * 4, "")],
)
def test_hsdp_needs_nodes_with_the_same_number_of_processes(local_sizes: list[int], found: str) -> None:
    message = problem("--parallel hsdp", local_sizes=local_sizes)
    assert message.endswith(f"here they have {found}; use fsdp") if found else not message


@pytest.mark.parametrize(
    ("options", "known", "why"),
    [
        ("--compile --compile-mode reduce-overhead --parallel fsdp", "", "a CUDA graph reads weights"),
        ("--parallel fsdp --amp O2", "", "--parallel fsdp does not support --amp O2"),
        ("--parallel fsdp", "WORLD_SIZE=1", "--parallel fsdp shards the weights over processes; start two or more"),
        ("--parallel fsdp", "WORLD_SIZE=2", ""),
        ("--parallel fsdp", "", ""),
        ("--parallel hsdp", "GROUP_WORLD_SIZE=1", "--parallel hsdp needs two or more nodes, and here is one; use fsdp"),
        ("--parallel hsdp", "GROUP_WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 WORLD_SIZE=2", "here they have 1, 1; use fsdp"),
        ("--parallel hsdp", "GROUP_WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 WORLD_SIZE=4", ""),
        ("--parallel hsdp", "GROUP_WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 WORLD_SIZE=3", ""),  # once both nodes are there
        ("--parallel hsdp", "GROUP_WORLD_SIZE=2", ""),
        (
            "--parallel pipeline --last-batch drop --batch-size 9",
            "WORLD_SIZE=2",
            "not a multiple of the 2 micro-batches",
        ),
        ("--parallel pipeline --last-batch drop --batch-size 9", "", ""),
        ("--gradient-compression bf16", "WORLD_SIZE=1", "needs ddp on several processes, not single"),
        ("--gradient-compression bf16", "", ""),
        ("--syncbn library", "", ""),
        ("--syncbn library --device cpu", "", "works on GPUs only"),
        ("--parallel model", "", ""),  # --amp auto may be bf16
        ("--parallel model --amp O1", "", "does not support --amp O1"),
        ("--dtype float64", "", ""),
        ("--dtype float64 --amp bf16", "", "mixed precision needs float32"),
        ("--parallel fsdp --optimizer no.such.module:adamw", "", ""),  # its code is not here
    ],
)
def test_what_is_known_before_anything_is_touched_is_refused_then(options: str, known: str, why: str) -> None:
    """As `launcher plan` does, which knows a job's nodes, and their processes unless GPUs decide."""
    config, _ = declared(["--data", "unused", *options.split()])
    given = dict(each.split("=") for each in known.split())
    with pytest.raises(TrainError, match=re.escape(why)) if why else nullcontext():
        check_early(config, given, code=False)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_a_torch_without_fully_shard_is_refused_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.4, which has no public DTensor either, and 2.5."""
    for name in ("fsdp.fully_shard", "tensor.DTensor"):
        monkeypatch.delattr(f"torch.distributed.{name}", raising=False)
    lacking = runpy.run_path(str(ROOT / "train/distributed/fsdp.py"))["lacking"]
    found = next(lacking(Config(data="", parallel=kind)))
    assert re.match(rf"--parallel {kind} needs torch.distributed.fsdp.fully_shard, which torch \S+ lacks; use", found)
    runpy.run_path(str(ROOT / "train/distributed/shards.py"))


def test_a_torch_whose_stages_do_not_find_out_shapes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stage:
        """As of 2.4 and 2.5."""

        def __init__(self, submodule: object, index: int, stages: int, device: object, input_args: object) -> None: ...

    monkeypatch.setattr("torch.distributed.pipelining.PipelineStage", Stage)
    lacking = runpy.run_path(str(ROOT / "train/experiments/pipeline.py"))["lacking"]
    found = next(lacking(Config(data="", parallel="pipeline")))
    assert re.match(r"--parallel pipeline needs stages that .*, which torch \S+ lacks; use", found)


@pytest.mark.parametrize("kind", ["model", "pipeline --last-batch drop", "dual_batch --schedule multistep"])
def test_the_selection_of_amp_auto_is_checked(kind: str) -> None:
    """On a GPU without bf16, auto is fp16 with a loss scale, which stages and a parameter server do not have."""
    assert "--amp auto, which is fp16 on this GPU" in problem(f"--parallel {kind}", amp="fp16", device="cuda")
    assert problem(f"--parallel {kind}", amp="bf16", device="cuda") == ""
    assert problem(f"--parallel {kind}") == ""


@pytest.mark.parametrize(
    "options",
    [
        "--static-graph",
        "--accumulate 2 --syncbn custom",
        "--nesterov",
        "--checkpoint-activations --static-graph",
        "--checkpoint-activations --parallel fsdp",
        "--amp O2",
        "--compile --compile-mode reduce-overhead",
        "--compile --compile-mode max-autotune-no-cudagraphs --accumulate 2",
        "--parallel fsdp --amp fp16 --ema-decay 0.9",
        "--parallel fsdp --compile --compile-mode max-autotune-no-cudagraphs --accumulate 2 --amp fp16",
        "--parallel fsdp --amp bf16 --clip-norm 1 --accumulate 2 --syncbn custom --mixup 0.2 --optimizer adamw",
    ],
)
def test_supported(options: str) -> None:
    assert problem(options) == ""


def test_powersgd_names_the_precision_that_auto_has_chosen() -> None:
    found = problem("--gradient-compression powersgd:2", amp="fp16", device="cuda")
    assert "powersgd:2 with --amp auto, which is fp16 on this GPU" in found
    assert problem("--gradient-compression powersgd:2", amp="bf16", device="cuda") == ""


@pytest.mark.parametrize("text", ["powersgd", "powersgd:0", "powersgd:x", "powersgd:-1", "fp16"])
def test_another_compression_is_refused(text: str) -> None:
    with pytest.raises(TrainError, match=f"--gradient-compression {text}: must be none, bf16 or powersgd:RANK"):
        parse(["--data", "unused", "--gradient-compression", text])
