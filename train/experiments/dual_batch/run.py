"""A dual-batch run: rank 0 serves, validates after every round and writes the files; the other ranks are workers."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from train import checkpoint, loaded_code
from train.combinations import check
from train.config import Config
from train.data.batch import Transfer
from train.data.contents import Contents
from train.data.loader import Loader
from train.data.open import open_dataset
from train.data.source import Dataset
from train.deadline import exit_after_sigterm
from train.distributed.agreement import shared_options
from train.distributed.world import World, choose_device
from train.errors import Stopped, TrainError, alike_on_a_machine
from train.evaluate import evaluate
from train.experiments.dual_batch.guard import die_with_guard
from train.experiments.dual_batch.network import Remote, disconnect, join, reported_lost, serve, store
from train.experiments.dual_batch.options import device_index, plan_of
from train.experiments.dual_batch.plan import DualBatchPlan
from train.experiments.dual_batch.server import ParameterServer, Rates, State
from train.experiments.dual_batch.worker import work
from train.foreach import first_not_finite
from train.foreign import about_model
from train.hardware import peak_memory
from train.log import Interval, Validated, Writer, common_facts, conclude
from train.metrics import Scores, check_finite
from train.models import check_sides, configured_model, parameter_count, statistics
from train.precision import Precision, choose_precision
from train.schedule import peak_rate
from train.step import Objective
from train.store import Files

HEARTBEAT_TIMEOUT = 30.0  # seconds without a heartbeat until a worker counts as lost; at most --timeout
POLL = 1.0  # seconds between checks for lost workers


def run(config: Config) -> None:
    """Run one process, started by torchrun or with its environment variables.

    Raises:
        TrainError: invalid options, data or checkpoint, or all workers are lost.
        Stopped: SIGTERM arrived; the checkpoint is on disk.
    """
    die_with_guard()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if config.threads:
        torch.set_num_threads(config.threads)
    with alike_on_a_machine():
        device = choose_device(config, *device_index(rank, local_rank, local_size))
        world = World(0, 1, local_rank, local_size, device, "none", core_sharers=local_size)
        check(config, "dual_batch", choose_precision(config, world.device).name, [1] * size, world.device.type)
        dataset = open_dataset(config.data)
        plan = plan_of(config, size - 1, len(dataset.train.labels))
    stop, saving = threading.Event(), threading.Event()
    # also while this process waits for the others to join
    with exit_after_sigterm(f"rank {rank} on {socket.gethostname()}", stop.set, saving):
        if rank == 0:
            Server(config, world, dataset, plan, stop, saving).run(size)
            return
        join(rank, size)
        remote = Remote(rank - 1, config.timeout)
        remote.agree(config, Contents.of(dataset, config.timeout))
        remote.start_heartbeats()
        work(config, world, plan.shares[rank - 1], remote, stop)
        disconnect()


class Server:
    """Rank 0: holds the weights, writes the files and prints. A round has as many local epochs as there are workers."""

    def __init__(
        self,
        config: Config,
        world: World,
        dataset: Dataset,
        plan: DualBatchPlan,
        stop: threading.Event,
        saving: threading.Event,
    ) -> None:
        """`stop`: set on SIGTERM; `saving`: will be set when it stops for that."""
        self._world, self._dataset, self._plan, self._stop = world, dataset, plan, stop
        self._saving, self._options = saving, shared_options(config, sharded=False)
        self._precision: Precision = choose_precision(config, world.device)
        self._model = configured_model(config, len(dataset.classes))
        self._config = config = config.settled(about_model(self._model))
        on_device = partial(self._precision.trial, device=world.device)
        warning = check_sides(self._model, config.arch, config.sides(), len(dataset.classes), on_device)
        self._watch = Writer(Path(config.output), amp=False)
        self._folder, self._code = config.checkpoint_folder, loaded_code.loaded()
        self._checkpoints = Files(config, world)
        self._found = self._checkpoints.find()
        workers = len(plan.shares)
        self._total, done = config.epochs * workers, 0
        self._best = -1.0
        if self._found:
            self._found, done = self._resume(self._found)
        self._model = self._precision.cast(self._model, world.device)
        drops = tuple(round(share * config.epochs) * workers for share in config.milestones)
        rates = Rates(peak_rate(config, config.batch_size), config.gamma, drops)
        weights = {name: value.detach().cpu() for name, value in self._model.state_dict().items()}
        self._first = done
        self._server = ParameterServer(
            weights,
            plan.shares,
            total=self._total,
            rates=rates,
            merge=config.dual_merge,
            staleness=config.dual_staleness,
            done=self._first,
            variant=config.dual_variant,
        )
        size = config.val_batch_size or max(config.batch_size, 32)
        self._val_loader = Loader(config, dataset.val, None, size, world.core_sharers, Transfer(world.device))
        self._rates = rates
        self._reported: set[int] = set()
        self._since = 0.0  # time of the last read of the sums of local epochs
        if warning:
            self._watch.say(warning)
        self._checkpoints.open()
        if self._found and not self._checkpoints.take_best(self._found, self._best):
            self._watch.say(f"train: best.pt of top-1 {self._best:.2f} % is not here; the next validation makes one")
            self._best = -1.0

    def run(self, size: int) -> None:
        """Serve until all local epochs are finished.

        Raises:
            TrainError: all workers are lost.
            Stopped: SIGTERM arrived; the finished local epochs are saved.
        """
        self._announce()
        serve(self._server, Contents.of(self._dataset, self._config.timeout), self._options)
        join(0, size)
        self._store = store()
        self._server.all_joined()
        self._since = started = time.perf_counter()  # the workers start now, while this process opens its files
        self._watch.begin(self._facts(size), self._steps(self._first) + 1 if self._found else None)
        scores = Scores(0.0, 0.0, 0.0, 0)
        try:
            workers = len(self._plan.shares)
            done = self._first
            while done < self._total:
                self._await((done // workers + 1) * workers)
                done, scores = self._finish_round()
        except Stopped:
            self._saving.set()
            self._server.close()
            now = self._server.state()
            self._save(now, best=False)
            self._checkpoints.close()  # before the workers leave, which takes as long as their local epochs
            self._watch.say(f"train: stopped after {now.merged} local epochs; the checkpoint is saved")
            self._watch.end({"stopped": True, "step": self._steps(now.merged)})
            self._wait_until_workers_left()
            raise
        except TrainError:  # all workers are lost, or the training diverged
            self._server.close()
            self._wait_until_workers_left()
            disconnect()
            raise
        finally:
            self._val_loader.close()
        self._wait_until_workers_left()
        self._checkpoints.close()
        finished = self._server.finished
        lost = [{"rank": worker + 1, "why": why} for worker, why in self._server.lost.items()]
        facts = {"granted": self._server.granted, "finished": finished, "lost": lost, "step": self._steps(self._total)}
        done_so_far = f"{finished} local epochs, {len(lost)} workers lost; "
        conclude(self._watch, scores, self._best, time.perf_counter() - started, facts, before=done_so_far)
        disconnect()

    def _announce(self) -> None:
        shares = "; ".join(
            f"rank {rank}: {share.samples:,} samples in {'small' if share.small else 'large'} batches of "
            f"{share.batch}, factor {share.factor:.4g}"
            for rank, share in enumerate(self._plan.shares, 1)
        )
        self._watch.say(
            f"train: {self._config.arch}, {parameter_count(self._model):,} parameters; parameter server with "
            f"{len(self._plan.shares)} workers, {self._config.dual_merge}, {self._total} local epochs; {shares}"
        )
        if self._found:
            if self._found.damaged:
                self._watch.say(f"train: {self._found.damaged}; using another checkpoint")
            self._watch.say(f"train: resumed {self._found.path} after {self._first} local epochs")

    def _facts(self, size: int) -> dict[str, object]:
        return {
            **common_facts(self._config, self._world, self._precision.name),
            "world": size,
            "devices": size - 1,
            "parallel": "dual_batch",
            "backend": "rpc",
            "global_batch": sum(share.batch for share in self._plan.shares),
            "step": self._steps(self._first),
            "steps": self._steps(self._total),
            "plan": self._plan.to_dict(),
        }

    def _await(self, goal: int) -> None:
        """Wait until `goal` local epochs are finished, and check for lost workers."""
        limit = min(HEARTBEAT_TIMEOUT, self._config.timeout)
        reached = False
        while not reached:
            reached = self._server.wait_for(goal, POLL)
            self._check_workers(limit)
            # also where a round takes less than POLL, and where the workers were stopped first
            if self._stop.is_set() or (self._server.finished < goal and self._server.all_stopped):
                raise Stopped
        if self._server.finished < goal:
            why = "; ".join(f"rank {worker + 1}: {why}" for worker, why in self._server.lost.items())
            raise TrainError(f"all workers are lost: {why or 'they left'}; the last checkpoint is in {self._folder}")

    def _check_workers(self, limit: float) -> None:
        for worker in range(len(self._plan.shares)):
            if worker not in self._reported and (why := reported_lost(self._store, worker + 1)):
                self._server.lose(worker, why)
        for worker in self._server.silent(limit):
            self._server.lose(worker, f"no heartbeat for {limit:.0f} s: killed, hung or disconnected")
        for worker, why in self._server.lost.items():
            if worker not in self._reported:
                self._reported.add(worker)
                self._watch.say(f"train: rank {worker + 1} is lost ({why}); the other workers take over its share")

    def _wait_until_workers_left(self) -> None:
        """Wait until every worker has left or is lost."""
        limit = min(HEARTBEAT_TIMEOUT, self._config.timeout)
        while not self._server.wait_empty(POLL):
            self._check_workers(limit)
        self._check_workers(limit)  # report workers lost at the very end

    def _finish_round(self) -> tuple[int, Scores]:
        """Validate, report and save the current state, which may be past the round's end: workers do not wait."""
        state, start = self._server.state(), time.perf_counter()
        finished, seconds, self._since = state.finished, start - self._since, start
        self._model.load_state_dict(state.weights)
        objective = Objective(self._config, self._precision, self._world)
        scores = Scores.of(evaluate(self._model, self._val_loader, objective, self._world)[0])
        train = Scores.of(state.sums)
        epoch = finished // len(self._plan.shares)
        if not self._config.allow_nan:
            check_finite(scores, f"round {epoch}, validation")
        self._watch.progress(self._interval(epoch, train, seconds))
        steps, took, memory = self._steps(finished), time.perf_counter() - start, peak_memory(self._world.device)
        self._watch.validated(Validated(epoch, self._config.epochs, steps, train, scores, took, memory))
        best, self._best = scores.top1 > self._best, max(scores.top1, self._best)
        self._save(state, best)
        return finished, scores

    def _interval(self, epoch: int, train: Scores, seconds: float) -> Interval:
        steps = self._steps(len(self._plan.shares))
        return Interval(
            epoch=epoch,
            epochs=self._config.epochs,
            step=epoch * steps,
            steps=self._config.epochs * steps,
            epoch_step=steps,
            epoch_steps=steps,
            seconds=seconds,
            lr=self._rates(max(epoch * len(self._plan.shares) - 1, 0)),
            images_per_s=train.images / max(seconds, 1e-9),
            mfu=None,
            loss_scale=1.0,
            skipped=0,
            interval=train,
            so_far=train,
        )

    def _steps(self, local_epochs: int) -> int:
        """Return steps for TensorBoard: a round counts as the mean number of steps of a worker."""
        each = [-(-share.samples // share.batch) for share in self._plan.shares]
        return local_epochs // len(each) * max(1, sum(each) // len(each))

    def _save(self, now: State, best: bool) -> None:
        workers = len(self._plan.shares)
        state: checkpoint.State = {
            "format": checkpoint.FORMAT,
            "arch": self._config.arch,
            "classes": list(self._dataset.classes),
            "config": self._config.to_dict(),
            "code": self._code,
            "dual_batch": {"finished": now.merged, "workers": workers, "best": self._best},
            "model": now.weights,
        }
        self._checkpoints.save(lambda: state, best, now.finished // workers)

    def _resume(self, found: checkpoint.Loaded) -> tuple[checkpoint.Loaded, int]:
        """Load the checkpoint, or the one before it if it has inf or nan; return it without state, and the position.

        If the number of workers, and so of local epochs per round, has changed, the run resumes at a whole round.
        """
        while True:
            found.load_model(self._config.arch, self._dataset.classes, self._model, "dual_batch")
            bad = first_not_finite([*self._model.named_parameters(), *statistics(self._model).items()])
            if not bad or self._config.allow_nan:
                break
            found = self._checkpoints.earlier(found, f"inf or nan in {bad}")
        if files := loaded_code.changed(self._code, found.state.get("code", {})):
            self._watch.say(f"train: changed since {found.path} was saved: the code of {files}")
        progress, workers = found.state["dual_batch"], len(self._plan.shares)
        self._best, done = float(progress["best"]), progress["finished"]
        return replace(found, state={}), done if progress["workers"] == workers else done // progress[
            "workers"
        ] * workers
