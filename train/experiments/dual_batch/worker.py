"""A worker: pulls weights, trains one local epoch on its share and pushes the result, until the server ends the run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import torch

from train.config import Config
from train.data import sampler
from train.data.batch import Request, Transfer
from train.data.decode import choose_decoder
from train.data.loader import Loader
from train.data.open import open_dataset
from train.distributed.world import World
from train.errors import Stopped, TrainError
from train.experiments.dual_batch.network import Remote
from train.experiments.dual_batch.plan import Share
from train.experiments.dual_batch.server import Grant
from train.foreign import about_model
from train.metrics import DIVERGED
from train.models import configured_model, has_batch_norm
from train.precision import choose_precision
from train.step import Plan, Step


def work(config: Config, world: World, share: Share, server: Remote, stop: threading.Event) -> None:
    """Train local epochs until the server grants no more.

    Raises:
        TrainError: the server is lost.
        Stopped: SIGTERM arrived.
    """
    try:
        _work(config, world, share, server, stop)
    except (TrainError, RuntimeError, MemoryError, OSError) as error:  # torch's out of memory is a RuntimeError
        if isinstance(error.__cause__, RuntimeError) and isinstance(error, TrainError):
            raise  # the server itself cannot be reached
        # the server reports it; the run continues without this worker, so this is not a failure of the run
        kind = "out of memory" if _out_of_memory(error) else type(error).__name__
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        server.lose(f"{kind} on {socket.gethostname()}: {reason}")
        print(f"train: worker {server.worker} (rank {server.worker + 1}) stopped: {kind}: {error}", flush=True)
    finally:
        server.leave(stop.is_set())


def _out_of_memory(error: Exception) -> bool:
    """Whether it is an out-of-memory error. On CPU, torch and oneDNN have only messages for it, no exception class."""
    texts = ("can't allocate memory", "could not create a primitive")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)


def _work(config: Config, world: World, share: Share, server: Remote, stop: threading.Event) -> None:
    decoder, transfer = choose_decoder(config.decoder), Transfer(world.device)  # first, as in `train.trainer`
    dataset = open_dataset(config.data)
    model = configured_model(config, len(dataset.classes))
    config = config.settled(about_model(model))
    precision = choose_precision(config, world.device)
    model = precision.cast(model, world.device)
    loader = Loader(config, dataset.train, decoder, share.batch, world.core_sharers, transfer)
    fewest = 2 if has_batch_norm(model) else 1
    try:
        while (answer := server.pull()) != "done":
            if stop.is_set():
                raise Stopped
            if isinstance(answer, Grant):
                model.load_state_dict({**model.state_dict(), **answer.weights})
                step = Step(config, world, precision, model, model)  # momentum starts at 0 with the pulled weights
                sums = train_epoch(loader, share, step, answer, server.worker, fewest, stop)
                weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
                server.push(weights, sums)
    finally:
        loader.close()


def train_epoch(
    loader: Loader, share: Share, step: Step, grant: Grant, worker: int, fewest: int, stop: threading.Event
) -> torch.Tensor:
    """Train on the share's samples, in a different order for every grant; return their `counts`.

    Raises:
        TrainError: a gradient is inf or nan.
    """
    step.model.train()
    config, images = step.objective.config, len(loader.source.labels)
    order = sampler.order(sampler.fold(config.seed, worker), grant.number, images)
    torch.manual_seed(sampler.fold(config.seed, worker, grant.number))
    sums = torch.zeros(4, dtype=torch.float64, device=step.objective.world.device)
    for number, batch in enumerate(
        loader.batches(_requests(order[: share.samples], share.batch, fewest), grant.number, config.side(grant.round))
    ):
        if stop.is_set():
            raise Stopped
        plan = Plan(grant.rate, number)
        output = step.forward(batch, plan)
        step.backward(output)
        sums += output.counts
        step.update(plan)
    if step.bad:
        raise TrainError(f"a gradient is inf or nan: {DIVERGED}")
    return sums.cpu()


def _requests(indices: sampler.Indices, batch: int, fewest: int) -> Iterator[Request]:
    """Yield the batches of a share; the last may be smaller, with fillers of weight 0 if batch norm needs them."""
    for start in range(0, len(indices), batch):
        piece = indices[start : start + batch]
        filler = max(0, fewest - len(piece))
        yield Request(np.concatenate([piece, indices[:filler]]), len(piece), filler)
