"""The jobs of the experiments have the settings that were published with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import yaml
from torch import nn

from bench.syncbn import BATCHES, CHANNELS
from docs import published
from docs.published import MAIN_JOB, Beside, Field, Ours, Published, Row, Unused
from launcher.job.arguments import argv_of
from launcher.job.models import Job
from tests.train.runs import OLD
from tests.train.trainer.test_jobs_train import JOBS, REPOSITORY
from train.combinations import check
from train.config import Config, parse
from train.data.sampler import steps_per_epoch, validation_shares
from train.experiments.dual_batch.options import device_index, plan_of
from train.experiments.syncbn import SyncBatchNorm, convert
from train.models import make_model, parameter_count
from train.schedule import make_schedule, momentum_at, peak_rate

IMAGENET, CIFAR = 1_281_167, 50_000


def jobs(name: str) -> list[Job]:
    """The job of each run of the sweep."""
    return [JOBS[found] for index in range(20) if (found := f"{name}-{index}") in JOBS]


def runs(name: str) -> Iterator[Config]:
    """The options of each of them."""
    yield from (parse(list(argv_of(job.run.args))) for job in jobs(name))


def settings(job: Job) -> dict[str, object]:
    """All options of the trainer as resolved, and the keys of the job that an experiment publishes."""
    options = parse(list(argv_of(job.run.args))).to_dict()
    processes = job.processes if isinstance(job.processes, int) else job.gpus
    image = job.image.base if job.image else None
    return options | {"nodes": len(job.nodes), "gpus": job.gpus, "processes": processes, "image": image}


@pytest.mark.parametrize("name", [path.stem for path in sorted((REPOSITORY / "jobs").glob("e[0-9]_*.yaml"))])
def test_every_experiment_has_its_published_settings(name: str) -> None:
    if not name.endswith("_bed") and name != "e3_grid":
        assert name in published.JOBS


def wrong(found: dict[str, object], row: Row) -> dict[str, str]:
    """What is wrong with a row, by option, beside the settings of its run."""
    problems = dict.fromkeys(found.keys() - row.keys(), "neither published nor ours")
    problems |= dict.fromkeys(row.keys() - found.keys(), "no such option")
    for name in found.keys() & row.keys():
        field = row[name]
        if found[name] != field.value:
            problems[name] = f"the run has {found[name]!r}, the table {field.value!r}"
        elif isinstance(field, Published) and not field.line:
            problems[name] = "where?"
        elif isinstance(field, Ours | Beside) and (
            not field.why or (isinstance(field, Ours) and field.theirs == str(field.value) != "")
        ):
            problems[name] = "why?"
        elif isinstance(field, Unused) and found[field.option] not in field.at:
            problems[name] = f"has an effect: --{field.option} is {found[field.option]!r}"
    return problems


@pytest.mark.parametrize("name", published.JOBS)
def test_every_option_of_a_run_is_published_or_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAUNCHER_OUTPUT", raising=False)
    for job, row in zip(jobs(name), published.JOBS[name], strict=True):
        assert not wrong(settings(job), row)


def test_a_missing_a_stale_and_an_unfounded_entry_are_found() -> None:
    row = published.JOBS["e0_single"][0]
    found = {name: field.value for name, field in row.items()}
    assert not wrong(found, row)
    assert wrong(found | {"new": 1}, row) == {"new": "neither published nor ours"}
    assert wrong({name: value for name, value in found.items() if name != "lr"}, row) == {"lr": "no such option"}
    assert wrong(found | {"lr": 0.1}, row) == {"lr": "the run has 0.1, the table 0.01"}
    assert wrong(found | {"optimizer": "lars"}, row).keys() == {
        *("optimizer", "lars_eta", "muon_momentum", "adam_beta2")
    }
    assert wrong(found, row | {"lr": Published(0.01, "")}) == {"lr": "where?"}
    assert wrong(found, row | {"lr": Ours(0.01, "")}) == {"lr": "why?"}
    assert wrong(found, row | {"seed": Ours(0, "as theirs", "0")}) == {"seed": "why?"}


# what the five write-ups themselves give, by job; each experiment's linked script gives more
SCRIPTS = "batch_size weight_decay decay zero_init_residual lr schedule tf32 amp epochs arch workers"
NORMS = "gpus processes epochs accumulate syncbn metrics"
TABLES = "optimizer arch batch_size"  # of experiment 4, which has no script: nothing else is published
WRITE_UPS = {
    "e0_single": f"{SCRIPTS} gpus",
    "e0_dp": f"{SCRIPTS} gpus processes parallel",
    "e0_ddp": f"{SCRIPTS} gpus processes",
    "vgg16_cifar10": "arch image_size gpus batch_size parallel",
    **dict.fromkeys(
        ("e1_1node", "e1_2node"),
        "arch amp optimizer momentum batch_size val_batch_size schedule lr cycle_momentum nodes epochs workers decay "
        "zero_init_residual weight_decay augment flip mean std val_resize",
    ),
    **dict.fromkeys(
        ("e2_dual_batch", "e2_dual_batch_6"), "parallel gamma milestones epochs dual_small dual_ratio batch_size gpus"
    ),
    "e3_syncbn": NORMS,
    "e4_batches": f"{TABLES} weight_decay schedule",
    "e4_nobn": f"{TABLES} weight_decay schedule lr lr_scaling clip_norm",
    "e4_model": f"{TABLES} schedule lr lr_scaling gpus processes parallel",
    "e4_dp": f"{TABLES} schedule lr lr_scaling gpus processes parallel replicas",
}
RATES = "lr lr_scaling lr_reference_batch"
SIZE = "image_size val_resize"  # CIFAR's, as it is


def write_up(job: str, row: Row) -> set[str]:
    """The options of a run that its write-up gives."""
    rates = job == "e4_batches" and row["batch_size"].value in (512, 2048)
    return {*WRITE_UPS[job].split(), *(RATES.split() if rates else ())}


def is_published(field: Field) -> bool:
    return isinstance(field, Published) or bool(isinstance(field, Ours) and field.theirs)


def misdeclared(job: str, row: Row) -> set[str]:
    """What a run's write-up gives and its row calls ours without it, or the other way round."""
    given, declared = write_up(job, row), {name for name, field in row.items() if isinstance(field, Published)}
    ours = {name for name in given if not is_published(row[name])}
    invented = declared - given - set(SIZE.split()) if job.startswith("e4_") else set()
    if job == "e4_batches":  # scaled to the other batch sizes by our rule, which the page says of `lr`
        invented -= set(RATES.split()[1:])
    return ours | invented


