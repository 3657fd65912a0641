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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from train.config import Config, parse
from train.data.cifar import find_cifar
from train.data.open import is_synthetic, open_dataset
from train.distributed.powersgd import PowerSGD, check_model, sent
from train.errors import TrainError
from train.foreign import about_model
from train.models import configured_model
from train.precision import choose_precision

MARK = "launcher-measured "
CLASSES = 1000  # where those of the data are not known
SMALL = 1 << 30  # bytes of a file that is opened for its classes
CIFAR = {"cifar10": 10, "cifar100": 100}
SMALLEST = 2  # images: batch norm needs more than one
ENOUGH = 5  # steps of the whole batch
RANKS = 1, 2, 4  # of powersgd
COMPRESSIONS = 40  # steps of the smallest batch that take longer than `Steps.compression`
TIMED = 3  # backward passes whose gradients are compressed, after one that is not timed

Reduced = torch.futures.Future[torch.Tensor]
Way = Callable[[Any], Reduced]  # of a torch.distributed.GradBucket


def report(kind: str, value: float, unit: str, of: str = "") -> None:
    print(f"{MARK}{json.dumps({'kind': kind, 'value': value, 'unit': unit, 'of': of})}", flush=True)


def in_bf16(bucket: Any) -> Reduced:
    """Reduce the bucket as --gradient-compression bf16 does."""
    return bf16_compress_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group


def classes_of(data: str) -> int | None:
    """Return how many classes the data has; None if that is not known here, or would take long."""
    path = Path(data).expanduser()
    try:
        if is_synthetic(data):
            return CLASSES
        if path.is_file():
            return len(open_dataset(data).classes) if path.stat().st_size < SMALL else None
        if (path / "train").is_dir():
            with os.scandir(path / "train") as found:
                return sum(each.is_dir() for each in found) or None
        return CIFAR.get((find_cifar(path) or "").partition(" ")[0])
    except (TrainError, OSError):
        return None


class Hook:
    """Reduces a bucket of gradients in a way that can be changed, and measures how long it takes."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self.way: Way = in_bf16
        self.seconds, self._settle = 0.0, settle

    def __call__(self, bucket: Any) -> Reduced:
        self._settle()
        began = time.perf_counter()
        future = self.way(bucket)
        future.wait()
        self._settle()
        self.seconds += time.perf_counter() - began
        return future


class Steps:
    """Steps of the model on random images."""

    def __init__(self, config: Config, device: torch.device, classes: int) -> None:
        model = configured_model(config, classes)
        self._config, self._device = config.settled(about_model(model)), device
        self._precision = choose_precision(config, device)
        self._model = self._precision.cast(model, device).train()
        self.trained = [each for each in self._model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.SGD(self.trained, lr=1e-6, momentum=0.9)

    def __call__(self, size: int) -> float:
        """Return the seconds of forward pass, backward pass and update with so many images."""
        images, labels = self._batch(size)
        self._settle()
        began = time.perf_counter()
        self._backward(self._model, images, labels)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._settle()
        return time.perf_counter() - began

    def compression(self, until: float) -> None:
        """Report how many bytes each way to compress the gradients sends, and how long it computes for a step.

        As the trainer's hooks in DistributedDataParallel, in a group of this process alone.
        """
        nccl = self._device.type == "cuda" and "LAUNCHER_MIG" not in os.environ
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stub
        dist.init_process_group("nccl" if nccl else "gloo", store=store, rank=0, world_size=1)
        wrapped = DistributedDataParallel(
            self._model, bucket_cap_mb=self._config.bucket_mb, gradient_as_bucket_view=True
        )
        images, labels = self._batch(min(SMALLEST, self._config.batch_size))
        hook = Hook(self._settle)
        wrapped.register_comm_hook(None, lambda _, bucket: hook(bucket))
        sizes: dict[str, int] = {"bf16": 2 * sum(each.numel() for each in self.trained)}
        ways: dict[str, Way] = {"bf16": hook.way}
        powers: dict[str, PowerSGD] = {}
        if self._compressible():
            kind, shapes = self.trained[0].dtype, [each.shape for each in self.trained]
            powers = {f"powersgd:{rank}": PowerSGD(rank, 0, kind) for rank in RANKS}
            sizes |= {name: kind.itemsize * sent(shapes, power.rank) for name, power in powers.items()}
            ways |= {name: power.reduce for name, power in powers.items()}
        for _ in range(2):  # DDP rebuilds its buckets after the first
            self._backward(wrapped, images, labels)
        for name, way in ways.items():
            hook.way, times = way, list[float]()
            if name in powers:
                powers[name].begin()
            while len(times) < 1 + TIMED and time.monotonic() < until:
                hook.seconds = 0.0
                self._backward(wrapped, images, labels)
                times.append(hook.seconds)
            if len(times) == 1 + TIMED:
                report("sent", sizes[name], "B", name)
                report("compression", statistics.median(times[1:]), "s", name)
        self._optimizer.zero_grad()

    def _compressible(self) -> bool:
        """Whether the trainer would accept powersgd for this model."""
        try:
            check_model("powersgd", self._model)
        except TrainError:
            return False
        return self.trained[0].element_size() > 2

    def _batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        side, layout = self._config.image_size, self._precision.layout
        images = torch.randn(size, 3, side, side, device=self._device, dtype=self._precision.weights)
        return images.contiguous(memory_format=layout), torch.zeros(size, dtype=torch.long, device=self._device)

    def _backward(self, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
        with self._precision.context(self._device):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def grow(
    step: Callable[[int], float], most: int, until: float, now: Callable[[], float] = time.monotonic
) -> tuple[int, float, bool]:
    """Return the largest batch whose step can be timed, its seconds, and whether there is time for `compression`.

    A larger batch allocates, and is timed the second time. `compression` takes as long whatever the batch is, so its
    time is kept free, if that is at most half of what there is.
    """
    size, room = min(SMALLEST, most), most
    step(size)  # allocates
    took = step(size)
    kept = COMPRESSIONS * took
    compressed = kept < (until - now()) / 2
    while size < room and 4 * took < until - now() - kept * compressed:
        larger = min(2 * size, room)
        try:
            step(larger)
            took, size = step(larger), larger
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            room = size
    return size, took, compressed


def main() -> None:
    config, until = parse(sys.argv[1:]), float(os.environ["BENCH_UNTIL"])
    if config.parallel not in ("auto", "ddp"):
        sys.exit(f"the forecast is for --parallel ddp, not {config.parallel}")
    classes = classes_of(config.data)
    if classes is None and os.environ.get("LAUNCHER_NODE_RANK", "0") == "0":
        what = (
            f"the trainer's model was measured with {CLASSES} classes, as those of --data {config.data} are not known"
        )
        print(f"{MARK}{json.dumps({'kind': 'note', 'what': what})}", flush=True)
    step = Steps(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"), classes or CLASSES)
    report("gradients", sum(each.numel() * each.element_size() for each in step.trained), "B")
    report("passes", config.accumulate, "")
    size, took, compressed = grow(step, config.batch_size, until)
    if compressed:
        step.compression(until)
    times = [took]
    while len(times) < ENOUGH and time.monotonic() + took < until:
        times.append(step(size))
    whole = statistics.median(times) * config.batch_size / size * config.accumulate
    report("step", whole, "s", f"batch of {size} of {config.batch_size}")
    os._exit(0)  # torch's own end takes seconds on a busy machine


if __name__ == "__main__":
    main()
