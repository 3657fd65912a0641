"""TensorBoard's HParams tab: the settings in which the runs of an experiment differ, and the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# facts about the run, and options: the columns of the table, in this order
FACTS = ("parallel", "world", "devices", "global_batch", "amp")
OPTIONS = (
    *("arch", "epochs", "batch_size", "accumulate", "lr", "lr_scaling", "schedule", "warmup", "optimizer", "momentum"),
    *("weight_decay", "label_smoothing", "clip_norm", "syncbn", "metrics", "image_size", "augment", "seed"),
    *("replicas", "micro_batches", "pipeline_schedule", "small", "ratio", "merge"),
)
RESULTS = ("Accuracy/val", "Accuracy5/val", "Loss/val", "Accuracy/train", "Loss/train", "Throughput/images_per_s")


class Session:
    """One run as a session of the tab, written at its start and at its end."""

    def __init__(self, facts: Mapping[str, Any], board: Any) -> None:
        """`facts`: as `Writer.begin` gets them, options below "config". `board`: a SummaryWriter."""
        from torch.utils.tensorboard.summary import hparams  # slow to import, and only rank 0 needs it

        config = facts["config"]
        settings = {name: facts[name] for name in FACTS} | {name: config[name] for name in OPTIONS}
        experiment, start, self._end = hparams(settings, dict.fromkeys(RESULTS, 0.0))  # type: ignore[no-untyped-call]  # torch's
        self._files = board.file_writer
        self._files.add_summary(experiment)
        self._files.add_summary(start)

    def close(self) -> None:
        """Records that the run has succeeded."""
        self._files.add_summary(self._end)
