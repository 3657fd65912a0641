"""The training loop: epochs, exact validation, a checkpoint after each epoch, and a coordinated stop of all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import numpy as np
import torch

from train.clock import Clock
from train.config import Config
from train.data import sampler
from train.data.batch import Request, micro_batches
from train.distributed.world import StopSignal, World
from train.errors import Stopped, TrainError
from train.evaluate import SHOWN, evaluate
from train.every import Every
from train.metrics import NO_SCORES, Meter, Scores
from train.own_work import OwnWork
from train.profile import tracing
from train.reporting import (
    announce,
    check_loss,
    close,
    close_interval,
    facts,
    make_watch,
    report_stragglers,
    validated,
)
from train.run import Run
from train.saving import save, supersede
from train.schedule import momentum_at
from train.setup import prepare
from train.step import Plan, draw_mix
from train.watch import Silent


def train(config: Config, world: World, stop: StopSignal) -> None:
    """Train according to the options, from scratch or from the last checkpoint in the output folder.

    Raises:
        TrainError: invalid options, data or checkpoint; nothing was overwritten.
        Stopped: SIGTERM arrived; the checkpoint is on disk.
    """
    train_prepared(prepare(config, world), stop)


def train_prepared(run: Run, stop: StopSignal) -> None:
    """Do what `train` does, with a run that is at its first step. Raises what `train` raises."""
    config, world = run.config, run.world
    watch = make_watch(run)
    announce(run, watch)
    if config.evaluate:
        _evaluate_only(run, watch, stop)
        return
    run.store.open()
    if run.progress.validated >= config.epochs:
        done = f"{run.progress.validated} epochs of {config.epochs} are done"
        watch.say(f"train: nothing to do: {done}; raise --epochs to continue")
        return
    watch.begin(facts(run), purge_step=run.global_step + 1 if run.resumed else None)
    started, worked = time.perf_counter(), time.process_time()
    scores = NO_SCORES
    try:
        supersede(run, watch)
        while run.progress.validated < config.epochs:
            if run.progress.validated == run.progress.epoch:
                _train_epoch(run, watch, stop)
            scores = _finish_epoch(run, watch, stop) or scores
    except Stopped:
        save(run, watch)
        run.store.close()
        world.sum(torch.zeros(1))  # no rank exits before the file is written, or torchrun would kill the others
        where = f"epoch {run.progress.epoch + 1}, step {run.progress.step}"
        slow = report_stragglers(run, watch)
        watch.say(f"train: stopped at {where}; the checkpoint is saved")
        watch.end({"stopped": True, "step": run.global_step, "steps": run.total_steps, **slow})
        raise
    except TrainError as error:
        watch.end({"error": str(error), "step": run.global_step, "steps": run.total_steps})
        raise
    finally:
        run.train_loader.close()
        run.val_loader.close()
        run.store.close()
    stop.settle()
    close(run, watch, scores, time.perf_counter() - started, time.process_time() - worked)


def _evaluate_only(run: Run, watch: Silent, stop: StopSignal) -> None:
    """Validate the weights of --evaluate; print the result and write it to the last line of metrics.jsonl."""
    watch.begin(facts(run), None)
    started = time.perf_counter()
    try:
        sums, _ = evaluate(run.step.evaluated, run.val_loader, run.step.objective, run.world, stop.stopped)
    finally:
        run.train_loader.close()
        run.val_loader.close()
    stop.settle()
    scores = Scores.of(sums)
    watch.end({"evaluated": run.config.evaluate, **asdict(scores)})
    watch.say(
        f"train: {run.config.evaluate}: val Loss {scores.loss:.4f} Acc@1 {scores.top1:.2f} Acc@5 {scores.top5:.2f} "
        f"({scores.images} images, {time.perf_counter() - started:.1f} s)"
    )


def _train_epoch(run: Run, watch: Silent, stop: StopSignal) -> None:
    """Train the rest of the current epoch.

    Raises:
        Stopped: between two steps; `run.progress` has the position.
    """
    config, progress, begun = run.config, run.progress, run.progress.step
    run.model.train()
    meter, every = Meter(run.world, progress.sums, progress.interval), Every(config.checkpoint_every)
    clock = Clock(OwnWork(run.world.device, forward=not run.step.forward_waits))
    run.step.computed = clock.own_work.computed
    trace = tracing(config, run.world, progress.epoch)
    batches = clock.timed(run.train_loader.batches(requests(run), progress.epoch))
    while progress.step < run.epoch_steps:
        agreed = stop.agreed(save=run.world.first and every.time_is_up())
        due = agreed.save or every.steps_done(run.global_step)
        if agreed.stop or (due and progress.step > begun):
            _keep_sums(run, meter)
            if agreed.stop:
                raise Stopped
            save(run, watch)
        plan = _plan(run)
        for batch in micro_batches(batches):
            if progress.epoch == progress.step == 0:
                watch.images("Images/augmented", batch.images[:SHOWN].cpu().numpy(), 0)
            meter.add(run.step.accumulate(batch, plan))
        clock.images += batch.total
        _update(run, watch, plan)
        trace.step()
        watch.stepped(progress.epoch + 1, config.epochs, run.global_step, run.total_steps)
        if progress.step % config.log_every == 0 or progress.step == run.epoch_steps:
            close_interval(run, watch, meter, clock, plan.rate)
    meter.flush()
    trace.close()
    progress.sums, progress.interval = meter.epoch, meter.interval
    progress.epoch, progress.step = progress.epoch + 1, 0


def _keep_sums(run: Run, meter: Meter) -> None:
    """Store the meter's sums for a checkpoint within an epoch."""
    meter.reduce()
    check_loss(run, meter.interval, f"step {run.progress.step}")
    run.progress.sums, run.progress.interval = meter.epoch, meter.interval


