"""Checks that need a GPU: `python -m pytest -m gpu tests/gpu`. The same checks as `python -m bench.gpu`."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import SECTIONS, Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.timeout(max(section.limit for section in SECTIONS.values()) + 60),
]


@pytest.mark.parametrize("name", SECTIONS)
def test_the_trainer_on_a_gpu(name: str) -> None:
    worker = Worker()
    try:
        for row, figures in worker.run(name, SECTIONS[name].limit):
            assert figures["ok"] in (True, None), (row, figures)
    finally:
        worker.close()
