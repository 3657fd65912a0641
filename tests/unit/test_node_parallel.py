"""Many nodes in parallel: every failure is reported, none hides another; limits are probed once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from launcher.api.until_started import until_started
from launcher.errors import NodesFailed, NodeUnreachable
from launcher.node.connect import Fleet
from launcher.node.docker.engine import Ulimits
from launcher.node.docker.engine import granted as granted_ulimits
from launcher.node.parallel import run_all, run_all_catching, run_both, uninterrupted
from launcher.node.process.engine import ProcessEngine

WANTED = (("memlock", -1), ("stack", 67108864))


def fail(node: str) -> int:
    raise NodeUnreachable(node, "is unreachable", "")


def test_calls_run_concurrently_and_results_keep_their_order() -> None:
    barrier = threading.Barrier(20)

    def meet(index: int) -> int:
        barrier.wait(60)  # passes only if all run at the same time
        time.sleep(0.02 * (20 - index) / 20)
        return index

    assert run_all([lambda index=index: meet(index) for index in range(20)]) == list(range(20))


def test_all_failures_are_reported_in_order() -> None:
    with pytest.raises(NodesFailed) as caught:
        run_all([lambda: fail("a"), lambda: 1, lambda: fail("c")])
    assert [error.where for error in caught.value.errors] == ["a", "c"]
    assert "2 of 3 nodes failed" in str(caught.value)


def test_a_defect_is_not_reported_as_a_nodes_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        run_all([lambda: fail("a"), lambda: 1 // 0])


def test_settled_failures_keep_their_positions() -> None:
    one, two = run_all_catching([lambda: fail("a"), lambda: 2])
    assert isinstance(one, NodeUnreachable)
    assert two == 2


def test_two_calls_run_in_parallel_and_either_may_fail() -> None:
    assert run_both(lambda: 1, lambda: "x") == (1, "x")
    with pytest.raises(NodeUnreachable):
        run_both(lambda: 1, lambda: fail("a"))
    with pytest.raises(NodeUnreachable):
        run_both(lambda: fail("a"), lambda: 1)


def interrupted(steps: list[str]) -> int:
    """Several Ctrl-C while waiting for nodes; each call ends long after them."""

    def job(node: str) -> int:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        steps.append(node)
        return 1

    return sum(run_all([lambda node=node: job(node) for node in "abc"]))


def test_ctrl_c_waits_for_the_end_of_a_protected_section() -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: interrupted(steps))
    assert sorted(steps) == ["a", "b", "c"]
    with pytest.raises(KeyboardInterrupt):  # the default handler is restored afterwards
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_and_an_error_are_both_raised() -> None:
    """`up --wait` tries again after some errors, and a sweep goes on with the next variant: not after a Ctrl-C."""

    def fails() -> int:
        interrupted([])
        return fail("a")

    with pytest.raises(KeyboardInterrupt) as caught:
        uninterrupted(fails)
    assert isinstance(caught.value.__cause__, NodeUnreachable)
    with pytest.raises(KeyboardInterrupt, match="a: is unreachable"), until_started():
        uninterrupted(fails)
    with pytest.raises(NodeUnreachable):
        uninterrupted(lambda: fail("a"))


def test_a_sigterm_that_is_as_ctrl_c_waits_too() -> None:
    before, ended = signal.signal(signal.SIGTERM, signal.default_int_handler), []

    def terminated() -> None:
        signal.raise_signal(signal.SIGTERM)
        ended.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(terminated)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended


def test_ctrl_c_stays_ignored_if_it_was_before() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert uninterrupted(lambda: interrupted([])) == 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_part_of_a_fleet_has_its_ssh_config() -> None:
    fleet = Fleet([ProcessEngine("local-0"), ProcessEngine("local-1")], {}, None)
    fleet.ssh_config = "/my/config"
    part = fleet.only(["local-1"])
    assert ([engine.node for engine in part.engines], part.ssh_config) == (["local-1"], "/my/config")


@pytest.mark.parametrize(
    ("refused", "granted", "tries"),
    [([], WANTED, 1), (["memlock"], WANTED[1:], 3), (["memlock", "stack"], (), 3)],
)
def test_limits_are_tried_together_and_then_one_by_one(refused: list[str], granted: Ulimits, tries: int) -> None:
    asked: list[Ulimits] = []

    def starts_with(limits: Ulimits) -> bool:
        asked.append(limits)
        return not any(name in refused for name, _ in limits)

    assert granted_ulimits(WANTED, starts_with) == granted
    assert len(asked) == tries
