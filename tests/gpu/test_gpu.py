"""Checks that need a GPU: `python -m pytest -m gpu tests/gpu`. The same checks as `python -m bench.gpu`."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import LIMITS, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.timeout(max(LIMITS.values()) + 60),
]


@pytest.mark.parametrize("name", LIMITS)
def test_the_trainer_on_a_gpu(name: str) -> None:
    found = run(name)
    assert found["ok"] in (True, None), found
