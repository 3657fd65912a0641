"""The engine for plain processes: from creation to removal, and restarts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest

from launcher.errors import EngineFailed, NameTaken
from launcher.model import labels
from launcher.model.container import Phase
from launcher.node.parallel import run_all
from launcher.node.process import folders, supervisor
from launcher.node.process.engine import ProcessEngine
from tests.process.machine import Machine


def test_a_container_from_creation_to_removal(machine: Machine) -> None:
    engine, name = machine.create(machine.spec("cat here; pwd; echo err >&2; exit 3"), here="code\n")
    (state,) = engine.list({labels.RUN: machine.run})
    assert (state.phase, state.exit_code, state.started) == (Phase.CREATED, None, 0.0)
    before = time.time()
    engine.start(name)
    state = engine.wait(name, 60)
    assert (state.phase, state.exit_code, state.restarts, state.error) == (Phase.EXITED, 3, 0, "")
    assert before <= state.started <= state.finished <= time.time()
    expected = f"code\n{machine.output}/workdir/local-0\nerr\n"
    assert machine.log() == expected
    assert engine.logs(name).decode() == expected
    assert engine.logs(name, tail=1) == b"err\n"
    engine.remove(name)
    engine.remove(name)
    assert engine.list({}) == []
    assert sorted(p.name for p in machine.output.iterdir()) == [".launcher-run", "errors", "logs", "state", "workdir"]


@pytest.mark.parametrize(("program", "code"), [("exit 0", 0), ("exit 42", 42), ("kill -9 $$", 137), ("kill $$", 143)])
@pytest.mark.parametrize("entry", [True, False])
def test_exit_codes_are_the_programs(machine: Machine, program: str, code: int, entry: bool) -> None:
    engine, name = machine.start(machine.spec(program, entry=entry))
    assert engine.wait(name, 60).exit_code == code


def test_wait_returns_running_at_its_time_limit(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("exec sleep 60"))
    began = time.monotonic()
    state = engine.wait(name, 0.5)
    assert 0.4 < time.monotonic() - began < 50
    assert (state.phase, state.exit_code) == (Phase.RUNNING, None)
    assert engine.stop(name, 60).phase is Phase.EXITED


def test_wait_returns_as_soon_as_the_container_ends(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("sleep 1", entry=False))
    state = engine.wait(name, 60)
    assert time.time() - state.finished < 30


def test_a_container_that_cannot_start_says_why(machine: Machine) -> None:
    spec = replace(machine.spec(""), argv=("no-such-program", "x"))
    engine, name = machine.create(spec)
    with pytest.raises(EngineFailed, match="no-such-program"):
        engine.start(name)
    state = engine.wait(name, 60)
    assert (state.phase, state.exit_code) == (Phase.EXITED, 127)
    assert "no-such-program" in state.error
    engine.remove(name)


def test_a_missing_code_folder_is_reported(machine: Machine) -> None:
    engine, name = machine.create(machine.spec("true"))
    shutil.rmtree(machine.output / "workdir")
    with pytest.raises(EngineFailed, match="workdir"):
        engine.start(name)


def test_a_name_can_be_used_only_once(machine: Machine) -> None:
    spec = machine.spec("true")
    engine, _ = machine.create(spec)
    with pytest.raises(NameTaken):
        engine.create(spec)


def test_starting_a_running_container_again_changes_nothing(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo started; exec sleep 60"))
    machine.wait_for_output("started")
    engine.start(name)
    assert machine.log() == "started\n"
    engine.stop(name, 60)


def test_a_container_can_be_removed_by_two_at_once(machine: Machine) -> None:
    """As by two `launcher down`: each finds files gone that it has just listed."""
    engine, name = machine.create(machine.spec("exit"))
    for number in range(5000):
        (machine.output / ".node" / "local-0" / "kit" / str(number)).touch()
    run_all([partial(engine.remove, name) for _ in range(4)])
    assert not (machine.output / ".node").exists()


def test_a_missing_container_is_an_error_except_for_remove(machine: Machine) -> None:
    engine = ProcessEngine("local-0")
    for call in (engine.start, engine.logs, lambda n: engine.wait(n, 1), lambda n: engine.stop(n, 1)):
        with pytest.raises(EngineFailed, match="no longer exists"):
            call("launcher-nothing-0")
    engine.remove("launcher-nothing-0")


def test_a_running_container_is_not_removed(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("exec sleep 60"))
    with pytest.raises(EngineFailed, match="still running"):
        engine.remove(name)
    engine.stop(name, 60)
    engine.remove(name)


def test_nodes_on_one_machine_can_be_removed_concurrently(machine: Machine) -> None:
    """They share a folder, which is removed with the last one."""
    for _ in range(5):
        nodes = [machine.create(machine.spec("true", rank)) for rank in range(8)]
        run_all([partial(engine.remove, name) for engine, name in nodes])
        assert not (machine.output / ".node").exists()


def test_containers_are_listed_while_others_are_removed(machine: Machine) -> None:
    """Also a folder that is removed after it was found."""
    engine, _ = machine.create(machine.spec("true"))
    others = " ".join(f"{number}/.node" for number in range(40))
    changes = f"while :; do mkdir -p {others}; rm -r [0-9]*; done"
    with subprocess.Popen(["sh", "-c", changes], cwd=machine.home / ".launcher") as changing:
        try:
            assert {len(engine.list({})) for _ in range(1000)} == {1}
        finally:
            changing.kill()


def test_the_end_of_a_short_program_spares_the_process_that_started_its_supervisor(machine: Machine) -> None:
    """It bears the container's name, and exits only when it is scheduled again."""
    _, name = machine.create(machine.spec("true", entry=False))
    (found,) = folders.every()
    spec = found.folder / supervisor.SPEC
    text = spec.read_text()
    spec.unlink()
    os.mkfifo(spec)  # the supervisor waits for its content
    environment = {**os.environ, supervisor.CONTAINER: name}
    starter = subprocess.Popen([sys.executable, "-I", "-S", supervisor.__file__, str(found.folder)], env=environment)
    machine.until(lambda: len(supervisor.processes(name)) == 2)
    starter.send_signal(signal.SIGSTOP)
    spec.write_text(text)
    state = found.folder / supervisor.STATE
    machine.until(lambda: state.exists() and '"exited"' in state.read_text())
    starter.send_signal(signal.SIGCONT)
    assert starter.wait(60) == 0