@pytest.mark.parametrize("job", WRITE_UPS)
def test_what_a_write_up_gives_is_not_ours_and_what_no_source_gives_is(job: str) -> None:
    for row in published.JOBS[job]:
        assert not misdeclared(job, row)


def test_a_published_field_that_is_called_ours_is_found() -> None:
    row = published.JOBS["e4_batches"][0]  # of batch size 128
    assert misdeclared("e4_batches", row | {"optimizer": Ours("sgd", "not published")}) == {"optimizer"}
    assert misdeclared("e4_batches", row | {"optimizer": Beside("sgd", "none is named")}) == {"optimizer"}
    assert misdeclared("e4_batches", row | {"lr": Published(0.1, "table")}) == {"lr"}
    row = published.JOBS["e4_model"][0]
    for name in ("warmup", "weight_decay"):
        assert misdeclared("e4_model", row | {name: Published(row[name].value, "table")}) == {name}


def test_the_page_lists_all_that_is_ours_whatever_the_reason() -> None:
    found = list(published.unpublished(4))
    assert "`weight_decay` (e4_dp, e4_model, e4_pipeline)" in found
    assert "`warmup` (e4_dp, e4_model, e4_nobn, e4_pipeline)" in found
    assert not [text for text in found if "optimizer" in text]


@pytest.mark.parametrize("name", published.JOBS)
def test_no_published_job_is_refused_on_a_gpu_without_bf16(name: str) -> None:
    """Its --amp auto is fp16 with a loss scale, which some methods do not support."""
    for job, config in zip(jobs(name), runs(name), strict=True):
        processes = settings(job)["processes"]
        size = len(job.nodes) * (processes if isinstance(processes, int) else 8)
        kind = config.parallel if config.parallel != "auto" else "ddp" if size > 1 else "single"
        if kind == "pipeline" and OLD:
            pytest.skip("torch before 2.6")
        check(config, kind, "fp16" if config.amp == "auto" else config.amp, [1] * size, "cuda")


def test_experiment_2s_model_is_keras_one() -> None:
    torch.manual_seed(0)
    model = make_model("cifar_resnet18_keras", 100)
    biases = 64 + 4 * 64 + (4 + 1) * (128 + 256 + 512)  # of the convolutions, which our cifar_resnet18 does not have
    assert parameter_count(model) == parameter_count(make_model("cifar_resnet18", 100)) + biases
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    assert {(part.eps, part.momentum) for part in norms} == {(1e-3, 0.01)}
    conv = next(part for part in model.modules() if isinstance(part, nn.Conv2d) and part.out_channels == 512)
    std = math.sqrt(2 / (256 * 3 * 3))  # he_normal
    assert conv.weight.std().item() == pytest.approx(std, rel=0.01)
    assert conv.weight.abs().max().item() <= 2 * std / 0.879 < 3 * std
    with torch.no_grad():  # TensorFlow's `same`: an even side has no row before the first one if the stride is 2
        conv.weight.zero_()[:, 0, 1, 1] = 1
        pad = next(part for part in model.modules() if isinstance(part, nn.ZeroPad2d))
        images = torch.randn(1, 256, 8, 8)
        assert torch.equal(conv(pad(images))[:, 0], images[:, 0, 1::2, 1::2])


@pytest.mark.parametrize("synchronised", [convert, nn.SyncBatchNorm.convert_sync_batchnorm])
def test_experiment_3s_model_is_the_linked_one(synchronised: Callable[[nn.Module], nn.Module]) -> None:
    model = make_model("cifar_convnet", 100)
    kinds = [type(part).__name__ for part in model]  # type: ignore[arg-type]  # a Sequential
    assert " ".join(kinds) == (
        "Conv2d ReLU Conv2d ReLU MaxPool2d Dropout Flatten Linear BatchNorm1d ReLU Dropout Linear"
    )
    assert parameter_count(model) == 896 + 9_248 + (6272 + 1) * 128 + (128 + 1) * 100
    (norm,) = [part for part in synchronised(model).modules() if isinstance(part, (SyncBatchNorm, nn.SyncBatchNorm))]
    assert (norm.num_features, norm.affine, norm.eps, norm.momentum) == (128, False, 1e-5, 0.1)


def test_the_page_has_the_differences_of_the_table() -> None:
    text = published.PAGE.read_text()
    assert text == published.page(text), "run: python -m docs.published"


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
    assert -(-len(validation_shares(CIFAR, [64] * nodes)[0]) // 64) == validation  # ImageNet's has as many images


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
    """A constant rate, with and without accumulation; the table's inputs are (B, C)."""
    for config in runs("e3_syncbn"):
        rate = make_schedule(config, 2 * config.batch_size * config.accumulate, 391)
        assert {rate(step) for step in range(391)} == {0.01}
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
