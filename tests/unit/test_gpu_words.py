"""What CUDA and NCCL say when they fail: its cause and its fix, of each text that tests/gpu_rows.py has."""

from __future__ import annotations

import pytest

from launcher.faults.lookup import cause_of_output
from tests.failures import first_failure
from tests.gpu_rows import HEAD, RECORDED, output
from tests.unit.test_diagnose import evidence


@pytest.mark.parametrize(("source", "words", "log", "cause", "fix"), RECORDED, ids=[row[0] for row in RECORDED])
def test_what_was_recorded_is_told_with_its_cause_and_fix(
    source: str, words: str, log: str, cause: str, fix: str
) -> None:
    found = first_failure([evidence(0, output(words, log))])
    assert found is not None, source
    assert cause in found.what
    assert fix in found.cure


def test_the_process_that_is_torch_itself_is_not_called_another_one() -> None:
    """In a container torch does not know its own process id among those of the node."""
    words = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        "79.15 GiB "
        "of which 0.5 GiB is free. Process 11 has 60.00 GiB memory in use. Process 12 has 18.50 GiB memory in use. Of "
        "the allocated memory 17.50 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    found = cause_of_output(f"{HEAD}{words}", "", {"node": "gpu-a"})
    assert found is not None
    assert found.what.endswith("process 11 has 60.00 GiB")


def test_a_warning_of_nccl_is_not_blamed_for_an_error_of_the_program() -> None:
    log = "n:1:2 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr failed\n"
    assert cause_of_output(f"{HEAD}KeyError: 'dog'", log, {"node": "n0"}) is None
