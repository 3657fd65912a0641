"""The trainer: one class, from the options to the last checkpoint.

Read from top to bottom: build a run, resume it, train it step by step (`train_step`, with `train.step` next to it),
validate, save. All ranks do the same; only rank 0 prints and writes, see `train.log`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from train import checkpoint, gradients, infiniband, loaded_code
from train.combinations import check
from train.config import Config, Every
from train.data import sampler
from train.data.batch import Batch, Request, Transfer, micro_batches
from train.data.contents import Contents
from train.data.decode import choose_decoder, compared
from train.data.loader import Loader
from train.data.open import is_synthetic, open_dataset
from train.data.policy import make_own_change, try_own_change
from train.data.repeat import Repeated
from train.distributed.agreement import agree, agree_on_options, start_alike
from train.distributed.methods import check_torch, device_count, make_step, make_store, method
from train.distributed.world import StopSignal, World
from train.errors import Stopped, TrainError
from train.evaluate import SHOWN, evaluate
from train.forecast import forecast
from train.foreign import about_model
from train.freeze import freeze, train_mode
from train.gradients import Cost
from train.hardware import device_name, ideal_seconds, node_name, peak_memory
from train.infiniband import Ports
from train.log import Interval, Validated, Writer, common_facts, conclude, make_log
from train.loss import draw_mix, try_loss
from train.metrics import NO_SCORES, Closed, Meter, Scores, check_finite
from train.models import (
    check_sides,
    configured_model,
    has_batch_norm,
    has_own_sync_batch_norm,
    parameter_count,
    without_gradient,
)
from train.own import is_own
from train.precision import choose_precision
from train.profile import tracing
from train.recompute import recompute_blocks
from train.schedule import make_schedule, momentum_at, scaled_for_sgd
from train.step import Plan
from train.stragglers import WINDOW, Stragglers
from train.timing import Clock, Figures
from train.weights import load_initial


@dataclass
class Progress:
    """The position of a run, which together with the options determines the rest of the run."""

    epoch: int = 0  # training epochs done
    step: int = 0  # steps done in the current epoch
    updates: int = 0  # steps applied: the schedule's position
    skipped: int = 0  # steps not applied because fp16 overflowed
    validated: int = 0  # epochs validated
    best: float = -1.0  # highest top-1 so far, percent
    # `counts` of all ranks: of this epoch's intervals, and of the steps since the last interval
    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    interval: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))


class Trainer:
    """A run on this rank: its parts, its position, and what is done with them."""

    def __init__(self, config: Config, world: World) -> None:
        """Open the data, build model, optimiser and schedule, and restore the checkpoint if there is one.

        Raises:
            TrainError: invalid options, data or checkpoint on this rank; nothing was overwritten.
            SystemExit: another rank raised TrainError.
        """
        self.config, self.world, self.progress = config, world, Progress()
        self.precision, self.method = choose_precision(config, world.device), method(config, world)
        amp, together = self.precision.name, world.all_ranks_or_exit
        local_sizes = world.gather(world.local_size)
        together(lambda: check(config, self.method, amp, local_sizes, world.device.type))
        together(lambda: check_torch(config, self.method))
        agree_on_options(config, world)
        self.log = make_log(config, world, self.precision.scaled)
        self.store = make_store(config, world, self.log.say)
        self.resumed = None if config.evaluate else self.store.find()

        # what follows is read from the node's disk and packages, which may differ between ranks
        # the decoder first: if torchvision is loaded before it, some of its wheels give it a libjpeg that it cannot use
        decoder = together(lambda: choose_decoder(config.decoder, self.log.say))
        self.dataset = together(lambda: open_dataset(config.data, config.image_size))
        self.model, self.config = together(self._make_model)
        if config.left_to_model:
            config = self.config
            agree_on_options(config, world)
            if is_synthetic(config.data):
                self.dataset = open_dataset(config.data, config.image_size)
        read_within = config.timeout if world.size > 1 else None
        contents = together(lambda: Contents.of(self.dataset, read_within))
        weights = "" if self.resumed else config.evaluate or config.pretrained
        if warning := agree(config, contents, weights, self.model, decoder.name, world):
            self.log.say(warning)
        if self.resumed is None and self.method != "ddp":  # which does so itself
            start_alike(self.model, world)
        self.images, self.decoder = contents.digest("train"), decoder.name  # of the training set
        self.code = loaded_code.loaded()

        own = config.batch_size, config.accumulate
        self.batches = world.gather(own) if world.sharded else [own]  # batch size and number of batches, by rank
        self.global_batch = together(self._count_images)
        self.epoch_steps = together(self._count_steps)
        gpu = device_name(world.device)
        self.ideal_seconds = {
            side: ideal_seconds(self.model, side, gpu, amp, config.tf32) for side in config.sides()
        }  # per image
        # an unsharded model may be too large for the device
        device = torch.device("cpu") if config.shards_weights else world.device
        self.model = self.precision.cast(together(lambda: _synchronised(self.model, config)), device)
        if config.checkpoint_activations:
            together(lambda: recompute_blocks(self.model, config.arch))
        self.nodes = world.gather(node_name())  # by rank
        self.step = together(lambda: make_step(config, world, self.precision, self.model))
        self.schedule = together(lambda: make_schedule(config, self.global_batch, self.total_steps))

        transfer = Transfer(world.device)
        loader = Loader(config, self.dataset.train, decoder, config.batch_size, world.core_sharers, transfer)
        self.train_loader = Repeated(loader) if config.headspace or is_synthetic(config.data) else loader
        val_batch = config.val_batch_size or config.batch_size
        self.val_loader = Loader(config, self.dataset.val, None, val_batch, world.core_sharers, transfer)

        self.meter: Meter[Interval] = Meter(world, bad=self.step.bad)
        self.clock = Clock(world.device, forward=not self.step.forward_waits)
        self.seconds, self.steps = 0.0, 0  # of the training steps of this process
        self.validations = 0  # of this process
        self.compiled, self.compiles = set[torch.Size](), False  # sizes of batches; whether this interval has a new one
        self.stragglers = Stragglers(self.nodes if world.sharded else [])  # model stages have unequal work
        self.ports = Ports("nccl" in world.backend and world.local_rank == 0 and world.local_size < world.size)
        if self.resumed:
            self.resumed = self._restore(self.resumed)

    # Positions and sizes.

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.epochs * self.epoch_steps

    @property
    def global_step(self) -> int:
        """Steps done so far in the whole run."""
        return self.progress.epoch * self.epoch_steps + self.progress.step

    # The run.

    def train(self, stop: StopSignal) -> None:
        """Train according to the options, from scratch or from the checkpoint that was restored.

        Raises:
            TrainError: the loss is not finite, images cannot be read, or the checkpoint folder cannot be written.
            Stopped: SIGTERM arrived; the checkpoint is on disk.
        """
        self._announce()
        if self.config.evaluate:
            self._evaluate_only(stop)
            return
        progress, epochs = self.progress, self.config.epochs
        self.store.open()
        if progress.validated >= epochs:
            done = f"{progress.validated} epochs of {epochs} are done"
            self.log.say(f"train: nothing to do: {done}; raise --epochs to continue")
            return
        if self.resumed and not self.store.take_best(self.resumed, progress.best):
            self.log.say(f"train: best.pt of top-1 {progress.best:.2f} % is not here; the next validation makes one")
            progress.best = -1.0
        if not is_own(self.config.optimizer):
            self._forecast()
        self.log.begin(self._facts(), purge_step=self.global_step + 1 if self.resumed else None)
        started, worked = time.perf_counter(), time.process_time()
        scores = NO_SCORES
        try:
            self._supersede()
            while progress.validated < epochs:
                if progress.validated == progress.epoch:
                    self._train_epoch(stop)
                scores = self._finish_epoch(stop) or scores
        except Stopped:
            self._end_stopped()
            self.store.end_mirror()
            raise
        except TrainError as error:
            self.log.end({"error": str(error), "step": self.global_step, "steps": self.total_steps})
            raise
        finally:
            self.close()
        stop.settle()
        self._end(scores, time.perf_counter() - started, time.process_time() - worked)
        self.store.end_mirror()

    def _train_epoch(self, stop: StopSignal) -> None:
        """Train the rest of the current epoch.

        Raises:
            Stopped: between two steps; `progress` has the position.
        """
        config, progress, begun = self.config, self.progress, self.progress.step
        train_mode(self.model, config.freeze)
        self.meter = Meter(self.world, progress.sums, progress.interval, self.step.bad)
        self.clock.restart()
        every, trace = Every(config.checkpoint_every), tracing(config, self.world, progress.epoch)
        started = time.perf_counter()
        if config.compile and not self.steps:
            self._say_compiling("the first step")
        batches = self._rehearsed(self.load())
        while progress.step < self.epoch_steps:
            agreed = stop.agreed(save=self.world.first and every.time_is_up())
            due = agreed.save or every.steps_done(self.global_step)
            if agreed.stop or (due and progress.step > begun):
                self._keep_sums()
                if agreed.stop:
                    raise Stopped
                self.save()
            rate = self.train_step(micro_batches(batches))
            if self.steps == 1 and is_own(config.optimizer):  # its state is known only now
                self._forecast()
            if self.steps == 1 and config.compile:
                self.log.say(f"train: the first step took {time.perf_counter() - started:.1f} s, with compiling")
            trace.step()
            self.log.stepped(progress.epoch + 1, config.epochs, self.global_step, self.total_steps)
            if progress.step % config.log_every == 0 or progress.step == self.epoch_steps:
                self.end_interval(rate)
        self._report(self.meter.flush())
        trace.close()
        progress.sums, progress.interval = self.meter.epoch, self.meter.interval
        progress.epoch, progress.step = progress.epoch + 1, 0

    def train_step(self, batches: Iterable[Batch]) -> float:
        """Update the weights once, with the micro-batches of one step; return the learning rate.

        Gradients are added up over the micro-batches, and reduced over the ranks with the last one. torch is seeded
        for this step, so that dropout is the same after a resume.
        """
        config, progress, step = self.config, self.progress, self.step
        seed = sampler.fold(config.seed, progress.epoch, progress.step)
        torch.manual_seed(sampler.fold(seed, self.world.rank))
        update = progress.updates
        plan = Plan(
            rate=self.schedule(update),
            update=update,
            mix=draw_mix(config, seed, config.side(progress.epoch)),
            momentum=momentum_at(config, update, self.total_steps),
        )
        for number, batch in enumerate(batches):
            if progress.epoch == progress.step == number == 0:  # later ones may be empty
                self.log.images("Images/augmented", batch.images[:SHOWN].cpu().numpy(), 0)
            if config.compile and batch.images.shape not in self.compiled:
                self.compiled.add(batch.images.shape)
                self.compiles = True
            step.sync(batch.last)
            output = step.forward(batch, plan)
            self.clock.computed()
            step.backward(output)
            self.meter.add(output.counts)
        self.clock.images += batch.total
        self.steps += 1
        if step.update(plan):
            progress.updates += 1
        else:
            progress.skipped += 1
            scale = step.scale.value
            self.log.say(f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}")
        progress.step += 1
        return plan.rate

    def load(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches for the rest of the epoch."""
        return self.clock.timed(self.train_loader.batches(self._requests(), self.progress.epoch))

    def _rehearsed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches; before the first step of a process, rehearse with the first one, which is not timed."""
        if not self.step.to_rehearse:
            return batches
        first = next(batches)
        self.step.rehearse(first)
        self.clock.restart()
        return chain([first], batches)

    def _requests(self) -> Iterator[Request]:
        """Yield what to load for each micro-batch: per step the same number on every rank, and at least one.

        Otherwise synchronised batch norm would wait forever. The last one may be empty or consist of fillers.
        """
        config, world, progress, smallest = self.config, self.world, self.progress, self._smallest_batch()
        images, sizes = len(self.dataset.train.labels), [size * batches for size, batches in self.batches]
        permutation = sampler.order(config.seed, progress.epoch, images, config.repeats, self.global_batch)
        for step in range(progress.step, self.epoch_steps):
            shares = sampler.training_batch(permutation, step, self.global_batch, sizes)
            total, mine = sum(map(len, shares)), shares[world.shard]
            count = max(-(-len(share) // size) for share, (size, _) in zip(shares, self.batches, strict=True))
            for number in range(count):
                piece = mine[number * config.batch_size : (number + 1) * config.batch_size]
                filler = max(0, smallest - len(piece))
                yield Request(np.concatenate([piece, permutation[:filler]]), total, filler, number == count - 1)

    def _smallest_batch(self) -> int:
        """Return the size to which a rank's batch is padded with samples of weight 0.

        Batch norm rejects a single value per channel. Our synchronised layers accept an empty batch and must not see
        fillers; torch's accept a single value, but no empty batch with autocast.
        """
        if has_own_sync_batch_norm(self.model):
            return 0
        return 2 if has_batch_norm(self.model) and self.config.syncbn == "none" else 1

    def _finish_epoch(self, stop: StopSignal) -> Scores | None:
        """Validate if due, report and save a checkpoint after an epoch of training."""
        progress, config = self.progress, self.config
        scores, best = None, False
        if progress.epoch % config.val_interval == 0 or progress.epoch == config.epochs:
            start = time.perf_counter()
            scores = self.validate(stop)
            seconds = time.perf_counter() - start
            train = Scores.of(progress.sums)
            memory = self.world.max(peak_memory(self.world.device))
            skipped = self.train_loader.skipped() + self.val_loader.skipped()
            skipped = int(self.world.sum(torch.tensor([skipped])))
            at = progress.epoch, config.epochs, self.global_step
            self.log.validated(Validated(*at, train, scores, seconds, memory, skipped))
            best = scores.top1 > progress.best
            progress.best = max(scores.top1, progress.best)
        progress.validated = progress.epoch
        progress.sums = torch.zeros_like(progress.sums)
        self.save(best, progress.epoch)
        return scores

    def validate(self, stop: StopSignal) -> Scores:
        """Validate all images, each exactly once on any number of ranks.

        Raises:
            TrainError: the loss is not finite.
            Stopped: SIGTERM arrived.
        """
        report = partial(self.log.validating, self.progress.epoch)
        loader, objective = self.val_loader, self.step.objective
        if self.config.compile and not self.validations:
            self._say_compiling("the first validation")
        self.validations += 1
        with self.step.averaged() as model:
            sums, mistaken = evaluate(model, loader, objective, self.world, stop.stopped, report)
        self._check_loss(sums, "validation")
        if len(mistaken):
            self.log.images("Images/misclassified", mistaken, self.global_step)
        return Scores.of(sums)

    def _evaluate_only(self, stop: StopSignal) -> None:
        """Validate the weights of --evaluate; print the result and write it to the last line of metrics.jsonl."""
        self.log.begin(self._facts(), None)
        started = time.perf_counter()
        if self.config.compile:
            self._say_compiling("validation")
        try:
            with self.step.averaged() as model:
                sums, _ = evaluate(model, self.val_loader, self.step.objective, self.world, stop.stopped)
        finally:
            self.close()
        stop.settle()
        scores, file = Scores.of(sums), self.config.evaluate
        self.log.end({"evaluated": file, **asdict(scores)})
        self.log.say(
            f"train: {file}: val Loss {scores.loss:.4f} Acc@1 {scores.top1:.2f} Acc@5 {scores.top5:.2f} "
            f"({scores.images} images, {time.perf_counter() - started:.1f} s)"
        )

    # Checkpoints.

    def save(self, best: bool = False, epoch: int | None = None) -> None:
        """Start writing a checkpoint of the current state; every rank must call it.

        Raises:
            OSError: the previous checkpoint could not be written.
        """
        self.log.flush()
        self.step.before_checkpoint()
        self.store.save(self.state, best, epoch)

    def state(self) -> checkpoint.State:
        """Return the content of a checkpoint."""
        return {
            "format": checkpoint.FORMAT,
            "run": checkpoint.run_id(),
            "generation": self.world.generation,
            "arch": self.config.arch,
            "classes": list(self.dataset.classes),
            "identity": self._identity(),
            "config": self.config.to_dict(),
            "code": self.code,
            "progress": vars(self.progress),
            **self.step.state(),
        }

    def _identity(self) -> dict[str, Any]:
        """Return the values that determine the sample order, to be compared when resuming within an epoch."""
        order = {name: getattr(self.config, name) for name in ("seed", "last_batch", "repeats")}
        data = {"data": self.images.names, "sizes": self.images.sizes}
        return order | {"global_batch": self.global_batch, "images": len(self.dataset.train.labels)} | data

    def _restore(self, found: checkpoint.Loaded) -> checkpoint.Loaded:
        """Restore the checkpoint, or the one before it if it has inf or nan; return it without its large state.

        Raises:
            TrainError: see `_resume` and `Store.earlier`.
        """
        while True:
            self.world.all_ranks_or_exit(partial(self._resume, found))
            bad = [name for name in self.world.gather(self.step.not_finite()) if name]
            if not bad or self.config.allow_nan:
                return replace(found, state={})
            found = self.store.earlier(found, f"inf or nan in {bad[0]}")

    def _resume(self, found: checkpoint.Loaded) -> None:
        """Restore a checkpoint. Raises TrainError if options that must not change have changed."""
        found.load_model(self.config.arch, self.dataset.classes, self.model)
        state, progress = found.state, Progress(**found.state["progress"])
        if changed := changes(state["identity"], self._identity()):
            if progress.step:
                raise TrainError(
                    f"{found.path} was saved within an epoch, and the order of images has changed since: "
                    f"{', '.join(changed)}"
                )
            # between epochs this is fine: the schedule continues at the same share of the run
            self.log.say(f"train: changed since {found.path} was saved: {', '.join(changed)}")
            progress.updates = progress.epoch * self.epoch_steps
        if files := loaded_code.changed(self.code, state.get("code", {})):
            self.log.say(f"train: changed since {found.path} was saved: the code of {files}")
        # other settings may change, but these determine the parameter groups
        for name in ("optimizer", "decay", "no_decay", "layer_decay", "freeze"):
            saved, here = state["config"].get(name, getattr(Config, name)), getattr(self.config, name)
            if saved != here:
                option = f"--{name.replace('_', '-')}"
                hint = "; to train other parts of these weights, use --pretrained" if name == "freeze" else ""
                raise TrainError(
                    f"{found.path} was saved with {option} {saved or 'unset'}, not {here or 'unset'}; use the same "
                    f"value{hint}"
                )
        try:
            self.step.load_state(state)
        except TrainError as error:
            raise TrainError(f"{found.path}: {error}") from error
        if unused := self.step.unused(state):
            self.log.say(f"train: {found.path}: {unused}")
        self.progress = progress

    def _supersede(self) -> None:
        """Save before the first step of a new generation, so that checkpoints of older generations are never loaded."""
        if self.world.generation:
            self.save()
            self.store.wait()
            self.world.sum(torch.zeros(1))  # wait until all nodes have written it

    def _keep_sums(self) -> None:
        """Store the meter's sums for a checkpoint within an epoch."""
        self._report(self.meter.flush())
        self.meter.reduce()
        self._check_loss(self.meter.interval, f"step {self.progress.step}")
        self.progress.sums, self.progress.interval = self.meter.epoch, self.meter.interval

    # Reports.

    def _announce(self) -> None:
        """Print the lines before the first step."""
        config, data, resumed = self.config, self.dataset, self.resumed
        self.log.say(
            f"train: {config.arch}, {parameter_count(self.model):,} parameters; {len(data.classes)} classes, "
            f"{len(data.train.labels):,} images to train on, {len(data.val.labels):,} to validate on; "
            f"global batch {self.global_batch}{self._parts()}, {self.total_steps:,} steps, amp {self.precision.name}, "
            f"decoder {compared(self.decoder)}"
        )
        if warning := scaled_for_sgd(config, self.global_batch):
            self.log.say(f"train: {warning}")
        if self.step.compiled:
            self.log.say(f"train: --compile: {self.step.compiled}")
        if config.powersgd_rank and self.world.device.type == "cuda":
            self.log.say(
                f"train: --gradient-compression {config.gradient_compression} waits for the GPU at each bucket of "
                f"gradients: it is for links that take longer than that"
            )
        if resumed:
            if resumed.damaged:
                self.log.say(f"train: {resumed.damaged}; using another checkpoint")
            origin = f" of {resumed.origin}" if resumed.origin else ""
            where = f"epoch {self.progress.epoch + 1}, step {self.progress.step}"
            self.log.say(f"train: resumed {resumed.path}{origin} at {where}")

    def _say_compiling(self, what: str) -> None:
        """Print what takes long without another line."""
        self.log.say(
            f"train: compiling for {what} (--compile-mode {self.config.compile_mode}), which takes minutes if it is "
            f"not in the compiler's cache"
        )

    def _forecast(self) -> None:
        """Print the space that the checkpoints will take."""
        left = self.config.epochs - self.progress.validated
        self.log.say(forecast(self.config, self.world, self.model, self.step, left))

    def _parts(self) -> str:
        """Return the parts of the global batch by rank, if they differ."""
        sizes = [str(size * batches) for size, batches in self.batches]
        return f" ({' + '.join(sizes)})" if len(set(sizes)) > 1 else ""

    def _facts(self) -> dict[str, object]:
        """Return the content of the first line of metrics.jsonl."""
        config, world, progress = self.config, self.world, self.progress
        return {
            **common_facts(config, world, self.precision.name),
            "world": world.size,
            "devices": device_count(config, world),
            "parallel": self.method,
            "decoder": self.decoder,
            "global_batch": self.global_batch,
            "step": self.global_step,
            "validated": progress.step > 0 or progress.validated == progress.epoch,  # if this step ends an epoch
            "steps": self.total_steps,
        }

    def end_interval(self, rate: float) -> None:
        """End an interval, at learning rate `rate`; it is reported once the device has computed it."""
        config, progress, world = self.config, self.progress, self.world
        if progress.step == self.epoch_steps:
            self.meter.wait()  # validation would wait anyway; images/s then covers all work of the interval
        took = self.clock.restart(self.ports.check())
        self.seconds += took.seconds
        ideal = self.ideal_seconds[config.side(progress.epoch)]
        now = Interval(
            epoch=progress.epoch + 1,
            epochs=config.epochs,
            step=self.global_step,
            steps=self.total_steps,
            epoch_step=progress.step,
            epoch_steps=self.epoch_steps,
            seconds=took.seconds,
            lr=rate,
            images_per_s=took.images_per_s,
            mfu=ideal and min(took.images_per_s * ideal / device_count(config, world), 1.0),
            loss_scale=self.step.scale.value,
            skipped=progress.skipped,
            compiled=self.compiles,
        )
        self.compiles = False
        self._report(self.meter.close(now, took))

    def _report(self, closed: Closed[Interval] | None) -> None:
        """Report an interval, if there is one: on a GPU the one before, whose values have arrived."""
        if closed is None:
            return
        then, stragglers = closed.what, self.stragglers
        self._check_loss(closed.sums, f"step {then.epoch_step}")
        ranks, before = [Figures(*own) for own in closed.figures.tolist()], stragglers.now
        stragglers.add([own.work for own in ranks], then.seconds)
        slow = stragglers.name(stragglers.now) if stragglers.now else ""
        if stragglers.now and (before is None or before.rank != stragglers.now.rank):
            self.log.say(f"train: {slow}, in the last {WINDOW} intervals")
        if warning := infiniband.warning(self.nodes, [own.ports for own in ranks]):
            self.log.say(f"train: {warning}")
        wait = min(sum(own.waited for own in ranks) / (then.seconds * self.world.size), 1.0)
        scores, so_far = Scores.of(closed.sums), Scores.of(self.meter.epoch)
        self.log.progress(
            replace(then, interval=scores, so_far=so_far, data_wait=wait, slowest=stragglers.last, slow=slow)
        )

    def _check_loss(self, sums: Tensor, where: str) -> None:
        """Stop all ranks if the loss or a gradient is inf or nan. All have the same sums, so all decide the same.

        Called before every checkpoint. If the loss scale can still be halved, training continues: steps are skipped.
        """
        validated = where == "validation"
        skipped = self.step.scale.value > 1 and not validated
        if not (self.config.allow_nan or skipped or (sums.isfinite().all() and not self.meter.bad)):
            at = f"epoch {self.progress.epoch + (not validated)}, {where}"
            self.world.all_ranks_or_exit(lambda: check_finite(Scores.of(sums), at, self.meter.bad))

    def _end_stopped(self) -> None:
        """Save, and report that the run was stopped."""
        self.save()
        self.store.close()
        self.world.sum(torch.zeros(1))  # no rank exits before the file is written, or torchrun would kill the others
        where = f"epoch {self.progress.epoch + 1}, step {self.progress.step}"
        slow = self._report_stragglers()
        self.log.say(f"train: stopped at {where}; the checkpoint is saved")
        self.log.end({"stopped": True, "step": self.global_step, "steps": self.total_steps, **slow})

    def _end(self, scores: Scores, seconds: float, cpu: float) -> None:
        """Report the end of the run after `seconds`, of which `cpu` seconds were CPU time."""
        # a digest of sharded weights is a collective of all ranks
        own = isinstance(self.log, Writer) or self.config.print_digest or self.step.sharded
        digest = checkpoint.weights_digest(self.model) if own else ""
        if self.config.print_digest:
            print(f"train: rank {self.world.rank} weights {digest}", flush=True)
        facts = {"cpu_seconds": round(cpu, 3), "step": self.global_step, "steps": self.total_steps, "digest": digest}
        facts |= self._report_stragglers() | self._report_gradients()
        conclude(self.log, scores, self.progress.best, seconds, facts, f"; weights {digest[:16]}")

    def _report_stragglers(self) -> dict[str, str]:
        """Print the slow ranks at the end of a run; return them for the last line of metrics.jsonl."""
        if text := self.stragglers.conclusion():
            self.log.say(f"train: {text}")
        return {"slow": text} if text else {}

    def _report_gradients(self) -> dict[str, Any]:
        """Print what the gradients have cost on several nodes; return it for the last line of metrics.jsonl.

        Of the rank that waited least for the others: that is the network.
        """
        world, known = self.world, self.step.gradient_seconds()
        if world.local_size == world.size or known is None or not self.steps:
            return {}
        ranks = world.gather((known, world.local_rank))
        cost = Cost(min(seconds for seconds, _ in ranks), self.seconds / self.steps)
        nodes = sum(local == 0 for _, local in ranks)
        self.log.say(f"train: {gradients.conclusion(cost, nodes, self.config, self.precision.name)}")
        return {"gradients": asdict(cost)}

    def close(self) -> None:
        """Stop the threads of the loaders, and of the store once it has written the last checkpoint."""
        self.train_loader.close()
        self.val_loader.close()
        self.store.close()

    # Parts that can be invalid.

    def _make_model(self) -> tuple[nn.Module, Config]:
        """Build the model, with the weights of --evaluate or --pretrained, and check its shapes and gradients.

        Also return the options, with those that are left to the model.
        """
        classes, say = self.dataset.classes, self.log.say
        if is_own(self.config.loss):
            try_loss(self.config.loss, len(classes), getattr(torch, self.config.dtype), self.world.device)
        model = configured_model(self.config, len(classes))
        config = self.config.settled(about_model(model))
        if (change := make_own_change(config)) and not config.evaluate:
            say(try_own_change(change, config.image_size))
        on_device = partial(self.precision.trial, device=self.world.device)
        if warning := check_sides(model, config.arch, config.sides(), len(classes), on_device):
            say(warning)
        if config.freeze and not config.evaluate:
            say(freeze(model, config.freeze))
        if not config.evaluate and (names := without_gradient(model, config.image_size)):
            found = f"--arch {config.arch}: no gradient for {', '.join(names[:3])}" + (", ..." if names[3:] else "")
            if self.method == "ddp" and not config.static_graph:
                raise TrainError(
                    f"{found}, which its forward pass does not use, and DDP needs the gradient of each; set "
                    f"requires_grad to False in the model, or use --static-graph"
                )
            say(f"train: warning: {found}: the forward pass does not use it")
        if self.resumed is None and (file := config.evaluate or config.pretrained):
            load_initial(file, model, classes, evaluating=bool(config.evaluate), say=say)
        return model, config

    def _count_images(self) -> int:
        """Return the images per step on all ranks; a smaller world than the job's uses more micro-batches.

        Raises:
            TrainError: ranks are missing, and those here have different batches, so the others' are unknown.
        """
        sizes, missing = [size * batches for size, batches in self.batches], self.world.full_size - len(self.batches)
        if missing <= 0:
            return sum(sizes)
        if len(set(sizes)) == 1:
            return sizes[0] * self.world.full_size
        if self.resumed:
            return int(self.resumed.state["identity"]["global_batch"])
        raise TrainError(
            f"{missing} of {self.world.full_size} processes are missing, and machines have different batch sizes, so "
            f"the global batch is unknown before the first checkpoint; start again with all machines"
        )

    def _count_steps(self) -> int:
        """Return the steps per epoch. Raises TrainError if there is not one."""
        config, processes = self.config, self.world.size
        batch, images = self.global_batch, len(self.dataset.train.labels)
        if config.evaluate:
            return 1  # nothing is trained
        if batch > images:
            times = f" x {config.accumulate} accumulated" if config.accumulate > 1 else ""
            raise TrainError(
                f"--batch-size {config.batch_size}{times} on {processes} process{'es' * (processes > 1)} "
                f"is {batch} images per step, but the training set has only {images}; "
                f"use a batch size of {max(1, config.batch_size * images // batch)} or less"
            )
        return sampler.steps_per_epoch(images, batch, config.last_batch == "keep")


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between a checkpoint's identity, which may lack newer keys, and this run's."""
    texts = {"data": "other images (names, order or classes)", "sizes": "images of other sizes"}
    changed = [key for key, value in before.items() if value != now[key]]
    if "sizes" in changed and not (before["sizes"] and now["sizes"]):  # another format of the same data set
        changed.remove("sizes")
    return [texts.get(key, f"{key} {before[key]} -> {now[key]}") for key in changed]


def _synchronised(model: nn.Module, config: Config) -> nn.Module:
    """Replace batch norm as --syncbn says. Raises TrainError if the model has a layer for which that is impossible."""
    if config.syncbn == "none":
        return model
    from train.experiments import syncbn

    return syncbn.convert(model) if config.syncbn == "custom" else syncbn.convert_by_library(model)
