"""Reports of a run: its start, intervals, epochs and end. `train.watch` writes them."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train import infiniband
from train.checkpoint import weights_digest
from train.clock import Clock
from train.config import Config
from train.distributed.methods import device_count, method
from train.distributed.world import World
from train.hardware import device_name, peak_memory
from train.metrics import NO_SCORES, Meter, Scores, check_finite
from train.models import parameter_count
from train.run import Run
from train.stragglers import KINDS, WINDOW
from train.watch import Interval, Silent, Validated, Writer


def make_watch(run: Run) -> Silent:
    """Return a writer for rank 0; in an elastic job, for the first worker of each node, in the generation's folder."""
    config, world = run.config, run.world
    kept = os.environ.get("LAUNCHER_GENERATION_OUTPUT", "")
    if not (world.first or (kept and world.local_rank == 0)):
        return Silent()
    return Writer(Path(kept or config.output), run.precision.scaled, config.published_tags, world.first)


def announce(run: Run, watch: Silent) -> None:
    """Print the lines before the first step."""
    config, dataset = run.config, run.dataset
    watch.say(
        f"train: {config.arch}, {parameter_count(run.model):,} parameters; {len(dataset.classes)} classes, "
        f"{len(dataset.train.labels):,} images to train on, {len(dataset.val.labels):,} to validate on; "
        f"global batch {run.global_batch}, {run.total_steps:,} steps, amp {run.precision.name}, "
        f"decoder {run.decoder}"
    )
    if run.resumed:
        if run.resumed.damaged:
            watch.say(f"train: {run.resumed.damaged}; using another checkpoint")
        origin = f" of {run.resumed.origin}" if run.resumed.origin else ""
        where = f"epoch {run.progress.epoch + 1}, step {run.progress.step}"
        watch.say(f"train: resumed {run.resumed.path}{origin} at {where}")


def facts(run: Run) -> dict[str, object]:
    """Return the content of the first line of metrics.jsonl."""
    progress = run.progress
    return {
        **common_facts(run.config, run.world, run.precision.name),
        "world": run.world.size,
        "devices": device_count(run.config, run.world),
        "parallel": method(run.config, run.world),
        "decoder": run.decoder,
        "global_batch": run.global_batch,
        "step": run.global_step,
        "validated": progress.step > 0 or progress.validated == progress.epoch,  # if this step ends an epoch
        "steps": run.total_steps,
    }


def common_facts(config: Config, world: World, amp: str) -> dict[str, object]:
    """Return the facts that a dual-batch run has, too."""
    return {
        "arch": config.arch,
        "device": device_name(world.device),
        "amp": amp,
        "backend": world.backend,
        "epochs": config.epochs,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "config": config.to_dict(),
    }


def close_interval(run: Run, watch: Silent, meter: Meter, clock: Clock, rate: float) -> None:
    """End an interval, at learning rate `rate`; it is reported when the device has computed it."""
    if run.progress.step == run.epoch_steps:
        meter.wait()  # validation would wait anyway; images/s then covers all work of the interval
    waited, own, ports = clock.waited, clock.own_work.restart(), run.ports.check()
    images_per_s, seconds = clock.restart()
    now = _interval(run, rate, images_per_s)
    meter.close_interval(partial(_report, run, watch, meter, now, seconds), lambda: (waited, *own(), *ports))


def _interval(run: Run, rate: float, images_per_s: float) -> Interval:
    """Return an interval without the values that the device has yet to compute, which `_report` adds."""
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
    run: Run, watch: Silent, meter: Meter, then: Interval, seconds: float, sums: torch.Tensor, ranks: torch.Tensor
) -> None:
    """Report the interval `then`. `sums`: over all ranks; `ranks`: the figures of each rank from `close_interval`."""
    check_loss(run, sums, f"step {then.epoch_step}")
    figures, before = ranks.tolist(), run.stragglers.now
    run.stragglers.add([own[1 : 1 + len(KINDS)] for own in figures], seconds)
    slow = run.stragglers.name(run.stragglers.now) if run.stragglers.now else ""
    if run.stragglers.now and (before is None or before.rank != run.stragglers.now.rank):
        watch.say(f"train: {slow}, in the last {WINDOW} intervals")
    if warning := infiniband.warning(run.nodes, [(own[-2], own[-1]) for own in figures]):
        watch.say(f"train: {warning}")
    wait = min(sum(own[0] for own in figures) / (seconds * run.world.size), 1.0)
    scores, slowest = (Scores.of(sums), Scores.of(meter.epoch)), run.stragglers.last
    watch.progress(replace(then, interval=scores[0], so_far=scores[1], data_wait=wait, slowest=slowest, slow=slow))


def check_loss(run: Run, sums: torch.Tensor, where: str) -> None:
    """Stop all ranks if the loss is inf or nan. All have the same sums, so all decide the same.

    If the loss scale can still be halved, the run continues: such steps are skipped.
    """
    if not (run.config.allow_nan or run.step.scale.value > 1 or sums.isfinite().all()):
        at = f"epoch {run.progress.epoch + (where != 'validation')}, {where}"
        run.world.all_ranks_or_exit(lambda: check_finite(Scores.of(sums), at))


def validated(
    watch: Silent, config: Config, world: World, epoch: int, step: int, train: Scores, val: Scores, seconds: float
) -> None:
    """Report an epoch of training and its validation, which took `seconds`."""
    memory = world.max(peak_memory(world.device))
    watch.validated(Validated(epoch, config.epochs, step, train, val, seconds, memory))


def report_stragglers(run: Run, watch: Silent) -> dict[str, str]:
    """Print the slow ranks at the end of a run; return them for the last line of metrics.jsonl."""
    if text := run.stragglers.conclusion():
        watch.say(f"train: {text}")
    return {"slow": text} if text else {}


def close(run: Run, watch: Silent, scores: Scores, seconds: float, cpu: float) -> None:
    """Report the end of the run after `seconds`, of which `cpu` seconds were CPU time."""
    own = isinstance(watch, Writer) or run.config.print_digest or run.step.sharded  # sharded: a collective of all ranks
    digest = weights_digest(run.model) if own else ""
    if run.config.print_digest:
        print(f"train: rank {run.world.rank} weights {digest}", flush=True)
    facts = {"cpu_seconds": round(cpu, 3), "step": run.global_step, "steps": run.total_steps, "digest": digest}
    facts |= report_stragglers(run, watch)
    conclude(watch, scores, run.progress.best, seconds, facts, f"; weights {digest[:16]}")


def conclude(
    watch: Silent, scores: Scores, best: float, seconds: float, facts: dict[str, Any], after: str = "", before: str = ""
) -> None:
    """Write the last line of metrics.jsonl, and print the last line, with `before` and `after` around the scores."""
    known = {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss, "best_top1": best}
    watch.end({**known, "seconds": round(seconds, 3), **facts})
    watch.say(
        f"train: done in {seconds:.1f} s; {before}val Acc@1 {scores.top1:.2f} (best {best:.2f}) "
        f"Acc@5 {scores.top5:.2f}{after}"
    )
