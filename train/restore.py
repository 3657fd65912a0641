"""Resume a run from a checkpoint: check that it matches, and restore its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from train import checkpoint
from train.config import Config
from train.data.source import Dataset
from train.errors import TrainError
from train.run import Progress, Run


def check_same_model(
    resumed: checkpoint.Loaded, config: Config, dataset: Dataset, model: nn.Module, position: str = "progress"
) -> None:
    """Check that the checkpoint is of the same model and load its weights, unless they are sharded.

    `position`: the key of the run's position, which differs in a dual-batch run.

    Raises:
        TrainError: the checkpoint is of another model, or of another kind of run.
    """
    state, dual = resumed.state, position == "dual_batch"
    if position not in state:
        which, method = ("not from", "another --parallel") if dual else ("from", "--parallel dual_batch")
        raise TrainError(f"{resumed.path} is {which} a dual-batch run; use another --output, or {method}")
    for what, here in (("arch", config.arch), ("classes", list(dataset.classes))):
        if state[what] != here:
            raise TrainError(
                f"{resumed.path} has {what} {short(state[what])}, this run {short(here)}; "
                f"use another --output, or the same model and data"
            )
    if not dual and "optimizer" not in state:
        raise TrainError(f"{resumed.path} contains weights only; to start from them, use --pretrained")
    try:
        if "model" in state:  # a sharded checkpoint is read later, when the model is sharded
            model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise TrainError(f"{resumed.path} does not match the model: {str(error).splitlines()[-1].strip()}") from error


def short(value: Any) -> str:
    """Shorten a value for a message."""
    return f"({len(value)}) {', '.join(value[:3])}, ..." if isinstance(value, list) else str(value)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between a checkpoint's identity, which may lack newer keys, and this run's."""
    texts = {"data": "other images (names, order or classes)", "sizes": "images of other sizes"}
    changed = [key for key, value in before.items() if value != now[key]]
    if "sizes" in changed and not (before["sizes"] and now["sizes"]):  # another format of the same data set
        changed.remove("sizes")
    return [texts.get(key, f"{key} {before[key]} -> {now[key]}") for key in changed]


def restore(run: Run, resumed: checkpoint.Loaded, say: Callable[[str], None]) -> None:
    """Restore the rest of the checkpoint. Raises TrainError if options that must not change have changed."""
    state = resumed.state
    progress = Progress(**state["progress"])
    if changed := _changes(state["identity"], run.identity()):
        if progress.step:
            raise TrainError(
                f"{resumed.path} was saved within an epoch, and the order of images has changed since: "
                f"{', '.join(changed)}"
            )
        # between epochs this is fine: the schedule continues at the same share of the run
        say(f"train: changed since {resumed.path} was saved: {', '.join(changed)}")
        progress.updates = progress.epoch * run.epoch_steps
    run.progress = progress
    # other settings may change, but these determine the parameter groups
    for name in ("optimizer", "decay", "no_decay", "layer_decay"):
        if (saved := state["config"].get(name, here := getattr(run.config, name))) != here:
            raise TrainError(f"{resumed.path} was saved with --{name} {saved}, not {here}; use the same value")
    try:
        run.step.load_state(state)
    except TrainError as error:
        raise TrainError(f"{resumed.path}: {error}") from error
