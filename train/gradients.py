"""What the sum of gradients over machines has cost at the end of a run, and the one option to try. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from train.combinations import SCALED_OR_HALF
from train.config import Config

MUCH = 1 / 3  # of a step, above which an option is named
HALF = 0.5  # of a step: half of the bytes would still be more than that


@dataclass(frozen=True)
class Cost:
    """Mean seconds: of the sum of gradients as far as it made a step longer, and of a step."""

    seconds: float
    step: float


def conclusion(cost: Cost, nodes: int, config: Config, amp: str) -> str:
    """Return the line for the end of a run. `amp`: the selected one, never auto."""
    share = min(cost.seconds / cost.step, 1.0)  # the first steps, of which DDP's mean is, may be slower than others
    took = f"{share:.0%} of a step ({share * cost.step:.2g} of {cost.step:.2g} s)"
    text = f"the sum of gradients over {nodes} nodes took {took}"
    if share <= MUCH:
        return text
    tried = option(share, config, amp)
    return f"{text}: try {tried}" + ("; what it changes: docs/slow-links.md" if tried.startswith("--") else "")


def option(share: float, config: Config, amp: str) -> str:
    """Return what to try if the gradients are `share` of a step: the smallest change that may be enough."""
    now, rank = config.gradient_compression, config.powersgd_rank
    if now == "none" and share <= HALF and amp not in ("O2", "O3"):  # whose gradients have 16 bits already
        return "--gradient-compression bf16"
    if rank != 1 and amp not in SCALED_OR_HALF and not config.allow_nan:
        return f"--gradient-compression powersgd:{4 if rank > 4 or not rank else 1}"
    return "a faster link" if config.static_graph else f"--accumulate {2 * config.accumulate}"
