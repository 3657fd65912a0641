"""Weights after short runs, to the bit as recorded: a change of where code stands changes no number.

    python -m tests.train.exact.test_digests      # record, at the commit before such a change

Resuming, other numbers of ranks and elastic runs are compared with runs such as these in their own tests. Bits depend
on torch, its libraries and the processor, so there is one record for each of these.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import digit_tree, run

RECORDED = Path(__file__).with_name("digests.json")
BASE = "--image-size 16 --epochs 2 --batch-size 8 --workers 1 --device cpu --log-every 3 --threads 1 --lr 0.1"
DUAL = "--parallel dual_batch --augment none --schedule multistep --warmup 0 --lr-scaling none"
SMALL, CIFAR = "--arch smallcnn", "--arch cifar_resnet20"
RUNS: dict[str, tuple[int, str]] = {  # number of ranks and options
    "one rank": (1, SMALL),
    "one rank, bf16": (1, f"{SMALL} --amp bf16"),
    "one rank, fp16": (1, f"{SMALL} --amp fp16"),
    "one rank, O2": (1, f"{CIFAR} --amp O2"),
    "augmented": (1, f"{SMALL} --auto-augment rand --color-jitter 0.4 0.4 0.4 0.1 --random-erase 0.5 --repeats 2"),
    "augmented on the device": (1, f"{SMALL} --auto-augment trivial --random-erase 0.5 --augment-on device"),
    "mixed": (1, f"{SMALL} --cutmix 1 --mixup 0.2 --label-smoothing 0.1 --loss bce --clip-norm 0.5"),
    "phases": (1, f"{SMALL} --phases 8@0 16@0.5 --crop-scale 0.3 --flip 0.2"),
    "lars": (1, f"{CIFAR} --optimizer lars --schedule linear --warmup 0.2"),
    "adamw, averaged": (1, f"{CIFAR} --optimizer adamw --lr 0.001 --schedule cosine --ema-decay 0.9 --ema-every 2"),
    "muon": (1, "--arch timm:vit_tiny_patch16_224 --model-kwargs img_size=32 depth=2 --image-size 32 --optimizer muon"),
    "cycle": (1, f"{SMALL} --augment shift --last-batch drop --cycle-momentum --schedule onecycle"),
    "ddp": (2, CIFAR),
    "ddp, accumulated, bf16": (2, f"{CIFAR} --accumulate 2 --batch-size 4 --amp bf16"),
    "ddp, compressed": (2, f"{SMALL} --gradient-compression bf16"),
    "ddp, 3 ranks, own batch norm": (3, f"{CIFAR} --syncbn custom --metrics scatter"),
    "dp": (1, f"{CIFAR} --parallel dp --replicas 2"),
    "fsdp": (2, f"{CIFAR} --parallel fsdp --last-batch drop"),
    "model": (2, f"{SMALL} --parallel model"),
    "pipeline": (2, f"{SMALL} --parallel pipeline --micro-batches 2 --last-batch drop"),
    "dual batch": (2, f"{SMALL} {DUAL} --dual-a 0.001 --dual-b 0.02"),
}


def digests(folder: Path, name: str) -> dict[str, str]:
    """SHA-256 of the weights at the end, and of the losses in metrics.jsonl."""
    world, options = RUNS[name]
    data = digit_tree(folder / "data", 72, 20)
    printed = "dual_batch" not in options
    more = [*(["--print-digest"] if printed else []), *(["--checkpoints", folder] if "fsdp" in options else [])]
    ranks = run(folder / "out", world, "--data", data, *BASE.split(), *options.split(), *more)
    lines = [line for kind in ("step", "epoch") for line in ranks[0].metrics(kind)]
    losses = [[line.get("loss"), line.get("val")] for line in lines]
    weights = ranks[0].digest if printed else _digest(ranks[0].checkpoint()["model"])
    return {"weights": weights, "losses": hashlib.sha256(json.dumps(losses).encode()).hexdigest()}


def _digest(weights: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def machine() -> str:
    """What bits depend on besides the code: libraries, and a processor's instructions and caches."""
    found = re.search(r"^model\s*: (\d+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    kind = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind}, model {found[1]}" if found else kind


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_weights_and_losses_are_as_recorded(name: str, tmp_path: Path) -> None:
    recorded: dict[str, Any] = json.loads(RECORDED.read_text())
    here = recorded.get(machine()) or recorded.get(machine().partition(", model")[0], {})  # older records name no model
    assert name in here, "record them here, at the commit before your change"
    assert digests(tmp_path, name) == here[name]


@pytest.mark.ci
def test_an_ordinary_run_imports_no_experiment(tmp_path: Path) -> None:
    listing = "import sys; from train.__main__ import main; main(); print(*sys.modules, sep='\\n')"
    (rank,) = run(tmp_path, 1, "--data", "synthetic:16", *BASE.split(), *SMALL.split(), program=("-c", listing))
    assert "train.trainer" in rank.lines
    assert not [name for name in rank.lines if name.startswith("train.experiments")]


def record() -> None:
    found = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = digests(Path(folder), name)
            print(name, found[name]["weights"][:12], flush=True)
    recorded = json.loads(RECORDED.read_text()) | {machine(): found}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record()
