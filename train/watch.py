"""The output of a run: console lines, TensorBoard scalars, metrics.jsonl. Only rank 0 writes; others are `Silent`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.bar import Bar
from train.data.source import Pixels
from train.hparams import Session
from train.metrics import Scores

GRID = 8  # images per row
FLUSH_SECONDS = 2  # how far TensorBoard's files may lag behind; the launcher collects them while the run goes on


@dataclass(frozen=True)
class Interval:
    """What happened since the last line. Rates are over all ranks."""

    epoch: int  # counted from 1
    epochs: int
    step: int  # of the run, counted from 1
    steps: int
    epoch_step: int
    epoch_steps: int
    interval: Scores
    so_far: Scores  # of the epoch
    lr: float
    images_per_s: float
    data_wait: float  # fraction of the time, 0 to 1, mean over ranks
    loss_scale: float
    skipped: int  # steps, of the run


class Silent:
    """A rank that writes nothing."""

    def say(self, text: str) -> None:
        """A console line."""

    def begin(self, facts: dict[str, Any], purge_step: int | None) -> None:
        """The run starts, or resumes at step `purge_step`."""

    def stepped(self, epoch: int, epochs: int, step: int, steps: int) -> None:
        """Step `step` of the run's `steps` is done."""

    def progress(self, now: Interval) -> None:
        """An interval of steps is done."""

    def validated(self, epoch: int, epochs: int, step: int, train: Scores, val: Scores, seconds: float) -> None:
        """An epoch has been trained and validated."""

    def images(self, tag: str, images: Pixels, step: int) -> None:
        """Images to show, (n, side, side, 3)."""

    def flush(self) -> None:
        """Everything up to this step is in the files."""

    def end(self, facts: dict[str, Any]) -> None:
        """The run has ended."""


class Writer(Silent):
    """Rank 0: prints, and writes below the output folder. metrics.jsonl is only appended to, line by line."""

    def __init__(self, output: Path, amp: bool) -> None:
        self._output, self._amp = output, amp
        self._board: Any = None
        self._bar = Bar()

    def say(self, text: str) -> None:
        """Prints a line and flushes it."""
        self._bar.clear()
        print(text, flush=True)

    def stepped(self, epoch: int, epochs: int, step: int, steps: int) -> None:
        """Moves the progress bar, if the output is a terminal."""
        self._bar.step(epoch, epochs, step, steps)

    def begin(self, facts: dict[str, Any], purge_step: int | None) -> None:
        """Opens the files. TensorBoard drops what an interrupted run wrote from `purge_step` on."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second: only on rank 0, after its first line

        self._output.mkdir(parents=True, exist_ok=True)
        self._jsonl = (self._output / "metrics.jsonl").open("a", encoding="utf-8")
        folder = str(self._output / "tensorboard")
        self._board = SummaryWriter(folder, purge_step=purge_step, flush_secs=FLUSH_SECONDS)
        self._session = Session(facts, self._board)
        self._line("start", **facts)

    def progress(self, now: Interval) -> None:
        """Writes a console line in experiment 1's format, a JSON line, and the scalars of this step."""
        cur, avg = now.interval, now.so_far
        self.say(
            f"Epoch: [{now.epoch}][{now.epoch_step}/{now.epoch_steps}] Loss {cur.loss:.4f} ({avg.loss:.4f}) "
            f"Acc@1 {cur.top1:.2f} ({avg.top1:.2f}) Acc@5 {cur.top5:.2f} ({avg.top5:.2f}) "
            f"LR {now.lr:.4g} images/s {now.images_per_s:.1f} data {now.data_wait:.0%}"
        )
        self._line(
            "step",
            epoch=now.epoch,
            epochs=now.epochs,
            step=now.step,
            steps=now.steps,
            images_per_s=round(now.images_per_s, 2),
            data_wait=round(now.data_wait, 4),
            loss=cur.loss,
            top1=cur.top1,
            lr=now.lr,
            loss_scale=now.loss_scale,
            skipped=now.skipped,
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
        self._scalars(scalars, now.step)

    def validated(self, epoch: int, epochs: int, step: int, train: Scores, val: Scores, seconds: float) -> None:
        """Writes the epoch's line, and scalars at the epoch's last step, so that both curves share an axis."""
        self.say(
            f"Epoch: [{epoch}] val Loss {val.loss:.4f} Acc@1 {val.top1:.2f} Acc@5 {val.top5:.2f} "
            f"({val.images} images, {seconds:.1f} s)"
        )
        facts = {"train": asdict(train), "val": asdict(val)}
        self._line("epoch", epoch=epoch, epochs=epochs, step=step, seconds=round(seconds, 3), **facts)
        self._scalars({"Loss/val": val.loss, "Accuracy/val": val.top1, "Accuracy5/val": val.top5}, step)

    def images(self, tag: str, images: Pixels, step: int) -> None:
        """Writes the images as one grid to TensorBoard, GRID per row."""
        rows = -(-len(images) // GRID)
        filled = np.zeros((rows * GRID, *images.shape[1:]), np.uint8)
        filled[: len(images)] = images
        side = images.shape[1]
        picture = filled.reshape(rows, GRID, side, side, 3).swapaxes(1, 2).reshape(rows * side, GRID * side, 3)
        self._board.add_image(tag, picture, step, dataformats="HWC")

    def flush(self) -> None:
        """Before a checkpoint: a run that resumes from it writes the points after it, not those before."""
        self._board.flush()

    def end(self, facts: dict[str, Any]) -> None:
        """Closes the files."""
        if self._board is not None:
            self._line("end", **facts)
            self._session.close()
            self._jsonl.close()
            self._board.close()

    def _line(self, kind: str, **values: Any) -> None:
        self._jsonl.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n")
        self._jsonl.flush()

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._board.add_scalar(tag, value, step)
