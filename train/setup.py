"""Everything that a run needs before its first step, the same on every rank, restored from a checkpoint if any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train import checkpoint, replicas
from train.combinations import check
from train.config import Config
from train.data import sampler
from train.data.batch import Transfer
from train.data.contents import Contents, Digest
from train.data.decode import choose_decoder
from train.data.loader import Loader
from train.data.open import is_synthetic, open_dataset
from train.data.repeat import Repeated
from train.data.source import Dataset
from train.errors import TrainError
from train.hardware import device_name, ideal_seconds
from train.memory import keep_freed_memory
from train.models import check_sides, configured_model, has_batch_norm
from train.parallel.agreement import agree_on_data, agree_on_weights, mixed_software
from train.parallel.methods import make_step, method
from train.parallel.world import World
from train.precision import Precision, choose_precision
from train.schedule import Schedule, make_schedule
from train.step import Step
from train.syncbn import SyncBatchNorm, convert
from train.weights import read_weights


@dataclass
class Progress:
    """The position of a run. Together with the options it determines the rest of the run."""

    epoch: int = 0  # training epochs done
    step: int = 0  # steps done in the current epoch
    updates: int = 0  # steps applied: the schedule's position
    skipped: int = 0  # steps not applied because fp16 overflowed
    validated: int = 0  # epochs validated
    best: float = -1.0  # highest top-1 so far, percent
    # `counts` of all ranks: of this epoch's intervals, and of the steps since the last of them
    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    interval: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))


@dataclass
class Run:
    """All parts of a run on this rank."""

    config: Config
    world: World
    dataset: Dataset
    model: nn.Module
    step: Step
    precision: Precision
    schedule: Schedule
    progress: Progress
    epoch_steps: int
    resumed: checkpoint.Loaded | None
    train_loader: Loader | Repeated
    val_loader: Loader
    decoder: str
    ideal_seconds: dict[int, float | None]  # side of an image -> see `hardware.ideal_seconds`
    images: Digest  # of the training set

    @property
    def global_batch(self) -> int:
        """Images per step on all ranks together."""
        return _global_batch(self.config, self.world)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.epochs * self.epoch_steps

    @property
    def global_step(self) -> int:
        """Steps done so far in the whole run."""
        return self.progress.epoch * self.epoch_steps + self.progress.step

    @property
    def least_samples(self) -> int:
        """The size to which a rank's batch is padded with samples of weight 0.

        Batch norm rejects a single value per channel. Our synchronised batch norm accepts an empty batch and must not
        see fillers; torch's accepts a single value, but with autocast no empty batch.
        """
        if any(isinstance(module, SyncBatchNorm) for module in self.model.modules()):
            return 0
        return 2 if has_batch_norm(self.model) and self.config.syncbn == "none" else 1

    def identity(self) -> dict[str, Any]:
        """What must match when a checkpoint from inside an epoch is resumed, so that the sample order is the same."""
        names = ("seed", "last_batch", "repeats")
        order = {name: getattr(self.config, name) for name in names}
        data = {"data": self.images.names, "sizes": self.images.sizes}
        return order | {"global_batch": self.global_batch, "images": len(self.dataset.train.labels)} | data

    def state(self) -> checkpoint.State:
        """The content of a checkpoint."""
        return {
            "format": checkpoint.FORMAT,
            "run": checkpoint.run_id(),
            "generation": self.world.generation,
            "arch": self.config.arch,
            "classes": list(self.dataset.classes),
            "identity": self.identity(),
            "config": self.config.to_dict(),
            "progress": vars(self.progress),
            "model": self.model.state_dict(),
            "optimizer": self.step.optimizer_state(),
            "scale": self.step.scale.state_dict(),
            "ema": self.step.ema.averages if self.step.ema else None,
            "masters": [p.detach() for p in self.step.masters.parameters] if self.step.masters else None,
        }


def prepare(config: Config, world: World) -> Run:
    """Opens the data, builds model, optimiser and schedule, and restores the checkpoint if there is one.

    Raises:
        TrainError: invalid options, data or checkpoint on this rank.
        SystemExit: another rank raised TrainError.
    """
    if world.device.type == "cpu":
        keep_freed_memory()
    precision, kind = choose_precision(config, world.device), method(config, world)
    say = _say if world.first else _silent
    world.all_ranks_or_exit(lambda: check(config, kind, precision.name, world.size, world.device.type))
    dataset = world.all_ranks_or_exit(lambda: open_dataset(config.data, config.image_size))
    contents = Contents.of(dataset)
    agree_on_data(config.data, contents, world)
    epoch_steps = world.all_ranks_or_exit(lambda: _epoch_steps(config, world, len(dataset.train.labels)))
    model = world.all_ranks_or_exit(lambda: configured_model(config, len(dataset.classes)))
    world.all_ranks_or_exit(lambda: check_sides(model, config.arch, config.sides(), len(dataset.classes)))
    name, tf32 = device_name(world.device), config.tf32
    ideal = {side: ideal_seconds(model, side, name, precision.name, tf32) for side in config.sides()}
    resumed = None
    if not config.evaluate:
        resumed = _find_sharded(config, world) if kind == "fsdp" else _find(config, world)
    if resumed is None:
        world.all_ranks_or_exit(lambda: _load_weights(config, dataset, model, say))
        if file := config.evaluate or config.pretrained:
            agree_on_weights(file, model, world)
    # a model that is divided may be too large for the device as a whole
    home = torch.device("cpu") if kind == "fsdp" else world.device
    model = precision.cast(_with_syncbn(model, config), home)
    schedule = make_schedule(config, _global_batch(config, world), config.epochs * epoch_steps)
    if resumed:
        world.all_ranks_or_exit(lambda: _check_same_model(resumed, config, dataset, model))
    step = world.all_ranks_or_exit(lambda: make_step(config, world, precision, model))
    transfer = Transfer(world.device)
    decoder = world.all_ranks_or_exit(lambda: choose_decoder(config.decoder, say))
    if warning := mixed_software(decoder.name, world):
        say(warning)
    loader = Loader(config, dataset.train, decoder, config.batch_size, world.core_sharers, transfer)
    val_batch = config.val_batch_size or config.batch_size
    run = Run(
        config=config,
        world=world,
        dataset=dataset,
        model=model,
        step=step,
        precision=precision,
        schedule=schedule,
        progress=Progress(),
        epoch_steps=epoch_steps,
        resumed=resumed,
        train_loader=Repeated(loader) if config.headspace or is_synthetic(config.data) else loader,
        val_loader=Loader(config, dataset.val, None, val_batch, world.core_sharers, transfer),
        decoder=decoder.name,
        ideal_seconds=ideal,
        images=contents.digest("train"),
    )
    if resumed:
        world.all_ranks_or_exit(lambda: _restore(run, resumed, say))
    return run


def _find(config: Config, world: World) -> checkpoint.Loaded | None:
    """The checkpoint to resume from: rank 0's, or the newest of any node."""

    def check_undivided() -> None:
        if (divided := config.checkpoint_folder / "last.sharded").exists():
            raise TrainError(f"{divided} was made with --parallel fsdp; use it again, or another --output")

    world.all_ranks_or_exit(lambda: check_undivided() if replicas.reads(config, world) else None)
    return replicas.load(config, world)


