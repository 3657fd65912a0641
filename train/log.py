"""Output of a run: console lines, progress bar, TensorBoard and metrics.jsonl. Only rank 0 writes; others are `Silent`.

In an elastic job (LAUNCHER_GENERATION_OUTPUT is set), the first worker of each node writes the files.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from train.config import Config
from train.data.source import Pixels
from train.distributed.world import World
from train.hardware import device_name
from train.log_to import LogTo
from train.metrics import NO_SCORES, Scores
from train.stragglers import Slow

CLEAR_LINE = "\x1b[K"  # right of the cursor
GRID = 8  # images per row
BAR_WIDTH = 24  # characters
BAR_INTERVAL = 0.1  # seconds between two redraws
FLUSH_SECONDS = 2  # maximum delay of TensorBoard's files, which the launcher collects during the run
# columns of the HParams tab, in this order: facts about the run, and options
FACTS = ("parallel", "world", "devices", "global_batch", "amp")
OPTIONS = (
    *("arch", "epochs", "batch_size", "accumulate", "lr", "lr_scaling", "schedule", "warmup", "optimizer", "momentum"),
    *("weight_decay", "label_smoothing", "clip_norm", "syncbn", "metrics", "image_size", "augment", "seed"),
    *("replicas", "micro_batches", "pipeline_schedule", "dual_small", "dual_ratio", "dual_merge"),
)
RESULTS = ("Accuracy/val", "Accuracy5/val", "Loss/val", "Accuracy/train", "Loss/train", "Throughput/images_per_s")


@dataclass(frozen=True)
class Interval:
    """Progress since the last line. Rates are over all ranks."""

    epoch: int  # counted from 1
    epochs: int
    step: int  # of the run, counted from 1
    steps: int
    epoch_step: int
    epoch_steps: int
    seconds: float  # its duration
    lr: float
    images_per_s: float
    mfu: float | None  # fraction of the GPUs' peak FLOP/s; None if unknown
    loss_scale: float
    skipped: int  # steps, of the run
    compiled: bool = False  # --compile met a new size of batch, so its rate is not that of training
    # what is known once all ranks have computed it
    interval: Scores = NO_SCORES
    so_far: Scores = NO_SCORES  # of the epoch
    data_wait: float = 0.0  # fraction of the time, 0 to 1, mean over ranks
    slowest: Slow | None = None  # the rank with the most own work
    slow: str = ""  # the persistently slow rank: "rank 5 on gpu-c is slow: its work takes ..."


@dataclass(frozen=True)
class Validated:
    """An epoch with its validation."""

    epoch: int  # counted from 1
    epochs: int
    step: int  # of the run
    train: Scores
    val: Scores
    seconds: float  # of the validation
    memory: float  # peak memory in MB, of the process or GPU that needs most
    skipped: int = 0  # unreadable images since the last validation, of all ranks


class Silent:
    """A rank that writes nothing."""

    def say(self, text: str) -> None:
        """Print a console line."""

    def begin(self, facts: dict[str, Any], purge_step: int | None) -> None:
        """Called when the run starts, or resumes at step `purge_step`."""

    def stepped(self, epoch: int, epochs: int, step: int, steps: int) -> None:
        """Called after step `step` of the run's `steps`."""

    def progress(self, now: Interval) -> None:
        """Called after an interval of steps."""

    def validating(self, epoch: int, batch: int, batches: int, now: Scores, so_far: Scores) -> None:
        """Called after some batches of a validation."""

    def validated(self, now: Validated) -> None:
        """Called after an epoch is trained and validated."""

    def images(self, tag: str, images: Pixels, step: int) -> None:
        """Log images, (n, side, side, 3)."""

    def flush(self) -> None:
        """Flush the files up to this step."""

    def end(self, facts: dict[str, Any]) -> None:
        """Called at the end of the run."""


