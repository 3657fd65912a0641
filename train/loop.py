"""The run: epochs of steps, exact validation, a checkpoint after each epoch, and a coordinated stop of all ranks."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from train.checkpoint import weights_digest
from train.clock import Clock
from train.config import Config
from train.data import sampler
from train.data.batch import Request
from train.errors import Stopped, TrainError
from train.evaluate import SHOWN, evaluate
from train.every import Every
from train.hardware import device_name, peak_memory
from train.metrics import NO_SCORES, Meter, Scores, check_finite
from train.models import parameter_count
from train.parallel.methods import device_count, method
from train.parallel.world import StopSignal, World
from train.profile import tracing
from train.saving import AnySaver, make_saver, save, supersede
from train.schedule import momentum_at
from train.setup import Run, prepare
from train.step import Plan, draw_mix
from train.watch import Interval, Silent, Validated, Writer


def train(config: Config, world: World, stop: StopSignal) -> None:
    """Trains according to the options, from scratch or from the output folder's last checkpoint.

    Raises:
        TrainError: invalid options, data or checkpoint; nothing was overwritten.
        Stopped: SIGTERM arrived; the checkpoint is on disk.
    """
    run = prepare(config, world)
    watch = _watch(run)
    _announce(run, watch)
    if config.evaluate:
        _evaluate_only(run, watch, stop)
        return
    saver = make_saver(run)
    if run.progress.validated >= config.epochs:
        done = f"{run.progress.validated} epochs of {config.epochs} are done"
        watch.say(f"train: nothing to do: {done}; raise --epochs to continue")
        return
    watch.begin(_facts(run), purge_step=run.global_step + 1 if run.resumed else None)
    started, worked = time.perf_counter(), time.process_time()
    scores = NO_SCORES
    try:
        supersede(run, watch, saver)
        while run.progress.validated < config.epochs:
            if run.progress.validated == run.progress.epoch:
                _train_epoch(run, watch, stop, saver)
            scores = _finish_epoch(run, watch, stop, saver) or scores
    except Stopped:
        save(run, watch, saver)
        if saver:
            saver.close()
        world.sum(torch.zeros(1))  # no rank exits before the file is written, or torchrun would kill the others
        where = f"epoch {run.progress.epoch + 1}, step {run.progress.step}"
        watch.say(f"train: stopped at {where}; the checkpoint is saved")
        watch.end({"stopped": True, "step": run.global_step, "steps": run.total_steps})
        raise
    except TrainError as error:
        watch.end({"error": str(error), "step": run.global_step, "steps": run.total_steps})
        raise
    finally:
        run.train_loader.close()
        run.val_loader.close()
        if saver:
            saver.close()
    stop.settle()
    _close(run, watch, scores, time.perf_counter() - started, time.process_time() - worked)


def _watch(run: Run) -> Silent:
    """Where nodes may be lost, the first worker of each keeps the curves, in a folder of this generation."""
    config, world = run.config, run.world
    kept = os.environ.get("LAUNCHER_GENERATION_OUTPUT", "")
    if not (world.first or (kept and world.local_rank == 0)):
        return Silent()
    return Writer(Path(kept or config.output), run.precision.scaled, config.published_tags, world.first)


def _evaluate_only(run: Run, watch: Silent, stop: StopSignal) -> None:
    """Validates the weights of --evaluate; the result is a console line and the last line of metrics.jsonl."""
    watch.begin(_facts(run), None)
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


def _announce(run: Run, watch: Silent) -> None:
    config, dataset = run.config, run.dataset
    watch.say(
        f"train: {config.arch}, {parameter_count(run.model):,} parameters; {len(dataset.classes)} classes, "
        f"{len(dataset.train.labels):,} images to train on, {len(dataset.val.labels):,} to validate on; "
        f"global batch {run.global_batch}, {run.total_steps:,} steps, amp {run.precision.name}, "
        f"decoder {run.decoder}"
    )
    if run.resumed:
        if run.resumed.damaged:
            watch.say(f"train: {run.resumed.damaged}; using another one")
        origin = f" of {run.resumed.origin}" if run.resumed.origin else ""
        where = f"epoch {run.progress.epoch + 1}, step {run.progress.step}"
        watch.say(f"train: resumed {run.resumed.path}{origin} at {where}")


def _facts(run: Run) -> dict[str, object]:
    world = run.world
    return {
        "world": world.size,
        "devices": device_count(run.config, world),
        "parallel": method(run.config, world),
        "arch": run.config.arch,
        "device": device_name(world.device),
        "amp": run.precision.name,
        "backend": world.backend,
        "decoder": run.decoder,
        "global_batch": run.global_batch,
        "step": run.global_step,
        "validated": run.progress.step > 0
        or run.progress.validated == run.progress.epoch,  # if this step ends an epoch
        "steps": run.total_steps,
        "epochs": run.config.epochs,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "config": run.config.to_dict(),
    }


def _train_epoch(run: Run, watch: Silent, stop: StopSignal, saver: AnySaver | None) -> None:
    """Trains the rest of the current epoch.

    Raises:
        Stopped: between two steps; `run.progress` says where.
    """
    config, world, progress = run.config, run.world, run.progress
    run.model.train()
    meter = Meter(world, progress.sums, progress.interval)
    clock, plan, begun = Clock(), None, progress.step
    every = Every(config.checkpoint_every)
    trace = tracing(config, world, progress.epoch)
    for batch in clock.timed(run.train_loader.batches(requests(run), progress.epoch)):
        if plan is None:  # between two steps, never between micro-batches
            agreed = stop.agreed(save=world.first and every.time_is_up())
            due = agreed.save or every.steps_done(run.global_step)
            if agreed.stop or (due and progress.step > begun):
                meter.reduce()
                _check_finite(run, meter.interval, f"step {progress.step}")
                progress.sums, progress.interval = meter.epoch, meter.interval
                if agreed.stop:
                    raise Stopped
                save(run, watch, saver)
            plan = _plan(run)
        if progress.epoch == progress.step == 0:
            watch.images("Images/augmented", batch.images[:SHOWN].cpu().numpy(), 0)
        meter.add(run.step.accumulate(batch, plan))
        if not batch.last:
            continue
        if run.step.update(plan):
            progress.updates += 1
        else:
            progress.skipped += 1
            watch.say(f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {run.step.scale.value}")
        clock.images += batch.total
        rate, plan = plan.rate, None
        progress.step += 1
        trace.step()
        watch.stepped(progress.epoch + 1, config.epochs, run.global_step, run.total_steps)
        if progress.step % config.log_every == 0 or progress.step == run.epoch_steps:
            if progress.step == run.epoch_steps:
                meter.wait()  # the validation would, too; so the interval's rate has all of its work
            waited, (images_per_s, seconds) = clock.waited, clock.restart()
            now = _interval(run, rate, images_per_s)
            meter.close_interval(waited, partial(_report, run, watch, meter, now, seconds))
    meter.flush()
    trace.close()
    progress.sums, progress.interval = meter.epoch, meter.interval
    progress.epoch, progress.step = progress.epoch + 1, 0


def _check_finite(run: Run, sums: torch.Tensor, where: str) -> None:
    """Ends all ranks if the loss is inf or nan. They have the same sums, so they decide the same.

    A loss scale that can still be halved may cure it: such steps are skipped.
    """
    if not (run.config.allow_nan or run.step.scale.value > 1 or sums.isfinite().all()):
        at = f"epoch {run.progress.epoch + (where != 'validation')}, {where}"
        run.world.all_ranks_or_exit(lambda: check_finite(Scores.of(sums), at))


def _plan(run: Run) -> Plan:
    """The next step's rate and mix. Also seeds torch for this step, so that dropout is the same in a resumed run."""
    config, progress = run.config, run.progress
    seed = sampler.fold(config.seed, progress.epoch, progress.step)
    torch.manual_seed(sampler.fold(seed, run.world.rank))
    update = progress.updates
    mix, momentum = draw_mix(config, seed, config.side(progress.epoch)), momentum_at(config, update, run.total_steps)
    return Plan(run.schedule(update), update, mix, momentum)


