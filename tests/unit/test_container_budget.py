"""The entry script with a budget, in all common shells: since when it counts, how the program ends, who is told."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.unit.container_box import Box

BUDGET = {"LAUNCHER_BUDGET": "3600"}
STEP = '{"kind": "step", "time": 1790000000.0, "step": 1}'
SAVES = "trap 'kill $!; echo saved; exit 0' TERM; sleep 600 & echo ready; wait"


def over_once(box: Box, file: str) -> None:
    """The budget is over once the program has made this file: it has its trap then."""
    box.change('    [ "$(seconds)" -ge "$our_budget_end" ]', f"    [ -e '{box.output}/{file}' ]")


def words(box: Box) -> list[str]:
    return [line.split()[0] for line in box.attempts]


def test_a_program_without_a_step_ends_by_the_budget_since_its_start_and_is_done(box: Box) -> None:
    over_once(box, "ready")
    code, out = box.run("/bin/sh", "-c", SAVES.replace("echo ready", ": >$LAUNCHER_OUTPUT/ready"), env=BUDGET)
    said = b"launcher: budget of 3600 s reached, counted from its start: metrics.jsonl has no step\n"
    assert (code, out) == (0, said + b"saved\n")
    assert words(box) == ["start", "budget", "exit"]
    assert box.attempts[-1].startswith("exit 0 ")
    assert (box.output / "state" / "budget").read_text().strip().isdecimal()


def test_the_budget_counts_from_the_first_step_of_this_run(box: Box) -> None:
    (box.output / "metrics.jsonl").write_text(f"{STEP}\n" * 3)  # of the run from whose checkpoint it starts
    steps = "cd $LAUNCHER_OUTPUT; wait_for() { until [ -e $1 ]; do sleep 0.1; done; }"
    steps += f"; echo ready; wait_for more; echo more; wait_for go; echo '{STEP}' >>metrics.jsonl; exec sleep 600"
    process = box.start("/bin/sh", "-c", steps, env=BUDGET)
    clock = box.output / "logs" / "gpu-a.clock"
    until(lambda: clock.exists() and " 6\n" in clock.read_text())
    (box.output / "more").touch()
    until(lambda: " 11\n" in clock.read_text())  # noted in the second turn of its loop: the first one has looked
    assert words(box) == ["start"]
    (box.output / "go").touch()
    until(lambda: "stepped" in words(box))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_the_budget_counts_over_restarts(box: Box) -> None:
    (box.output / "state").mkdir()
    now = int(time.time())
    attempts = box.output / "state" / "gpu-a.attempts"
    attempts.write_text(f"start {now - 9000}\nstepped {now - 100}\nexit 1 {now}\n")
    assert box.run("/bin/sh", "-c", "exit 5", env=BUDGET)[0] == 5
    attempts.write_text(f"start {now - 9000}\nstepped {now - 4000}\nexit 1 {now}\n")
    code, out = box.run("/bin/sh", "-c", "echo never", env=BUDGET)
    assert (code, out) == (0, b"launcher: budget of 3600 s reached, counted from its first step\n")


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        (STEP, True),
        ('{"step": 1, "loss": 0.5}', True),
        ('{"loss":0.5,"step":10,"kind":"step"}', True),
        ('{"kind": "start", "time": 1.0, "step": 0, "steps": 90}', False),
        ('{"kind": "epoch", "step": 7, "val": {"top1": 1.0}}', False),
        ('{"kind": "end", "steps": 90}', False),
    ],
)
def test_what_a_step_is(box: Box, line: str, counts: bool) -> None:
    script, metrics, before = (box.kit / "entry.sh").read_text(), box.output / "metrics.jsonl", f"{STEP}\n"
    metrics.write_text(f"{before}{line}\n")
    function = script[script.index("has_step() {") : script.index("reaches_budget() {")]
    (box.kit / "entry.sh").write_text(f"our_metrics={metrics} our_old_metrics={len(before)}\n{function}\nhas_step\n")
    assert box.run()[0] == (0 if counts else 1)


def test_a_program_that_ignores_the_signal_is_killed_and_is_done(one: Box) -> None:
    one.change("our_grace=45", "our_grace=1")
    over_once(one, "ready")
    program = "trap '' TERM; : >$LAUNCHER_OUTPUT/ready; while :; do sleep 0.1; done"
    code, out = one.run("/bin/sh", "-c", program, env=BUDGET)
    assert code == 0
    assert b"did not exit within 1 s of SIGTERM and was killed" in out


def test_a_program_that_fails_after_the_signal_is_done_and_that_is_said(box: Box) -> None:
    over_once(box, "ready")
    program = "trap 'kill $!; exit 3' TERM; sleep 600 & : >$LAUNCHER_OUTPUT/ready; wait"
    code, out = box.run("/bin/sh", "-c", program, env=BUDGET)
    assert code == 0
    assert b"launcher: the program exited with code 3 after that\n" in out


def test_a_program_that_ends_before_the_budget_ends_as_without_one(box: Box) -> None:
    assert box.run("/bin/sh", "-c", "exit 0", env=BUDGET) == (0, b"")
    assert box.run("/bin/sh", "-c", "exit 1", env=BUDGET) == (1, b"")
    assert "budget" not in words(box)


def test_another_node_is_told_by_the_file(box: Box) -> None:
    told, env = box.output / "state" / "budget", {**BUDGET, "LAUNCHER_NODE_RANK": "1"}
    process = box.start("/bin/sh", "-c", SAVES, env=env)
    box.until(b"ready")
    told.write_text("1790000000\n")
    out = process.communicate(timeout=60)[0]
    assert (process.returncode, out) == (0, b"ready\nlauncher: the run has reached its budget of 3600 s\nsaved\n")
    assert words(box) == ["start", "exit"], "the first node notes it for launchers"
    assert box.run("/bin/sh", "-c", "echo never", env=env)[0] == 0, "if its container is started again"


def test_another_node_that_nobody_tells_ends_after_twice_the_budget(box: Box) -> None:
    (box.output / "state").mkdir()
    attempts, env = box.output / "state" / "gpu-a.attempts", {**BUDGET, "LAUNCHER_NODE_RANK": "1"}
    attempts.write_text(f"start {int(time.time()) - 7000}\n")
    assert box.run("/bin/sh", "-c", "exit 5", env=env)[0] == 5
    (box.output / "state" / "gpu-a.began").unlink()
    attempts.write_text(f"start {int(time.time()) - 7300}\n")
    code, out = box.run("/bin/sh", "-c", "echo never", env=env)
    assert (code, out) == (0, b"launcher: the run has reached its budget of 3600 s\n")


def test_another_node_that_failed_for_lack_of_the_first_one_is_done(box: Box) -> None:
    lost = "echo 1790000000 >$LAUNCHER_OUTPUT/state/budget; exit 1"
    code, out = box.run("/bin/sh", "-c", lost, env={**BUDGET, "LAUNCHER_NODE_RANK": "1"})
    assert code == 0
    assert b"the program exited with code 1 after that" in out
    (box.output / "state" / "budget").write_text("")
    assert box.run("/bin/sh", "-c", "exit 1", env={**BUDGET, "LAUNCHER_NODE_RANK": "1"})[0] == 1


def test_a_program_that_a_user_has_stopped_is_not_ended_by_the_budget(one: Box) -> None:
    over_once(one, "asked")
    program = "trap ': >$LAUNCHER_OUTPUT/asked; sleep 2; kill $!; exit 143' TERM; sleep 600 & echo ready; wait"
    process = one.start("/bin/sh", "-c", program, env=BUDGET)
    one.until(b"ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert words(one) == ["start", "exit"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
