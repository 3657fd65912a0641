"""What the sum of gradients has cost, at the end of a run on several nodes."""

import re
from pathlib import Path

import pytest

from tests.train.runs import run
from train.config import parse
from train.gradients import Cost, conclusion


def said(share: float, options: str = "", amp: str = "none") -> str:
    return conclusion(Cost(share * 0.5, 0.5), 2, parse(["--data", "unused", *options.split()]), amp)


def test_a_small_cost_is_said_without_advice() -> None:
    assert said(0.3) == "the sum of gradients over 2 nodes took 30% of a step (0.15 of 0.5 s)"


def test_it_is_never_said_to_be_more_than_a_step() -> None:
    """DDP's mean is that of the first steps, which may be slower than the others."""
    assert said(1.4).startswith("the sum of gradients over 2 nodes took 100% of a step (0.5 of 0.5 s): try ")


@pytest.mark.parametrize(
    ("share", "options", "amp", "tried"),
    [
        (0.4, "", "none", "--gradient-compression bf16"),
        (0.4, "", "fp16", "--gradient-compression bf16"),
        (0.6, "", "none", "--gradient-compression powersgd:4"),  # half of it would still be much
        (0.6, "", "bf16", "--gradient-compression powersgd:4"),
        (0.6, "", "fp16", "--accumulate 2"),  # powersgd is refused
        (0.4, "", "O2", "--accumulate 2"),  # 16 bits already
        (0.4, "--gradient-compression bf16", "bf16", "--gradient-compression powersgd:4"),
        (0.4, "--gradient-compression powersgd:4", "none", "--gradient-compression powersgd:1"),
        (0.4, "--gradient-compression powersgd:1 --accumulate 2", "none", "--accumulate 4"),
        (0.9, "--allow-nan --static-graph", "none", "a faster link"),
    ],
)
def test_the_one_option_to_try(share: float, options: str, amp: str, tried: str) -> None:
    change = "; what it changes: docs/slow-links.md" if tried.startswith("--") else ""
    assert said(share, options, amp).endswith(f" s): try {tried}{change}")


@pytest.mark.parametrize("compression", ["none", pytest.param("powersgd:1", marks=pytest.mark.ci)])
def test_a_run_on_two_nodes_ends_with_the_cost(compression: str, tmp_path: Path) -> None:
    options = "--data synthetic:16 --arch smallcnn --image-size 8 --batch-size 4 --epochs 2 --workers 1 --threads 1"
    options += f" --device cpu --gradient-compression {compression}"
    first, _ = run(tmp_path, 2, *options.split(), nodes=2)
    (line,) = [line for line in first.lines if "the sum of gradients" in line]
    found = re.match(r"train: the sum of gradients over 2 nodes took (\d+)% of a step \((\S+) of (\S+) s\)", line)
    assert found, line
    assert 0 <= float(found[2]) <= float(found[3])
    assert first.metrics("end")[0]["gradients"].keys() == {"seconds", "step"}