class Writer(Silent):
    """Prints, and writes to the output folder. metrics.jsonl is only appended to, line by line."""

    def __init__(
        self, output: Path, amp: bool, published_tags: bool = False, prints: bool = True, log_to: str = ""
    ) -> None:
        """prints: False for a worker that only writes files. log_to: see `train.log_to`."""
        self._output, self._amp, self._published_tags, self._prints = output, amp, published_tags, prints
        self._board: Any = None  # stays None if tensorboard is not installed
        self._jsonl: Any = None
        self._bar = Bar()
        self._log_to = LogTo(log_to, self.say) if log_to else None

    def say(self, text: str) -> None:
        if self._prints:
            self._bar.clear()
            print(text, flush=True)

    def stepped(self, epoch: int, epochs: int, step: int, steps: int) -> None:
        if self._prints:
            self._bar.step(epoch, epochs, step, steps)

    def begin(self, facts: dict[str, Any], purge_step: int | None) -> None:
        """Open the files. TensorBoard drops the points of an interrupted run from `purge_step` on."""
        self._output.mkdir(parents=True, exist_ok=True)
        self._jsonl = (self._output / "metrics.jsonl").open("a", encoding="utf-8")
        self._line("start", **facts)
        try:
            from torch.utils.tensorboard import SummaryWriter  # takes a second: only on rank 0, after its first line
        except ImportError:
            self.say("train: tensorboard is not installed: no curves are written; see metrics.jsonl")
            return
        if not isinstance(threading.excepthook, LeftToTheCaller):
            threading.excepthook = LeftToTheCaller(threading.excepthook)
        folder = str(self._output / "tensorboard")
        self._board = SummaryWriter(folder, purge_step=purge_step, flush_secs=FLUSH_SECONDS)
        self._session = Session(facts, self._board)

    def progress(self, now: Interval) -> None:
        """Write a console line in experiment 1's format, a JSON line, and the scalars of this step."""
        cur, avg = now.interval, now.so_far
        self.say(
            f"Epoch: [{now.epoch}][{now.epoch_step}/{now.epoch_steps}] Loss {cur.loss:.4f} ({avg.loss:.4f}) "
            f"Acc@1 {cur.top1:.2f} ({avg.top1:.2f}) Acc@5 {cur.top5:.2f} ({avg.top5:.2f}) "
            f"LR {now.lr:.4g} images/s {now.images_per_s:.1f} data {now.data_wait:.0%}"
            f"{'' if now.mfu is None else f' MFU {now.mfu:.1%}'}"
        )
        self._line(
            "step",
            epoch=now.epoch,
            epochs=now.epochs,
            step=now.step,
            steps=now.steps,
            images_per_s=round(now.images_per_s, 2),
            data_wait=round(now.data_wait, 4),
            **({} if now.mfu is None else {"mfu": round(now.mfu, 4)}),
            loss=cur.loss,
            top1=cur.top1,
            lr=now.lr,
            loss_scale=now.loss_scale,
            skipped=now.skipped,
            **({"compiled": True} if now.compiled else {}),
            **({"slow": now.slow} if now.slow else {}),
        )
        scalars = {
            "Loss/train": cur.loss,
            "Accuracy/train": cur.top1,
            "Accuracy5/train": cur.top5,
            "LR": now.lr,
            "Throughput/images_per_s": now.images_per_s,
            "Throughput/data_wait": now.data_wait,
        }
        if self._amp:
            scalars |= {"AMP/loss_scale": now.loss_scale, "AMP/skipped": float(now.skipped)}
        if now.slowest:
            scalars |= {"Ranks/slowest": float(now.slowest.rank), "Ranks/slowest_over_median": now.slowest.ratio}
        if now.slow and self._board is not None:
            self._board.add_text("Ranks/persistently_slow", now.slow, now.step)
        self._scalars(scalars, now.step)

    def validating(self, epoch: int, batch: int, batches: int, now: Scores, so_far: Scores) -> None:
        """Print a line in experiment 1's format."""
        self.say(
            f"Val: [{epoch}][{batch}/{batches}] Loss {now.loss:.4f} ({so_far.loss:.4f}) "
            f"Acc@1 {now.top1:.2f} ({so_far.top1:.2f}) Acc@5 {now.top5:.2f} ({so_far.top5:.2f})"
        )

    def validated(self, now: Validated) -> None:
        """Write the epoch's line, and scalars at the epoch's last step, so that both curves share an axis."""
        val = now.val
        self.say(
            f"Epoch: [{now.epoch}] val Loss {val.loss:.4f} Acc@1 {val.top1:.2f} Acc@5 {val.top5:.2f} "
            f"({val.images} images, {now.seconds:.1f} s); peak memory {now.memory:,.1f} MB"
            + (f"; {now.skipped} unreadable images skipped" if now.skipped else "")
        )
        facts = {"epoch": now.epoch, "epochs": now.epochs, "step": now.step, "seconds": round(now.seconds, 3)}
        facts["memory_mb"] = round(now.memory, 3)
        facts |= {"skipped_images": now.skipped} if now.skipped else {}
        self._line("epoch", **facts, train=asdict(now.train), val=asdict(val))
        scalars = {"Loss/val": val.loss, "Accuracy/val": val.top1, "Accuracy5/val": val.top5}
        if self._published_tags:  # experiment 1's names
            scalars |= {"Loss/Val": val.loss, "Accuracy/Val": val.top1}
        self._scalars(scalars, now.step)

    def images(self, tag: str, images: Pixels, step: int) -> None:
        """Write the images to TensorBoard as a grid, GRID per row."""
        if self._board is None:
            return
        rows = -(-len(images) // GRID)
        filled = np.zeros((rows * GRID, *images.shape[1:]), np.uint8)
        filled[: len(images)] = images
        side = images.shape[1]
        picture = filled.reshape(rows, GRID, side, side, 3).swapaxes(1, 2).reshape(rows * side, GRID * side, 3)
        self._board.add_image(tag, picture, step, dataformats="HWC")

    def flush(self) -> None:
        """Called before a checkpoint: a resumed run writes only the points after it."""
        if self._board is not None:
            self._board.flush()

    def end(self, facts: dict[str, Any]) -> None:
        if self._jsonl is not None:
            self._line("end", **facts)
            self._jsonl.close()
            if self._log_to:
                self._log_to.close()
        if self._board is not None:
            self._session.close()
            self._board.close()

    def _line(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **values})
        self._jsonl.write(f"{line}\n")
        self._jsonl.flush()
        if self._log_to:
            self._log_to.send(line)

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items() if self._board is not None else ():
            self._board.add_scalar(tag, value, step)


