"""python3 bench_model.py ARGUMENT...: the bytes of the gradients of the trainer's model, and the time of a step.

A program of its own, started by bench_node.py beside the package `train`, whose options ARGUMENT... are; it runs on one
GPU or the processor until $BENCH_UNTIL, of time.monotonic(). Images are random: neither data nor a loader is measured.
Its Python is one that the trainer supports.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import torch

from train.config import Config, parse
from train.foreign import about_model
from train.models import configured_model
from train.precision import choose_precision

MARK = "launcher-measured "
CLASSES = 1000
SMALLEST = 2  # images: batch norm needs more than one
ENOUGH = 5  # steps of the whole batch


def report(kind: str, value: float, unit: str, of: str = "") -> None:
    print(f"{MARK}{json.dumps({'kind': kind, 'value': value, 'unit': unit, 'of': of})}", flush=True)


class Steps:
    """Steps of the model on random images."""

    def __init__(self, config: Config, device: torch.device) -> None:
        model = configured_model(config, CLASSES)
        self._config, self._device = config.settled(about_model(model)), device
        self._precision = choose_precision(config, device)
        self._model = self._precision.cast(model, device).train()
        self.trained = [each for each in self._model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.SGD(self.trained, lr=1e-6, momentum=0.9)

    def __call__(self, size: int) -> float:
        """Return the seconds of forward pass, backward pass and update with so many images."""
        side, layout = self._config.image_size, self._precision.layout
        images = torch.randn(size, 3, side, side, device=self._device, dtype=self._precision.weights)
        images, labels = (
            images.contiguous(memory_format=layout),
            torch.zeros(size, dtype=torch.long, device=self._device),
        )
        self._settle()
        began = time.perf_counter()
        with self._precision.context(self._device):
            loss = torch.nn.functional.cross_entropy(self._model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._settle()
        return time.perf_counter() - began

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    config, until = parse(sys.argv[1:]), float(os.environ["BENCH_UNTIL"])
    if config.parallel not in ("auto", "ddp"):
        sys.exit(f"the forecast is for --parallel ddp, not {config.parallel}")
    step = Steps(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    report("gradients", sum(each.numel() * each.element_size() for each in step.trained), "B")
    report("passes", config.accumulate, "")
    size = min(SMALLEST, config.batch_size)
    step(size)  # allocates
    took, room = step(size), config.batch_size
    while size < room and time.monotonic() + 4 * took < until:  # a larger batch allocates, and is timed the second time
        larger = min(2 * size, room)
        try:
            step(larger)
            took, size = step(larger), larger
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            room = size
    times = [took]
    while len(times) < ENOUGH and time.monotonic() + took < until:
        times.append(step(size))
    whole = statistics.median(times) * config.batch_size / size * config.accumulate
    report("step", whole, "s", f"batch of {size} of {config.batch_size}")
    os._exit(0)  # torch's own end takes seconds on a busy machine


if __name__ == "__main__":
    main()
