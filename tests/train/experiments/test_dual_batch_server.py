"""The parameter server's grants and merges, with real threads and no network."""

import threading
import time

import pytest
import torch

from train.experiments.dual_batch.merge import merge_all, merge_one
from train.experiments.dual_batch.plan import Share
from train.experiments.dual_batch.server import Grant, ParameterServer, Rates

NO_SUMS = torch.zeros(4, dtype=torch.float64)
LARGE, SMALL = Share(100, 13750, 1.0, small=False), Share(10, 8750, 8750 / 13750, small=True)


def server(workers: int, total: int, merge: str = "asp", staleness: int = 3) -> ParameterServer:
    weights = {"w": torch.zeros(2), "num_batches_tracked": torch.tensor(7)}
    return ParameterServer(weights, [LARGE] * workers, total, Rates(0.1, 0.2, (80, 120)), merge, staleness, done=0)


def value(of: ParameterServer) -> float:
    return float(of.state().weights["w"][0])


def test_asynchronous_merges_give_the_published_figures() -> None:
    """f = 8750/13750, W = 0; pushes 1 (small), 2, 3, 4."""
    given = ParameterServer({"w": torch.zeros(1)}, [SMALL, LARGE], 4, Rates(0.1, 1, ()), "asp", 0, done=0)
    seen = []
    for worker, pushed in ((0, 1.0), (1, 2.0), (1, 3.0), (1, 4.0)):
        assert isinstance(given.pull(worker), Grant)
        given.push(worker, {"w": torch.tensor([pushed])}, NO_SUMS)
        seen.append(value(given))
    assert seen == pytest.approx([0.318182, 1.159091, 2.079545, 3.039773], abs=1e-6)
    assert given.pull(0) == "done"


def test_the_follow_ups_merge() -> None:
    """W <- (W + f*w)/(1 + f), f = 8750/13750: 7/18, then the mean with each large worker's weights."""
    given = ParameterServer({"w": torch.zeros(1)}, [SMALL, LARGE], 3, Rates(0.1, 1, ()), "asp", 0, 0, "follow_up")
    for worker, pushed, expected in (
        (0, 1.0, 7 / 18),
        (1, 2.0, (7 / 18 + 2) / 2),
        (1, 3.0, ((7 / 18 + 2) / 2 + 3) / 2),
    ):
        assert isinstance(given.pull(worker), Grant)
        given.push(worker, {"w": torch.tensor([pushed])}, NO_SUMS)
        assert value(given) == pytest.approx(expected, abs=1e-6)


def test_a_push_that_waits_for_the_others_is_not_saved_as_done() -> None:
    """A run that is stopped then, and resumed, trains this local epoch again."""
    given = server(2, 4, "bsp")
    for worker in (0, 1, 0):
        assert isinstance(given.pull(worker), Grant)
        given.push(worker, {"w": torch.ones(2), "num_batches_tracked": torch.tensor(0)}, NO_SUMS)
    now = given.state()
    assert (now.finished, now.merged) == (3, 2)


def test_grants_have_their_round_number() -> None:
    given = server(3, 7)
    answers = []
    for turn in range(7):
        answers.append(given.pull(turn % 3))
        given.push(turn % 3, {"w": torch.zeros(2), "num_batches_tracked": torch.tensor(0)}, NO_SUMS)
    assert [answer.round for answer in answers if isinstance(answer, Grant)] == [0, 0, 0, 1, 1, 1, 2]


def test_integer_counters_are_not_merged() -> None:
    ours = {"w": torch.zeros(1), "n": torch.tensor(7)}
    theirs = {"w": torch.ones(1), "n": torch.tensor(9)}
    assert merge_one(ours, theirs, 1.0)["n"] == 7
    assert merge_all(ours, [(theirs, 1.0), (theirs, 0.5)])["n"] == 7
    assert merge_all(ours, [(theirs, 1.0), ({"w": torch.full((1,), 4.0), "n": torch.tensor(1)}, 0.5)])["w"] == 2


def test_rates_drop_at_their_grants() -> None:
    rates = Rates(0.1, 0.2, (80, 120))
    assert [rates(n) for n in (0, 79, 80, 119, 120)] == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.004])


@pytest.mark.parametrize("merge", ["asp", "bsp", "ssp"])
def test_the_number_of_grants_is_exact_with_one_worker_five_times_slower(merge: str) -> None:
    """Threads pull, train and push like workers; grants, finished epochs and grant numbers are exactly rounds x G."""
    workers, rounds = 4, 10
    given = server(workers, workers * rounds, merge, staleness=2)
    numbers: list[int] = []
    done = [0] * workers

    def work(worker: int) -> None:
        while (answer := given.pull(worker)) != "done":
            if isinstance(answer, Grant):
                numbers.append(answer.number)
                time.sleep(0.01 * (5 if worker == 0 else 1))
                done[worker] += 1
                given.push(worker, {"w": torch.full((2,), 5.0), "num_batches_tracked": torch.tensor(0)}, NO_SUMS)
        given.leave(worker)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(numbers) == list(range(workers * rounds))
    assert given.granted == given.finished == workers * rounds
    if merge == "bsp":
        assert done == [rounds] * workers
        assert value(given) == 5.0
    if merge == "asp":
        assert done[0] < rounds < max(done)


def test_bsp_waits_for_all_and_merges_by_factor() -> None:
    given = ParameterServer({"w": torch.zeros(1)}, [SMALL, LARGE], 2, Rates(1, 1, ()), "bsp", 0, done=0)
    given.pull(0), given.pull(1)
    given.push(0, {"w": torch.tensor([1.0])}, NO_SUMS)
    assert value(given) == 0
    given.push(1, {"w": torch.tensor([3.0])}, NO_SUMS)
    f = 8750 / 13750
    assert value(given) == pytest.approx((f * 1 + 3) / (f + 1))


def test_ssp_holds_fast_workers_until_the_slow_one_catches_up() -> None:
    given = server(2, 10, "ssp", staleness=1)
    assert isinstance(given.pull(1), Grant)
    for _ in range(3):  # worker 0: two asynchronous pushes put it more than 1 ahead, the third is gathered
        assert isinstance(given.pull(0), Grant)
        given.push(0, {"w": torch.ones(2), "num_batches_tracked": torch.tensor(0)}, NO_SUMS)
    assert value(given) == 0.75
    assert given.pull(0) == "wait"
    given.push(1, {"w": torch.full((2,), 3.0), "num_batches_tracked": torch.tensor(0)}, NO_SUMS)
    assert value(given) == 2.0
    assert isinstance(given.pull(0), Grant)


@pytest.mark.parametrize("merge", ["asp", "bsp"])
def test_a_lost_workers_grant_goes_to_another(merge: str) -> None:
    given = server(2, 2, merge)
    first, second = given.pull(0), given.pull(1)
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    given.lose(1, "out of memory")
    given.push(1, {"w": torch.full((2,), 99.0), "num_batches_tracked": torch.tensor(0)}, NO_SUMS)
    for _ in range(2):
        given.push(0, {"w": torch.ones(2), "num_batches_tracked": torch.tensor(0)}, NO_SUMS)
        again = given.pull(0)
        if isinstance(again, Grant):
            assert again.number == second.number
    assert again == "done"
    assert given.finished == 2
    assert given.lost == {1: "out of memory"}
    assert value(given) <= 1


def test_silent_workers_are_detected() -> None:
    given, deadline = server(2, 2), time.monotonic() + 60
    while given.silent(0.15) != [1]:  # worker 0 has just called, unless this thread was suspended
        assert time.monotonic() < deadline
        given.heartbeat(0)
    assert given.silent(600) == []