class LeftToTheCaller:
    """A hook for errors of threads. What TensorBoard's raises, a full disk for example, the next call raises again."""

    def __init__(self, otherwise: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._otherwise = otherwise

    def __call__(self, error: threading.ExceptHookArgs, /) -> None:
        if not type(error.thread).__module__.startswith("tensorboard."):
            self._otherwise(error)


def make_log(config: Config, world: World, scaled: bool) -> Silent:
    """Return a writer for rank 0; in an elastic job, for the first worker of each node, in the generation's folder.

    `scaled`: whether the run has a loss scale.
    """
    kept = os.environ.get("LAUNCHER_GENERATION_OUTPUT", "")
    if not (world.first or (kept and world.local_rank == 0)):
        return Silent()
    return Writer(
        Path(kept or config.output), scaled, config.published_tags, world.first, config.log_to if world.first else ""
    )


def common_facts(config: Config, world: World, amp: str) -> dict[str, object]:
    """Return the facts of metrics.jsonl's first line that every kind of run has."""
    return {
        "arch": config.arch,
        "device": device_name(world.device),
        "amp": amp,
        "backend": world.backend,
        "epochs": config.epochs,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "config": config.to_dict(),
    }


def conclude(
    log: Silent, scores: Scores, best: float, seconds: float, facts: dict[str, Any], after: str = "", before: str = ""
) -> None:
    """Write the last line of metrics.jsonl, and print the last line, with `before` and `after` around the scores."""
    known = {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss, "best_top1": best}
    log.end({**known, "seconds": round(seconds, 3), **facts})
    log.say(
        f"train: done in {seconds:.1f} s; {before}val Acc@1 {scores.top1:.2f} (best {best:.2f}) "
        f"Acc@5 {scores.top5:.2f}{after}"
    )


class Bar:
    """Progress bar on a terminal. The cursor stays at the start of the line, so that output overwrites the bar."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._shown = self._stream.isatty()
        self._drawn = 0.0
        self._begun: tuple[float, int] | None = None

    def step(self, epoch: int, epochs: int, step: int, steps: int) -> None:
        """Show that step `step` of `steps` is done, in epoch `epoch` (counted from 1)."""
        if not self._shown:
            return
        now = time.monotonic()
        begun, first = self._begun = self._begun or (now, step)
        if now - self._drawn < BAR_INTERVAL and step < steps:
            return
        self._drawn = now
        done = round(BAR_WIDTH * step / steps)
        left = (now - begun) / (step - first) * (steps - step) if step > first else None
        text = (
            f"epoch {epoch}/{epochs} [{'#' * done:.<{BAR_WIDTH}}] step {step:,}/{steps:,} {step / steps:.0%}"
            f"{f'  ETA {clock(left)}' if left is not None else ''}"
        )
        columns = shutil.get_terminal_size().columns
        self._stream.write(f"{text[: columns - 1]}{CLEAR_LINE}\r")
        self._stream.flush()

    def clear(self) -> None:
        """Clear the bar before a line of text is printed."""
        if self._shown and self._begun:
            self._stream.write(CLEAR_LINE)


def clock(seconds: float) -> str:
    """Format a duration: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Session:
    """One run in TensorBoard's HParams tab, written at its start and at its end."""

    def __init__(self, facts: Mapping[str, Any], board: Any) -> None:
        """`facts`: the argument of `Writer.begin`, with options under "config". `board`: a SummaryWriter."""
        from torch.utils.tensorboard.summary import hparams  # slow to import, and only rank 0 needs it

        config = facts["config"]
        settings = {name: facts[name] for name in FACTS} | {name: config[name] for name in OPTIONS}
        experiment, start, self._end = hparams(settings, dict.fromkeys(RESULTS, 0.0))  # type: ignore[no-untyped-call]  # torch's
        self._files = board.file_writer
        self._files.add_summary(experiment)
        self._files.add_summary(start)

    def close(self) -> None:
        self._files.add_summary(self._end)