def _update(run: Run, watch: Silent, plan: Plan) -> None:
    """Update the weights at the end of a step."""
    if run.step.update(plan):
        run.progress.updates += 1
    else:
        run.progress.skipped += 1
        watch.say(f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {run.step.scale.value}")
    run.progress.step += 1


def _plan(run: Run) -> Plan:
    """Return the next step's rate and mix; seed torch for this step, so that dropout is reproducible after a resume."""
    config, progress = run.config, run.progress
    seed = sampler.fold(config.seed, progress.epoch, progress.step)
    torch.manual_seed(sampler.fold(seed, run.world.rank))
    update = progress.updates
    mix, momentum = draw_mix(config, seed, config.side(progress.epoch)), momentum_at(config, update, run.total_steps)
    return Plan(run.schedule(update), update, mix, momentum)


def requests(run: Run) -> Iterator[Request]:
    """Yield this rank's micro-batches for the rest of the epoch: per step the same number on every rank, at least one.

    Otherwise synchronised batch norm would wait forever. The last one may be empty or consist of fillers.
    """
    progress, world = run.progress, run.world
    permutation = sampler.order(
        run.config.seed, progress.epoch, len(run.dataset.train.labels), run.config.repeats, run.global_batch
    )
    for step in range(progress.step, run.epoch_steps):
        indices, total = sampler.training_batch(permutation, step, run.global_batch, world.shard, world.data_shards)
        largest = -(-total // world.data_shards)  # the largest share of a rank
        starts = range(0, largest, run.config.batch_size)
        for start in starts:
            piece = indices[start : start + run.config.batch_size]
            filler = max(0, run.min_samples - len(piece))
            yield Request(np.concatenate([piece, permutation[:filler]]), total, filler, start == starts[-1])


def _finish_epoch(run: Run, watch: Silent, stop: StopSignal) -> Scores | None:
    """Validate if due, report and save a checkpoint after an epoch of training."""
    progress = run.progress
    if progress.epoch % run.config.val_interval and progress.epoch < run.config.epochs:
        progress.validated, progress.sums = progress.epoch, torch.zeros_like(progress.sums)
        save(run, watch, epoch=progress.epoch)
        return None
    start = time.perf_counter()
    report = partial(watch.validating, progress.epoch)
    sums, mistaken = evaluate(run.step.evaluated, run.val_loader, run.step.objective, run.world, stop.stopped, report)
    check_loss(run, sums, "validation")
    scores = Scores.of(sums)
    if len(mistaken):
        watch.images("Images/misclassified", mistaken, run.global_step)
    progress.validated = progress.epoch
    best = scores.top1 > progress.best
    progress.best = max(scores.top1, progress.best)
    train, seconds = Scores.of(progress.sums), time.perf_counter() - start
    validated(watch, run.config, run.world, progress.epoch, run.global_step, train, scores, seconds)
    progress.sums = torch.zeros_like(progress.sums)
    save(run, watch, best, progress.epoch)
    return scores
