"""The checks of bench/gpu.py on a CPU that pretends to be a GPU, so that failures on a GPU are caused by the GPU."""

import signal
import sys
import time
from typing import Any

import pytest

from bench import gpu
from bench.gpu import LIMITS
from bench.gpu_scale import Scale
from tests.gpu import checks, numerics
from train.data.open import open_dataset
from train.data.sampler import steps_per_epoch

LONG = {"step", "amp", "overlap", "data", "launcher", "channels_last", "options", "compile"}


def test_every_check_has_a_limit() -> None:
    assert set(checks.CHECKS) == set(LIMITS)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in LIMITS]
)
def test_a_check_passes(name: str) -> None:
    found = checks.check(name, dry=True)
    assert found["ok"] in (True, None), found
    assert gpu.row({name: found | {"seconds": 1.0}}).count("\n") == 2


def test_fsdp_fails_in_the_layout_that_fully_shard_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = numerics.choose_precision

    def old(*arguments: Any) -> Any:
        precision = chosen(*arguments)
        return type(precision)(**vars(precision) | {"weights_layout": precision.layout})

    monkeypatch.setattr(numerics, "choose_precision", old)
    with pytest.raises(NotImplementedError, match="non-contiguous"):
        checks.check("fsdp", dry=True)


def test_a_check_that_hangs_is_stopped_and_a_failing_check_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIMITS", {"slots": 1.0, "syncbn": 60.0})
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    program = f"import signal, sys, time; signal.signal({int(signal.SIGTERM)}, signal.SIG_IGN)\n"
    program += "if 'slots' in sys.argv: time.sleep(600)\nraise ValueError('the reason')"
    monkeypatch.setattr(gpu, "CHECK", (sys.executable, "-c", program))
    begun = time.monotonic()
    assert gpu.run("slots") == {"ok": False, "seconds": 1.0, "why": "timed out after 1 s"}
    assert time.monotonic() - begun < 60
    found = gpu.run("syncbn")
    assert (found["ok"], found["why"]) == (False, "ValueError: the reason")


def test_there_are_batches_enough_for_every_step() -> None:
    """Synthetic data has ImageNet's number of images: an epoch has more steps than the warm-up and all rounds."""
    config = Scale(dry=False).options("--data synthetic")
    images = len(open_dataset(config.data, 8).train.labels)
    assert steps_per_epoch(images, config.batch_size, keep_last=False) > 20 * (5 + 1)


def test_dry_has_the_real_numbers() -> None:
    real, dry = (Scale(dry).options("--data unused") for dry in (False, True))
    assert (real.batch_size, real.memory_format, real.amp) == (dry.batch_size, dry.memory_format, dry.amp)
    assert real.device == dry.device == "cuda"
