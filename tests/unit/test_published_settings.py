"""The jobs of the experiments have the settings that were published with them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import yaml

from bench.syncbn import BATCHES, CHANNELS
from launcher.job.models import Job
from launcher.job.scalars import argv_of
from tests.unit.published import DIFFERENT, MAIN_JOB, OURS, PUBLISHED
from tests.unit.test_jobs_train import JOBS, REPOSITORY
from train.config import Config, parse
from train.data.sampler import steps_per_epoch, validation_share
from train.dual_batch.options import device_index, plan_of
from train.schedule import make_schedule, momentum_at, peak_rate

IMAGENET, CIFAR = 1_281_167, 50_000


def jobs(name: str) -> list[Job]:
    """The job of each run of the sweep."""
    return [JOBS[found] for index in range(20) if (found := f"{name}-{index}") in JOBS]


def runs(name: str) -> Iterator[Config]:
    """The options of each of them."""
    yield from (parse(list(argv_of(job.run.args))) for job in jobs(name))


def settings(job: Job) -> dict[str, object]:
    """All options of the trainer, and the keys of the job that an experiment publishes."""
    options = parse(list(argv_of(job.run.args))).to_dict()
    processes = job.processes if isinstance(job.processes, int) else job.gpus
    image = job.image.base if job.image else None
    return options | {"nodes": len(job.nodes), "gpus": job.gpus, "processes": processes, "image": image}


@pytest.mark.parametrize("name", [path.stem for path in sorted((REPOSITORY / "jobs").glob("e[0-9]_*.yaml"))])
def test_every_experiment_has_its_published_settings(name: str) -> None:
    if not name.endswith("_bed") and name != "e3_grid":
        assert name in PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_job_is_the_published_one_but_for_declared_differences(name: str) -> None:
    published, different = PUBLISHED[name], DIFFERENT.get(name, {})
    assert len(jobs(name)) == len(published)
    for job, row in zip(jobs(name), published, strict=True):
        expected = row | {field: ours for field, (ours, _) in different.items()}
        found = settings(job)
        assert {field: found[field] for field in row} == expected
        assert not {field for field in different if row[field] == expected[field]}, "declared, but not different"


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_job_sets_is_published_or_declared_as_ours(name: str) -> None:
    for job, row in zip(jobs(name), PUBLISHED[name], strict=True):
        assert isinstance(job.run.args, dict)
        given = {name.removeprefix("no_") for name in job.run.args} - {"data"}
        assert given <= row.keys() | OURS.get(name, {}).keys()


@pytest.mark.parametrize("nodes", ["1node", "2node"])
def test_the_main_job_differs_from_experiment_1_as_declared(nodes: str) -> None:
    ours, theirs = next(runs(f"imagenet_{nodes}")).to_dict(), list(runs(f"e1_{nodes}"))[-1].to_dict()
    assert {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]} == MAIN_JOB


@pytest.mark.parametrize(
    ("job", "processes", "batches"),
    [("e0_single", 1, (256, 128)), ("e0_dp", 1, (256, 1024)), ("e0_ddp", 4, (1024, 256))],
)
def test_experiment_0(job: str, processes: int, batches: tuple[int, ...]) -> None:
    """Rate 0.01 throughout, decay 1e-4 on all parameters, fp32 without TF32, default initialisation, one epoch."""
    assert tuple(config.batch_size * processes for config in runs(job)) == batches
    for config in runs(job):
        rate = make_schedule(config, config.batch_size * processes, 5005)
        assert {rate(step) for step in range(5005)} == {0.01}
        assert (config.decay, config.weight_decay, config.amp, config.epochs) == ("all", 1e-4, "none", 1)
        assert not config.tf32
        assert not config.zero_init_residual


@pytest.mark.parametrize(("nodes", "steps", "validation"), [(1, 5005, 782), (2, 2503, 391)])
def test_experiment_1(nodes: int, steps: int, validation: int) -> None:
    for config in (*runs(f"e1_{nodes}node"), *runs(f"imagenet_{nodes}node")):
        assert peak_rate(config, 256 * nodes) == 1.0
        assert steps_per_epoch(IMAGENET, 256 * nodes, config.last_batch == "keep") == steps
        momenta = [momentum_at(config, step, 100) for step in (0, 29, 99)]
        assert momenta == pytest.approx([0.95, 0.85, 0.95], abs=1e-12)
    assert -(-len(validation_share(CIFAR, 0, nodes)) // 64) == validation  # ImageNet's has as many images


@pytest.mark.parametrize(("job", "workers"), [("e2_dual_batch", 5), ("e2_dual_batch_6", 6)])
def test_experiment_2(job: str, workers: int) -> None:
    """140 rounds, rate 0.1 for both batch sizes, x 0.2 after rounds 80 and 120; the planner finds the small batches."""
    small = {5: [79, 165, 237, 297, 349], 6: [62, 138, 203, 258, 307, 349]}[workers]
    configs = list(runs(job))
    assert [config.dual_small for config in configs] == list(range(workers + 1))
    plans = [plan_of(config, workers, CIFAR) for config in configs]
    assert [plan.shares[0].batch for plan in plans] == [1000, *small]
    for config in configs:
        assert (config.epochs, config.gamma, config.weight_decay, config.momentum) == (140, 0.2, 0.0, 0.9)
        assert [round(share * config.epochs) for share in config.milestones] == [80, 120]
        assert peak_rate(config, config.batch_size) == 0.1
    assert JOBS[f"{job}-0"].processes == workers + 1
    assert JOBS[f"{job}-0"].gpus == workers


def test_the_server_shares_a_workers_gpu() -> None:
    """6 GPUs are enough for 6 workers: the server is beside the first; a second machine has workers only."""
    assert [device_index(rank, rank, 7) for rank in range(7)] == [(gpu, 6) for gpu in (0, 0, 1, 2, 3, 4, 5)]
    assert [device_index(4 + rank, rank, 4) for rank in range(4)] == [(gpu, 4) for gpu in range(4)]


def test_experiment_3() -> None:
    """Two processes, 10 epochs, both layers with and without accumulation; the table's inputs are (B, C)."""
    configs = list(runs("e3_syncbn"))
    assert {(config.syncbn, config.accumulate) for config in configs} == set(product(("custom", "library"), (1, 2)))
    assert {peak_rate(config, 2 * config.batch_size * config.accumulate) for config in configs} == {0.05}
    assert {(config.metrics, config.epochs) for config in configs} == {("exact", 10), ("scatter", 10)}
    grid = yaml.safe_load((REPOSITORY / "jobs" / "e3_grid.yaml").read_text())
    assert (JOBS["e3_syncbn-0"].gpus, grid["gpus"], grid["run"]["args"]) == (2, 2, {"side": 0})
    assert (CHANNELS, BATCHES) == ((128, 256, 512, 1024), (32, 64))