def _find_sharded(config: Config, world: World) -> checkpoint.Loaded | None:
    """The sharded checkpoint to resume from; every rank reads its own parts later."""
    from train import sharded  # imports torch.distributed.checkpoint, which takes a second

    world.all_ranks_or_exit(lambda: sharded.check_shared(config.checkpoint_folder, world))
    return world.all_ranks_or_exit(lambda: sharded.find(config.resume, config.checkpoint_folder, world))


def _load_weights(config: Config, dataset: Dataset, model: nn.Module, say: Callable[[str], None]) -> None:
    """Loads what --evaluate or --pretrained names."""
    if not (name := config.evaluate or config.pretrained):
        return
    weights = read_weights(Path(name).expanduser())
    if config.evaluate and weights.state and weights.state["classes"] != list(dataset.classes):
        there, here = _short(weights.state["classes"]), _short(list(dataset.classes))
        raise TrainError(f"--evaluate {name} has the classes {there}, the data {here}")
    fresh = weights.load(model, other_classes=not config.evaluate)
    say(f"train: weights of {name}" + (f"; new: {', '.join(fresh)}" if fresh else ""))


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(_text: str) -> None:
    """For ranks other than 0, which would repeat rank 0's messages."""


def _global_batch(config: Config, world: World) -> int:
    """That of the full world: a smaller one takes more micro-batches of the same size."""
    return config.batch_size * config.accumulate * max(world.data_shards, world.full_size)


