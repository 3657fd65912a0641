"""Every job that runs the launcher's trainer has valid options, so that none fails on a GPU by a typo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher.job.arguments import argv_of
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep
from train.config import parse
from train.schedule import make_schedule

REPOSITORY = Path(__file__).resolve().parents[3]
JOBS = {
    f"{path.stem}-{index}": job
    for path in sorted((REPOSITORY / "jobs").glob("*.yaml"))
    for index, job in enumerate(expand_sweep(load_job(path)))
    if job.run.module == "train"
}
RECIPES = {  # job: epochs, published top-1
    "imagenet_rn50_90": (90, "77.12 %"),
    "imagenet_rn50_16": (16, "73.8 %"),
    "imagenet_rn50_32": (32, "76.6 %"),
    "imagenet_rn50_88": (88, "78.4 %"),
    "imagenet_rn50_recipe": (600, "80.858 %"),
    "imagenet_rn18_16": (16, "66.9 %"),
    "e1_1node": (2, "49.09 %"),
    "e1_2node": (2, "46.78 %"),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_trainer_accepts_every_jobs_arguments(name: str) -> None:
    job: Job = JOBS[name]
    config = parse(list(argv_of(job.run.args)))
    assert config.data
    rate = make_schedule(config, global_batch=config.batch_size, total=1000)
    assert max(rate(step) for step in range(1000)) > 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_its_source_and_its_published_result(name: str) -> None:
    epochs, top1 = RECIPES[name]
    assert parse(list(argv_of(JOBS[f"{name}-0"].run.args))).epochs == epochs
    head = (REPOSITORY / "jobs" / f"{name}.yaml").read_text().partition("\nname:")[0]
    assert "Published" in head
    assert top1 in " ".join(head.replace("#", " ").split())


def test_the_progressive_recipes_grow_and_peak_where_published() -> None:
    """ffcv interpolates the side between two epochs of its configuration and rounds it to a multiple of 32 px."""
    for name, ramp in (("rn50_16", (11, 13)), ("rn50_32", (23, 27)), ("rn50_88", (65, 76)), ("rn18_16", (11, 13))):
        config = parse(list(argv_of(JOBS[f"imagenet_{name}-0"].run.args)))
        published = np.interp(np.arange(config.epochs), ramp, (160, 192))
        assert [config.side(epoch) for epoch in range(config.epochs)] == (np.round(published / 32) * 32).tolist()
        steps = config.epochs * 100
        rate = make_schedule(config, config.lr_reference_batch, steps)
        assert max(range(steps), key=rate) == pytest.approx(2 * 100, abs=2)
        assert rate(2 * 100) == pytest.approx(config.lr, rel=1e-2)
        knots = [0, 200, steps], [1e-4 * config.lr, config.lr, 0]
        theirs = np.interp(np.arange(steps), *knots)
        difference = np.abs(theirs - [rate(step) for step in range(steps)])
        assert difference[:200].max() < 1e-9
        assert difference[200:].max() < 1e-3 * config.lr