def requests(run: Run) -> Iterator[Request]:
    """This rank's micro-batches for the rest of the epoch: as many per step as on every other rank, one at least.

    Otherwise batch norm that synchronises in every micro-batch would wait for ever. The last may be empty, or fillers.
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
            filler = max(0, run.least_samples - len(piece))
            yield Request(np.concatenate([piece, permutation[:filler]]), total, filler, start == starts[-1])


def _interval(run: Run, rate: float, images_per_s: float) -> Interval:
    """What is known of an interval when it ends; `_report` adds what the device has computed."""
    ideal = run.ideal_seconds[run.config.side(run.progress.epoch)]
    return Interval(
        epoch=run.progress.epoch + 1,
        epochs=run.config.epochs,
        step=run.global_step,
        steps=run.total_steps,
        epoch_step=run.progress.step,
        epoch_steps=run.epoch_steps,
        interval=NO_SCORES,
        so_far=NO_SCORES,
        lr=rate,
        images_per_s=images_per_s,
        data_wait=0.0,
        mfu=ideal and min(images_per_s * ideal / device_count(run.config, run.world), 1.0),
        loss_scale=run.step.scale.value,
        skipped=run.progress.skipped,
    )


def _report(
    run: Run, watch: Silent, meter: Meter, then: Interval, seconds: float, sums: torch.Tensor, waited: float
) -> None:
    """`sums` and `waited`: of the interval `then`, of `seconds`, over all ranks."""
    _check_finite(run, sums, f"step {then.epoch_step}")
    scores, wait = (Scores.of(sums), Scores.of(meter.epoch)), min(waited / (seconds * run.world.size), 1.0)
    watch.progress(replace(then, interval=scores[0], so_far=scores[1], data_wait=wait))


def _finish_epoch(run: Run, watch: Silent, stop: StopSignal, saver: AnySaver | None) -> Scores | None:
    """Validates, if that is due, reports and saves after an epoch of training."""
    progress = run.progress
    if progress.epoch % run.config.val_interval and progress.epoch < run.config.epochs:
        progress.validated, progress.sums = progress.epoch, torch.zeros_like(progress.sums)
        save(run, watch, saver, epoch=progress.epoch)
        return None
    start = time.perf_counter()
    report = partial(watch.validating, progress.epoch)
    sums, mistaken = evaluate(run.step.evaluated, run.val_loader, run.step.objective, run.world, stop.stopped, report)
    _check_finite(run, sums, "validation")
    scores = Scores.of(sums)
    if len(mistaken):
        watch.images("Images/misclassified", mistaken, run.global_step)
    progress.validated = progress.epoch
    best = scores.top1 > progress.best
    progress.best = max(scores.top1, progress.best)
    seconds = time.perf_counter() - start
    watch.validated(
        Validated(
            epoch=progress.epoch,
            epochs=run.config.epochs,
            step=run.global_step,
            train=Scores.of(progress.sums),
            val=scores,
            seconds=seconds,
            memory=run.world.max(peak_memory(run.world.device)),
        )
    )
    progress.sums = torch.zeros_like(progress.sums)
    save(run, watch, saver, best, progress.epoch)
    return scores


def _close(run: Run, watch: Silent, scores: Scores, seconds: float, cpu: float) -> None:
    own = isinstance(watch, Writer) or run.config.print_digest or run.step.sharded  # sharded: all ranks take part
    digest = weights_digest(run.model) if own else ""
    if run.config.print_digest:
        print(f"train: rank {run.world.rank} weights {digest}", flush=True)
    facts = {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss, "best_top1": run.progress.best}
    facts |= {"seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3)}
    facts |= {"step": run.global_step, "steps": run.total_steps}
    watch.end({**facts, "digest": digest})
    watch.say(
        f"train: done in {seconds:.1f} s; val Acc@1 {scores.top1:.2f} (best {run.progress.best:.2f}) "
        f"Acc@5 {scores.top5:.2f}; weights {digest[:16]}"
    )
