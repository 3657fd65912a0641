"""Ways in which plain processes end: stop, kill -9, Ctrl-C, and exit of the caller."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launcher.model.container import Phase
from launcher.node.process import supervisor
from tests.process.machine import Machine


def test_a_stop_sends_one_sigterm_and_waits(machine: Machine) -> None:
    program = """
        import signal, sys, time
        seen = []
        signal.signal(signal.SIGTERM, lambda *a: seen.append(1))
        print("ready", flush=True)
        while not seen: time.sleep(0.01)
        time.sleep(0.5)
        print("saved", len(seen), flush=True)
    """
    engine, name = machine.start(machine.spec("exec python3 -u main.py"), **{"main.py": textwrap.dedent(program)})
    machine.wait_for_output("ready")
    state = engine.stop(name, 60)
    assert (state.phase, state.exit_code) == (Phase.EXITED, 0)
    assert machine.log() == "ready\nsaved 1\n"
    assert machine.alive() == set()


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace_period(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
    machine.wait_for_output("ready")
    began = time.monotonic()
    state = engine.stop(name, 1)
    assert 0.9 < time.monotonic() - began < 60
    assert (state.phase, state.exit_code) == (Phase.EXITED, 137)
    assert machine.alive() == set()


def test_a_stop_without_grace_is_immediate(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("trap '' TERM; echo ready; sleep 600; sleep 600"))
    machine.wait_for_output("ready")
    began = time.monotonic()
    assert engine.stop(name, 0).phase is Phase.EXITED
    assert time.monotonic() - began < 60
    assert machine.alive() == set()


def test_a_second_stop_shortens_the_first(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
    machine.wait_for_output("ready")
    first = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from launcher.node.process.engine import *; ProcessEngine('local-0').stop({name!r}, 600)",
        ]
    )
    machine.until(lambda: any(machine.output.glob(".node/*/stop")))
    began = time.monotonic()
    assert engine.stop(name, 0).phase is Phase.EXITED
    assert time.monotonic() - began < 60
    assert first.wait(60) == 0


def test_stopping_an_ended_or_unstarted_container_is_not_an_error(machine: Machine) -> None:
    engine, name = machine.create(machine.spec("exit 4"))
    assert engine.stop(name, 5).phase is Phase.CREATED
    engine.start(name)
    engine.wait(name, 60)
    assert engine.stop(name, 5).exit_code == 4


ESCAPES = {
    "background": "sleep 300 & echo ready; wait",
    "own session": "setsid sh -c 'trap \"\" TERM HUP; sleep 300; sleep 300' & echo ready; wait",
    "daemon": "(setsid sleep 300 >/dev/null 2>&1 &) ; echo ready; sleep 300",
    "no environment": "(env -i setsid sleep 300 >/dev/null 2>&1 &) ; echo ready; sleep 300",
}


@pytest.mark.parametrize("program", ESCAPES.values(), ids=ESCAPES.keys())
@pytest.mark.parametrize("how", ["stop", "end"])
def test_no_descendant_outlives_the_container(machine: Machine, program: str, how: str, tmp_path: Path) -> None:
    end = tmp_path / "end"
    if how == "end":
        until = f"until [ -e {end} ]; do sleep 0.05; done"
        program = program.replace("; wait", f"; {until}").replace("ready; sleep 300", f"ready; {until}")
    engine, name = machine.start(machine.spec(program, entry=False))
    machine.until(lambda: b"ready" in engine.logs(name))
    time.sleep(0.2)
    everything = supervisor.processes(name, machine.supervisor())
    assert len(everything) >= 2
    end.touch()
    engine.stop(name, 0.5) if how == "stop" else engine.wait(name, 60)
    machine.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everything))


def test_a_program_ends_if_its_folder_is_removed(machine: Machine) -> None:
    """If the user removes the run's folder by hand, its processes must not keep running unnoticed."""
    _, name = machine.start(machine.spec("exec sleep 300"))
    everything = machine.alive()
    assert everything

    def removed() -> bool:  # the folder is being written to, so one attempt may not be enough
        shutil.rmtree(machine.output, ignore_errors=True)
        return not machine.output.exists()

    machine.until(removed)
    machine.until(lambda: not machine.alive())
    assert name


def test_a_killed_supervisor_is_reported_and_its_processes_are_ended(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo ready; sleep 300"))
    machine.wait_for_output("ready")
    os.kill(machine.supervisor(), signal.SIGKILL)
    state = engine.wait(name, 60)
    assert (state.phase, state.exit_code) == (Phase.EXITED, 137)
    assert "killed" in state.error
    assert "launcher down" in state.error
    assert machine.alive()
    after = engine.stop(name, 5)
    assert (after.phase, after.exit_code) == (Phase.EXITED, 137)
    assert machine.alive() == set()
    engine.remove(name)


def test_wait_notices_a_killed_supervisor_while_it_waits(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("exec sleep 300"))
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {machine.supervisor()}"])
    assert engine.wait(name, 60).exit_code == 137  # at the time limit it would still be running
    killer.wait()
    engine.stop(name, 1)


CALLER = """
import sys, time
from launcher.node.process.engine import ProcessEngine
ProcessEngine("local-0").start(sys.argv[1])
print("started", flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_a_container_outlives_its_caller_and_a_ctrl_c(machine: Machine) -> None:
    engine, name = machine.create(machine.spec("echo ready; sleep 1; echo done"))
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, name, "30"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"started\n"
    os.killpg(caller.pid, signal.SIGINT)
    os.killpg(caller.pid, signal.SIGKILL)
    caller.communicate()
    state = engine.wait(name, 60)
    assert (state.exit_code, machine.log()) == (0, "ready\ndone\n")


def test_a_container_holds_no_stream_of_its_caller(machine: Machine) -> None:
    """`launcher up -d | cat` must exit."""
    engine, name = machine.create(machine.spec("exec sleep 300"))
    done = subprocess.run([sys.executable, "-c", CALLER, name, "0"], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"started\n"
    engine.stop(name, 5)
