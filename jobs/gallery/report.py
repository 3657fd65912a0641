"""What the gallery's programs report: a line per rank at the end, and the lines that `launcher status` reads."""

import hashlib
import json
import os
import time
from pathlib import Path

from torch import nn

OUTPUT = Path(os.environ["LAUNCHER_OUTPUT"])


def at_the_end(model: nn.Module, loss: float, ranks: int) -> None:
    """Print this rank's loss and a digest of its weights: equal on all ranks if they trained one model.

    ranks: how many the framework works with. A framework that missed torchrun's variables trains a model on each node,
    and reports 1.
    """
    digest = hashlib.sha256()
    for weights in model.parameters():
        digest.update(weights.detach().float().cpu().numpy().tobytes())
    print(f"rank {os.environ['RANK']} of {ranks}: loss {loss:.4f}, weights {digest.hexdigest()[:12]}", flush=True)


def step(number: int, steps: int, loss: float, **more: int) -> None:
    """Called by rank 0: progress, for `launcher status` and `launcher up`. more: epoch, epochs."""
    line = {"kind": "step", "time": time.time(), "step": number, "steps": steps, "loss": loss, **more}
    with (OUTPUT / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(line) + "\n")