def test_a_failure_is_restarted_up_to_the_limit(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo attempt; exit 9", restarts=2))
    state = engine.wait(name, 60)
    assert (state.phase, state.exit_code, state.restarts) == (Phase.EXITED, 9, 2)
    assert machine.log() == "attempt\n" * 3
    attempts = (machine.output / "state" / "local-0.attempts").read_text().split()
    assert attempts.count("start") == attempts.count("exit") == 3


def test_a_successful_restart_ends_the_container(machine: Machine) -> None:
    program = "echo x >>count; [ $(wc -l <count) -eq 2 ]"
    engine, name = machine.start(machine.spec(program, restarts=5))
    state = engine.wait(name, 60)
    assert (state.exit_code, state.restarts) == (0, 1)


def test_a_success_is_not_restarted(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo once", restarts=5))
    assert engine.wait(name, 60).restarts == 0
    assert machine.log() == "once\n"


def test_a_stop_prevents_further_restarts(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo attempt; exec sleep 300", restarts=5))
    machine.wait_for_output("attempt")
    state = engine.stop(name, 60)
    assert (state.exit_code, state.restarts) == (143, 0)
    assert machine.log() == "attempt\n"


def test_a_stop_between_two_attempts_ends_the_container(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("exit 1", restarts=100))
    machine.until(lambda: engine.list({})[0].restarts >= 3)
    state = engine.stop(name, 60)
    assert state.phase is Phase.EXITED
    attempts = state.restarts
    assert machine.alive() == set()  # its supervisor neither
    assert engine.list({})[0].restarts == attempts


def test_processes_left_by_an_attempt_are_gone_before_the_next(machine: Machine) -> None:
    mark = f"sleep 298.{os.getpid()}"  # other tests may run on this machine
    program = f"pgrep -xf '{mark}' && exit 0; (setsid {mark} >/dev/null 2>&1 &); sleep 0.3; exit 1"
    engine, name = machine.start(machine.spec(program, restarts=2, entry=False))
    assert engine.wait(name, 60).exit_code == 1
