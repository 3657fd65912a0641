"""Prepare a run before its first step, the same on every rank, and restore it from a checkpoint if there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from train.checkpoint import Loaded
from train.combinations import check
from train.config import Config
from train.data import sampler
from train.data.batch import Transfer
from train.data.contents import Contents
from train.data.decode import Decoder, choose_decoder
from train.data.loader import Loader
from train.data.open import is_synthetic, open_dataset
from train.data.repeat import Repeated
from train.data.source import Dataset
from train.distributed.agreement import agree, start_alike
from train.distributed.methods import abilities, make_step, method
from train.distributed.world import World
from train.errors import TrainError
from train.hardware import device_name, ideal_seconds
from train.infiniband import Ports
from train.memory import keep_freed_memory
from train.models import check_sides, configured_model, without_gradient
from train.own_work import node_name
from train.precision import choose_precision
from train.restore import check_same_model, restore, short
from train.run import Progress, Run, global_batch
from train.schedule import make_schedule
from train.store import Store, make_store
from train.stragglers import Stragglers
from train.weights import read_weights


def prepare(config: Config, world: World) -> Run:
    """Open the data, build model, optimiser and schedule, and restore the checkpoint if there is one.

    Raises:
        TrainError: invalid options, data or checkpoint on this rank.
        SystemExit: another rank raised TrainError.
    """
    if world.device.type == "cpu":
        keep_freed_memory()
    say = _say if world.first else _silent
    kind, amp = method(config, world), choose_precision(config, world.device).name
    world.all_ranks_or_exit(lambda: check(config, kind, amp, world.size, world.device.type))
    store = make_store(config, world, sharded=abilities(kind).shards_weights)
    resumed = None if config.evaluate else store.find()
    own = world.all_ranks_or_exit(lambda: _read_local(config, world, kind, resumed, say))
    weights = "" if resumed else config.evaluate or config.pretrained
    if warning := agree(config.data, own.contents, weights, own.model, own.decoder.name, world):
        say(warning)
    if resumed is None and kind != "ddp":  # which does so itself
        start_alike(own.model, world)
    run = _build(config, world, own, store, resumed)
    if resumed:
        world.all_ranks_or_exit(lambda: restore(run, resumed, say))
    return run


@dataclass(frozen=True)
class _Local:
    """Objects read from the node's disk or packages, which may differ between ranks."""

    dataset: Dataset
    contents: Contents
    model: nn.Module
    decoder: Decoder


def _read_local(config: Config, world: World, kind: str, resumed: Loaded | None, say: Callable[[str], None]) -> _Local:
    dataset = open_dataset(config.data, config.image_size)
    read_within = config.timeout if world.size > 1 else None
    model = configured_model(config, len(dataset.classes))
    if warning := check_sides(model, config.arch, config.sides(), len(dataset.classes)):
        say(warning)
    _check_gradients(model, config, kind, say)
    if resumed is None:
        _load_weights(config, dataset, model, say)
    return _Local(dataset, Contents.of(dataset, read_within), model, choose_decoder(config.decoder, say))


def _check_gradients(model: nn.Module, config: Config, kind: str, say: Callable[[str], None]) -> None:
    """Name parameters that get no gradient: DDP waits for those of all, with several ranks and no static graph."""
    if config.evaluate or not (names := without_gradient(model, config.image_size)):
        return
    found = f"--arch {config.arch}: no gradient for {', '.join(names[:3])}" + (", ..." if len(names) > 3 else "")
    if kind == "ddp" and not config.static_graph:
        raise TrainError(
            f"{found}, which its forward pass does not use, and DDP needs the gradient of each; set requires_grad "
            f"to False in the model, or use --static-graph"
        )
    say(f"train: warning: {found}: the forward pass does not use it")


def _build(config: Config, world: World, own: _Local, store: Store, resumed: Loaded | None) -> Run:
    """Build the run at its first step, with the checkpoint's weights if there are any and they are not sharded."""
    dataset, precision = own.dataset, choose_precision(config, world.device)
    epoch_steps = world.all_ranks_or_exit(lambda: _epoch_steps(config, world, len(dataset.train.labels)))
    name, tf32 = device_name(world.device), config.tf32
    ideal = {side: ideal_seconds(own.model, side, name, precision.name, tf32) for side in config.sides()}
    # an unsharded model may be too large for the device
    device = torch.device("cpu") if abilities(method(config, world)).shards_weights else world.device
    model = precision.cast(_with_syncbn(own.model, config), device)
    if resumed:
        world.all_ranks_or_exit(lambda: check_same_model(resumed, config, dataset, model))
    nodes = world.gather(node_name())
    step, transfer = world.all_ranks_or_exit(lambda: make_step(config, world, precision, model)), Transfer(world.device)
    loader = Loader(config, dataset.train, own.decoder, config.batch_size, world.core_sharers, transfer)
    val_batch = config.val_batch_size or config.batch_size
    return Run(
        config=config,
        world=world,
        dataset=dataset,
        model=model,
        step=step,
        store=store,
        precision=precision,
        schedule=make_schedule(config, global_batch(config, world), config.epochs * epoch_steps),
        progress=Progress(),
        epoch_steps=epoch_steps,
        resumed=resumed,
        train_loader=Repeated(loader) if config.headspace or is_synthetic(config.data) else loader,
        val_loader=Loader(config, dataset.val, None, val_batch, world.core_sharers, transfer),
        decoder=own.decoder.name,
        ideal_seconds=ideal,
        images=own.contents.digest("train"),
        nodes=nodes,
        stragglers=Stragglers(nodes if world.sharded else []),  # model stages have unequal work
        ports=Ports("nccl" in world.backend and world.local_rank == 0 and world.local_size < world.size),
    )


def _load_weights(config: Config, dataset: Dataset, model: nn.Module, say: Callable[[str], None]) -> None:
    """Load the weights of --evaluate or --pretrained."""
    if not (name := config.evaluate or config.pretrained):
        return
    weights = read_weights(Path(name).expanduser())
    if config.evaluate and weights.state and weights.state["classes"] != list(dataset.classes):
        saved, here = short(weights.state["classes"]), short(list(dataset.classes))
        raise TrainError(f"--evaluate {name} has classes {saved}, but the data has {here}")
    fresh = weights.load(model, other_classes=not config.evaluate)
    say(f"train: loaded weights from {name}" + (f"; initialised: {', '.join(fresh)}" if fresh else ""))


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(_text: str) -> None:
    """For ranks other than 0, which must not repeat rank 0's messages."""


def _with_syncbn(model: nn.Module, config: Config) -> nn.Module:
    if config.syncbn == "custom":
        from train.experiments.syncbn import convert

        return convert(model)
    if config.syncbn == "library":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
        return converted
    return model


def _epoch_steps(config: Config, world: World, images: int) -> int:
    batch = global_batch(config, world)
    if batch > images:
        times = f" x {config.accumulate} accumulated" if config.accumulate > 1 else ""
        raise TrainError(
            f"--batch-size {config.batch_size}{times} on {world.size} process{'es' * (world.size > 1)} "
            f"is {batch} images per step, but the training set has only {images}; "
            f"use a batch size of {max(1, images // (batch // config.batch_size))} or less"
        )
    return sampler.steps_per_epoch(images, batch, config.last_batch == "keep")