def _with_syncbn(model: nn.Module, config: Config) -> nn.Module:
    if config.syncbn == "custom":
        return convert(model)
    if config.syncbn == "library":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
        return converted
    return model


def _epoch_steps(config: Config, world: World, images: int) -> int:
    batch = _global_batch(config, world)
    if batch > images:
        times = f" x {config.accumulate} accumulated" if config.accumulate > 1 else ""
        raise TrainError(
            f"--batch-size {config.batch_size}{times} on {world.size} process{'es' * (world.size > 1)} "
            f"is {batch} images per step, but there are {images} to train on; "
            f"make it {max(1, images // (batch // config.batch_size))} or less"
        )
    return sampler.steps_per_epoch(images, batch, config.last_batch == "keep")


def _check_same_model(resumed: checkpoint.Loaded, config: Config, dataset: Dataset, model: nn.Module) -> None:
    state = resumed.state
    if "progress" not in state:
        raise TrainError(f"{resumed.path} is from a dual-batch run; use another --output, or --parallel dual_batch")
    for what, here in (("arch", config.arch), ("classes", list(dataset.classes))):
        if state[what] != here:
            raise TrainError(
                f"{resumed.path} has {what} {_short(state[what])}, this run {_short(here)}; "
                f"use another --output, or the same model and data"
            )
    if "optimizer" not in state:
        raise TrainError(f"{resumed.path} has weights only, nothing to go on from; begin with them: --pretrained")
    try:
        if "model" in state:  # a sharded one is read when the model is divided, too
            model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise TrainError(f"{resumed.path} does not fit the model: {str(error).splitlines()[-1].strip()}") from error


def _short(value: Any) -> str:
    return f"({len(value)}) {', '.join(value[:3])}, ..." if isinstance(value, list) else str(value)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """How this run's identity differs from a checkpoint's, which may be of an older version and lack some keys."""
    texts = {"data": "other images (names, order or classes)", "sizes": "images of other sizes"}
    changed = [key for key, value in before.items() if value != now[key]]
    if "sizes" in changed and not (before["sizes"] and now["sizes"]):  # another format of the same data set
        changed.remove("sizes")
    return [texts.get(key, f"{key} {before[key]} -> {now[key]}") for key in changed]


def _restore(run: Run, resumed: checkpoint.Loaded, say: Callable[[str], None]) -> None:
    state = resumed.state
    progress = Progress(**state["progress"])
    if changed := _changes(state["identity"], run.identity()):
        if progress.step:
            raise TrainError(
                f"{resumed.path} was saved inside an epoch, and the order of images has changed since: "
                f"{', '.join(changed)}"
            )
        # between epochs this is fine: the schedule continues at the same share of the run
        say(f"train: changed since {resumed.path} was saved: {', '.join(changed)}")
        progress.updates = progress.epoch * run.epoch_steps
    run.progress = progress
    for name in ("optimizer", "decay"):  # other settings may change, but these say whose momentum is whose
        if (there := state["config"][name]) != (here := getattr(run.config, name)):
            raise TrainError(f"{resumed.path} was made with --{name} {there}, not {here}; use the same")
    run.step.load_optimizer(state["optimizer"])
    run.step.scale.load_state_dict(state["scale"])
    parts = ("--ema-decay", run.step.ema, state["ema"]), ("--amp O2", run.step.masters, state["masters"])
    for option, own, saved in parts:
        if (own is None) != (saved is None):
            raise TrainError(f"{resumed.path} was made {'without' if saved is None else 'with'} {option}; use the same")
    if run.step.ema:
        run.step.ema.load(state["ema"])
    if run.step.masters:
        for ours, theirs in zip(run.step.masters.parameters, state["masters"], strict=True):
            ours.data.copy_(theirs)