def test_the_default_rate_is_that_of_goyal_et_al() -> None:
    assert peak_rate(parse(["--data", "unused"]), 256) == 0.1


def test_experiment_4() -> None:
    """The rate of each published batch size; a warm-up only where one is published."""
    for job in ("e4_model", "e4_dp", "e4_pipeline", "e4_nobn"):
        for config in runs(job):
            rate = make_schedule(config, config.batch_size, 1000)
            assert rate(0) == max(rate(step) for step in range(1000))
    (first, *_) = runs("e4_batches")
    assert make_schedule(first, 128, 1000)(0) < 0.01
    rates = {config.batch_size: peak_rate(config, config.batch_size) for config in runs("e4_batches")}
    assert (rates[512], rates[2048]) == (0.2, 0.8)


def test_torchvisions_recipe() -> None:
    """references/classification, --model resnet50 for IMAGENET1K_V2, by the flags that the job's head quotes."""
    (config,) = runs("imagenet_rn50_recipe")
    steps = 600 * steps_per_epoch(IMAGENET, 1024, config.last_batch == "keep")
    rate = make_schedule(config, 128 * 8, steps)
    assert (config.arch, config.batch_size, config.epochs, config.optimizer) == ("resnet50", 128, 600, "sgd")
    assert max(range(0, steps, 10), key=rate) == pytest.approx(steps * 5 / 600, rel=1e-3)
    assert rate(round(steps * 5 / 600)) == pytest.approx(0.5)
    assert rate(0) == pytest.approx(0.5 * 0.01, rel=0.02)
    assert (config.momentum, config.nesterov, config.weight_decay, config.decay) == (0.9, False, 2e-5, "weights")
    assert (config.label_smoothing, config.mixup, config.cutmix, config.loss) == (0.1, 0.2, 1.0, "ce")
    assert (config.auto_augment, config.random_erase, config.repeats, config.flip) == ("trivial", 0.1, 4, 0.5)
    assert {config.side(epoch) for epoch in range(600)} == {176}
    assert (config.image_size, config.val_resize, config.crop_scale) == (224, 232, 0.08)
    assert config.ema_every == 32
    assert config.ema_decay == pytest.approx(1 - (1 - 0.99998) * 1024 * 32 / 600, abs=1e-6)
    assert not config.zero_init_residual
    assert not config.clip_norm
