"""Plain processes as an engine, with real supervisors, signals and archives."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher import kit
from launcher.errors import EngineFailed, LauncherError, NameTaken
from launcher.model import labels
from launcher.model.container import ContainerSpec, Layout, Phase
from launcher.model.facts import Reach
from launcher.node.parallel import every
from launcher.node.process import supervisor
from launcher.node.process.engine import ProcessEngine

RUN = "job-20261121-120000-abcd"


class Machine:
    """A home of its own, engines, and the containers that tests make in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.output = home / ".launcher" / RUN
        self.names: list[str] = []

    def spec(self, program: str, rank: int = 0, restarts: int = 0, entry: bool = True, **env: str) -> ContainerSpec:
        """A node that runs `sh -c program` behind the entry script."""
        node = f"local-{rank}"
        own = self.output / ".node" / node
        argv = ("sh", "-c", textwrap.dedent(program))
        return ContainerSpec(
            name=f"launcher-{RUN}-{rank}",
            image="",
            argv=("sh", f"{own}/kit/entry.sh", *argv) if entry else argv,
            env={"LAUNCHER_RUN": RUN, "LAUNCHER_NODE": node, "LAUNCHER_OUTPUT": str(self.output), **env},
            labels={labels.RUN: RUN, labels.NODE: node, labels.PURPOSE: "run"},
            layout=Layout(f"{own}/code", str(self.output), f"{own}/kit"),
            output_dir=str(self.output),
            user="",
            restarts=restarts,
        )

    def create(self, spec: ContainerSpec, **code: str) -> tuple[ProcessEngine, str]:
        engine = ProcessEngine(spec.labels[labels.NODE])
        engine.files.make_dir(spec.output_dir)
        name = engine.create(spec)
        self.names.append(name)
        engine.put(name, archive(spec, code))
        return engine, name

    def start(self, spec: ContainerSpec, **code: str) -> tuple[ProcessEngine, str]:
        engine, name = self.create(spec, **code)
        engine.start(name)
        return engine, name

    def log(self, rank: int = 0) -> str:
        log = self.output / "logs" / f"local-{rank}.log"
        return log.read_text() if log.exists() else ""

    def until(self, condition: Callable[[], object], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s; the log: {self.log()}"
            time.sleep(0.02)

    def said(self, text: str, rank: int = 0) -> None:
        self.until(lambda: text in self.log(rank))

    def supervisor(self, rank: int = 0) -> int:
        return int(json.loads((self.output / ".node" / f"local-{rank}" / "state.json").read_text())["supervisor"])

    def alive(self) -> set[int]:
        return {pid for name in self.names for pid in supervisor.processes(name)}


def archive(spec: ContainerSpec, code: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        home = tarfile.TarInfo(f"{spec.layout.kit}/home".lstrip("/"))
        home.type, home.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(home)
        files = {f"{spec.layout.kit}/{n}": t for n, t in kit.scripts().items()}
        files |= {f"{spec.layout.code}/{n}": t.encode() for n, t in code.items()}
        for name, data in files.items():
            info = tarfile.TarInfo(name.lstrip("/"))
            info.size, info.mode, info.uid = len(data), 0o755, 4711
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Machine(tmp_path)
    yield made
    left = made.alive()
    for name in made.names:
        supervisor.end(name)
    assert not left or any(made.output.glob(".node/*/state.json")), f"processes without a folder: {left}"


# --- the life of one


def test_a_container_from_its_making_to_its_removal(machine: Machine) -> None:
    engine, name = machine.create(machine.spec("cat here; pwd; echo err >&2; exit 3"), here="code\n")
    (state,) = engine.list({labels.RUN: RUN})
    assert (state.phase, state.exit_code, state.started) == (Phase.CREATED, None, 0.0)
    before = time.time()
    engine.start(name)
    state = engine.wait(name, 20)
    assert (state.phase, state.exit_code, state.restarts, state.error) == (Phase.EXITED, 3, 0, "")
    assert before <= state.started <= state.finished <= time.time()
    said = f"code\n{machine.output}/.node/local-0/code\nerr\n"
    assert machine.log() == said
    assert engine.logs(name).decode() == said
    assert engine.logs(name, tail=1) == b"err\n"
    engine.remove(name)
    engine.remove(name)
    assert engine.list({}) == []
    assert sorted(p.name for p in machine.output.iterdir()) == ["errors", "logs", "state"]


@pytest.mark.parametrize(("program", "code"), [("exit 0", 0), ("exit 42", 42), ("kill -9 $$", 137), ("kill $$", 143)])
@pytest.mark.parametrize("entry", [True, False])
def test_exit_codes_are_the_programs(machine: Machine, program: str, code: int, entry: bool) -> None:
    engine, name = machine.start(machine.spec(program, entry=entry))
    assert engine.wait(name, 20).exit_code == code


def test_wait_ends_at_its_time_and_tells_that_it_runs(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("exec sleep 60"))
    began = time.monotonic()
    state = engine.wait(name, 0.5)
    assert 0.4 < time.monotonic() - began < 3
    assert (state.phase, state.exit_code) == (Phase.RUNNING, None)
    assert engine.stop(name, 5).phase is Phase.EXITED


def test_wait_tells_of_the_end_at_once(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("sleep 1", entry=False))
    state = engine.wait(name, 20)
    assert time.time() - state.finished < 0.5


def test_one_that_cannot_start_says_why(machine: Machine) -> None:
    spec = replace(machine.spec(""), argv=("no-such-program", "x"))
    engine, name = machine.create(spec)
    with pytest.raises(EngineFailed, match="no-such-program"):
        engine.start(name)
    state = engine.wait(name, 5)
    assert (state.phase, state.exit_code) == (Phase.EXITED, 127)
    assert "no-such-program" in state.error
    engine.remove(name)


def test_one_whose_code_folder_is_gone_says_so(machine: Machine) -> None:
    engine, name = machine.create(machine.spec("true"))
    shutil.rmtree(machine.output / ".node" / "local-0" / "code")
    with pytest.raises(EngineFailed, match="code"):
        engine.start(name)


def test_a_name_is_given_once(machine: Machine) -> None:
    spec = machine.spec("true")
    engine, _ = machine.create(spec)
    with pytest.raises(NameTaken):
        engine.create(spec)


def test_starting_a_running_one_again_changes_nothing(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo started; exec sleep 60"))
    machine.said("started")
    engine.start(name)
    assert machine.log() == "started\n"
    engine.stop(name, 5)


def test_what_does_not_exist_is_an_error_but_not_for_remove(machine: Machine) -> None:
    engine = ProcessEngine("local-0")
    for call in (engine.start, engine.logs, lambda n: engine.wait(n, 1), lambda n: engine.stop(n, 1)):
        with pytest.raises(EngineFailed, match="gone"):
            call("launcher-nothing-0")
    engine.remove("launcher-nothing-0")


def test_a_running_one_is_not_removed(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("exec sleep 60"))
    with pytest.raises(EngineFailed, match="still runs"):
        engine.remove(name)
    engine.stop(name, 5)
    engine.remove(name)


def test_nodes_of_one_machine_are_removed_at_once(machine: Machine) -> None:
    """They share a folder, which the last one takes along."""
    for _ in range(5):
        nodes = [machine.create(machine.spec("true", rank)) for rank in range(8)]
        every([partial(engine.remove, name) for engine, name in nodes])
        assert not (machine.output / ".node").exists()


# --- stopping


def test_a_stop_is_one_sigterm_and_time_to_end(machine: Machine) -> None:
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
    machine.said("ready")
    state = engine.stop(name, 10)
    assert (state.phase, state.exit_code) == (Phase.EXITED, 0)
    assert machine.log() == "ready\nsaved 1\n"
    assert machine.alive() == set()


def test_what_does_not_listen_is_killed_after_the_grace(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
    machine.said("ready")
    began = time.monotonic()
    state = engine.stop(name, 1)
    assert 0.9 < time.monotonic() - began < 8
    assert (state.phase, state.exit_code) == (Phase.EXITED, 137)
    assert machine.alive() == set()


def test_a_stop_without_grace_is_quick(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("trap '' TERM; echo ready; sleep 60; sleep 60"))
    machine.said("ready")
    began = time.monotonic()
    assert engine.stop(name, 0).phase is Phase.EXITED
    assert time.monotonic() - began < 3
    assert machine.alive() == set()


def test_a_second_stop_shortens_the_first(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
    machine.said("ready")
    first = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from launcher.node.process.engine import *; ProcessEngine('local-0').stop({name!r}, 60)",
        ]
    )
    time.sleep(1.5)
    began = time.monotonic()
    assert engine.stop(name, 0).phase is Phase.EXITED
    assert time.monotonic() - began < 5
    assert first.wait(10) == 0


def test_stopping_what_has_ended_or_never_began_is_no_error(machine: Machine) -> None:
    engine, name = machine.create(machine.spec("exit 4"))
    assert engine.stop(name, 5).phase is Phase.CREATED
    engine.start(name)
    engine.wait(name, 20)
    assert engine.stop(name, 5).exit_code == 4


ESCAPES = {
    "background": "sleep 300 & echo ready; wait",
    "own session": "setsid sh -c 'trap \"\" TERM HUP; sleep 300; sleep 300' & echo ready; wait",
    "daemon": "(setsid sleep 300 >/dev/null 2>&1 &) ; echo ready; sleep 300",
    "no environment": "(env -i setsid sleep 300 >/dev/null 2>&1 &) ; echo ready; sleep 300",
}


@pytest.mark.parametrize("program", ESCAPES.values(), ids=ESCAPES.keys())
@pytest.mark.parametrize("how", ["stop", "end"])
def test_nothing_that_it_started_outlives_it(machine: Machine, program: str, how: str) -> None:
    if how == "end":
        program = program.replace("; wait", "; sleep 0.3").replace("ready; sleep 300", "ready; sleep 0.3")
    engine, name = machine.start(machine.spec(program, entry=False))
    machine.until(lambda: b"ready" in engine.logs(name))
    time.sleep(0.2)
    everything = supervisor.processes(name, machine.supervisor())
    assert len(everything) >= 2
    engine.stop(name, 2) if how == "stop" else engine.wait(name, 20)
    machine.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everything), 2)


def test_a_program_that_leaves_its_folder_behind_ends_with_it(machine: Machine) -> None:
    """Somebody removes the run by hand: its processes must not go on without anybody knowing of them."""
    _, name = machine.start(machine.spec("exec sleep 300"))
    everything = machine.alive()
    assert everything

    def removed() -> bool:  # it is being written to, so once may not be enough
        shutil.rmtree(machine.output, ignore_errors=True)
        return not machine.output.exists()

    machine.until(removed, 5)
    machine.until(lambda: not machine.alive(), 10)
    assert name


# --- restarts


def test_a_failure_is_restarted_as_often_as_allowed(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo attempt; exit 9", restarts=2))
    state = engine.wait(name, 30)
    assert (state.phase, state.exit_code, state.restarts) == (Phase.EXITED, 9, 2)
    assert machine.log() == "attempt\n" * 3
    attempts = (machine.output / "state" / "local-0.attempts").read_text().split()
    assert attempts.count("start") == attempts.count("exit") == 3


def test_a_restart_that_succeeds_ends_it(machine: Machine) -> None:
    program = "echo x >>count; [ $(wc -l <count) -eq 2 ]"
    engine, name = machine.start(machine.spec(program, restarts=5))
    state = engine.wait(name, 30)
    assert (state.exit_code, state.restarts) == (0, 1)


def test_a_success_is_not_restarted(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo once", restarts=5))
    assert engine.wait(name, 20).restarts == 0
    assert machine.log() == "once\n"


def test_a_stop_ends_the_restarts(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo attempt; exec sleep 300", restarts=5))
    machine.said("attempt")
    state = engine.stop(name, 5)
    assert (state.exit_code, state.restarts) == (143, 0)
    assert machine.log() == "attempt\n"


def test_a_stop_between_two_attempts_is_the_end(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("exit 1", restarts=100))
    machine.until(lambda: engine.list({})[0].restarts >= 3)
    state = engine.stop(name, 5)
    assert state.phase is Phase.EXITED
    attempts = state.restarts
    time.sleep(1)
    assert engine.list({})[0].restarts == attempts


def test_what_an_attempt_left_behind_does_not_meet_the_next(machine: Machine) -> None:
    program = "pgrep -xf 'sleep 298' && exit 0; (setsid sleep 298 >/dev/null 2>&1 &); sleep 0.3; exit 1"
    engine, name = machine.start(machine.spec(program, restarts=2, entry=False))
    assert engine.wait(name, 30).exit_code == 1


# --- what a kill -9, a Ctrl-C and the caller's end do


def test_a_killed_supervisor_is_told_and_what_it_left_is_ended(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("echo ready; sleep 300"))
    machine.said("ready")
    os.kill(machine.supervisor(), signal.SIGKILL)
    state = engine.wait(name, 5)
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
    began = time.monotonic()
    assert engine.wait(name, 30).exit_code == 137
    assert time.monotonic() - began < 5
    killer.wait()
    engine.stop(name, 1)


CALLER = """
import sys, time
from launcher.node.process.engine import ProcessEngine
ProcessEngine("local-0").start(sys.argv[1])
print("started", flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_it_outlives_its_caller_and_a_ctrl_c(machine: Machine) -> None:
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
    state = engine.wait(name, 20)
    assert (state.exit_code, machine.log()) == (0, "ready\ndone\n")


def test_it_holds_no_stream_of_its_caller(machine: Machine) -> None:
    """`launcher up -d | cat` must end."""
    engine, name = machine.create(machine.spec("exec sleep 300"))
    done = subprocess.run([sys.executable, "-c", CALLER, name, "0"], capture_output=True, timeout=20, check=True)
    assert done.stdout == b"started\n"
    engine.stop(name, 5)


# --- several nodes on one machine


def test_two_nodes_share_the_output_and_know_their_own(machine: Machine) -> None:
    pairs = [machine.start(machine.spec(f"echo node {rank}; exit {rank}", rank)) for rank in (0, 1)]
    codes = [engine.wait(name, 20).exit_code for engine, name in pairs]
    assert codes == [0, 1]
    assert [machine.log(0), machine.log(1)] == ["node 0\n", "node 1\n"]
    assert [[s.name for s in engine.list({labels.RUN: RUN})] for engine, _ in pairs] == [[n] for _, n in pairs]
    everything = ProcessEngine("local").list({labels.RUN: RUN, labels.NODE: None})
    assert [s.name for s in everything] == [name for _, name in pairs]
    assert ProcessEngine("local").list({labels.RUN: "another"}) == []
    assert ProcessEngine("local").list({"launcher.unknown": None}) == []
    for engine, name in pairs:
        engine.remove(name)
    assert not (machine.output / ".node").exists()


def test_stopping_one_node_leaves_the_other(machine: Machine) -> None:
    (first, one), (second, two) = [machine.start(machine.spec("exec sleep 300", rank)) for rank in (0, 1)]
    first.stop(one, 5)
    assert second.wait(two, 0.2).phase is Phase.RUNNING
    second.stop(two, 5)


def test_a_container_of_another_machine_in_a_shared_home_is_not_ours(machine: Machine) -> None:
    engine, _ = machine.create(machine.spec("true"))
    spec = machine.output / ".node" / "local-0" / "spec.json"
    spec.write_text(json.dumps(json.loads(spec.read_text()) | {"machine": "another"}))
    assert engine.list({}) == []


# --- environment


def test_the_callers_environment_is_inherited_and_stays_off_the_disk(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLERS_TOKEN", "hush-hush")
    engine, name = machine.start(machine.spec('[ ${#CALLERS_TOKEN} = 9 ] && [ "$OWN" = 1 ]', OWN="1"))
    assert engine.wait(name, 20).exit_code == 0
    for path in machine.home.rglob("*"):
        assert not path.is_file() or b"hush-hush" not in path.read_bytes(), path


def test_python_is_the_callers_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    engine, name = machine.start(machine.spec("python3 -c 'import sys; print(sys.prefix)'"))
    engine.wait(name, 20)
    assert machine.log() == f"{sys.prefix}\n"


def test_a_callers_odd_python_settings_do_not_break_the_supervisor(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.home / "json.py").write_text("raise RuntimeError('not the json you meant')")
    monkeypatch.setenv("PYTHONPATH", str(machine.home))
    monkeypatch.chdir(machine.home)
    engine, name = machine.start(machine.spec("exit 6"))
    assert engine.wait(name, 20).exit_code == 6


def test_the_folder_is_nobody_elses(machine: Machine) -> None:
    engine, name = machine.start(machine.spec("true"))
    engine.wait(name, 20)
    for folder in (machine.home / ".launcher", machine.output, machine.output / ".node" / "local-0"):
        assert folder.stat().st_mode & 0o077 == 0, folder
    assert (machine.output / ".node" / "local-0" / "spec.json").stat().st_mode & 0o077 == 0


def test_the_engines_own_log_is_capped(machine: Machine) -> None:
    program = """
        i=0
        while [ $i -lt 40 ]; do head -c 1000000 /dev/zero | tr '\\0' x; echo; i=$((i+1)); sleep 0.05; done
        echo end
    """
    engine, name = machine.start(machine.spec(program, entry=False))
    engine.wait(name, 60)
    log = machine.output / ".node" / "local-0" / "output.log"
    assert log.stat().st_size < 30_000_000
    assert engine.logs(name, tail=1) == b"end\n"


# --- archives


def hostile(member: Callable[[tarfile.TarInfo], None], name: str, data: bytes = b"x") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        member(info)
        info.size = len(data) if info.isreg() else 0
        tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _file(info: tarfile.TarInfo) -> None:
    info.type = tarfile.REGTYPE


def _kind(kind: bytes, target: str = "") -> Callable[[tarfile.TarInfo], None]:
    def make(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, target

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


BAD = [
    ("{code}/../../../x", _file),
    ("../x", _file),
    ("{abs}/x", _file),
    ("{node}/spec.json", _file),
    ("{node}/state.json", _file),
    ("tmp/x", _file),
    ("{node}", _file),
    ("{code}/hard", _kind(tarfile.LNKTYPE, "etc/passwd")),
    ("{code}/device", _kind(tarfile.CHRTYPE)),
    ("{code}/block", _kind(tarfile.BLKTYPE)),
    ("{code}/fifo", _kind(tarfile.FIFOTYPE)),
    ("{code}", _kind(tarfile.SYMTYPE, "/etc")),
]


@pytest.mark.parametrize(("name", "member"), BAD)
def test_an_archive_that_wants_to_go_elsewhere_is_refused(
    machine: Machine, name: str, member: Callable[[tarfile.TarInfo], None]
) -> None:
    spec = machine.spec("true")
    engine, container = machine.create(spec)
    before = contents(machine.home)
    code = spec.layout.code.lstrip("/")
    node = str(Path(code).parent)
    with pytest.raises(EngineFailed, match="refused"):
        engine.put(container, hostile(member, name.format(code=code, node=node, abs=spec.layout.code)))
    assert contents(machine.home) == before


def test_nothing_is_written_through_a_link(machine: Machine, tmp_path: Path) -> None:
    spec = machine.spec("true")
    engine, container = machine.create(spec)
    outside = tmp_path / "outside"
    outside.mkdir()
    code = spec.layout.code.lstrip("/")
    link = hostile(_kind(tarfile.SYMTYPE, str(outside)), f"{code}/data")
    engine.put(container, link)  # a link in a code folder may point anywhere
    with pytest.raises(EngineFailed):
        engine.put(container, hostile(_file, f"{code}/data/x"))
    assert list(outside.iterdir()) == []
    engine.put(container, hostile(_file, f"{code}/data"))  # a file takes the link's place
    assert Path(spec.layout.code, "data").read_bytes() == b"x"
    assert list(outside.iterdir()) == []


def test_what_is_no_archive_is_refused(machine: Machine) -> None:
    engine, container = machine.create(machine.spec("true"))
    with pytest.raises(EngineFailed, match="refused"):
        engine.put(container, b"not a tar archive at all" * 100)


NAMES = st.lists(st.sampled_from(["..", ".", "", "code", "kit", "x", "link", "/", "spec.json", "a"]), max_size=5)
MEMBERS = st.lists(
    st.tuples(
        NAMES, st.sampled_from(["file", "dir", "link", "hard"]), st.sampled_from(["..", "/", "x", "../..", "link"])
    ),
    max_size=6,
)
KINDS = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=MEMBERS, prefix=st.sampled_from(["code", "kit", "", "node"]))
def test_no_archive_at_all_writes_outside(
    machine: Machine, members: list[tuple[list[str], str, str]], prefix: str
) -> None:
    spec = machine.spec("true")
    engine = ProcessEngine("local-0")
    engine.files.make_dir(spec.output_dir)
    engine.remove(spec.name)
    container = engine.create(spec)
    start = {"code": spec.layout.code, "kit": spec.layout.kit, "": "", "node": str(Path(spec.layout.kit).parent)}[
        prefix
    ]
    inside = [str(Path(p).relative_to(machine.home)) for p in (spec.layout.code, spec.layout.kit)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for parts, kind, target in members:
            info = tarfile.TarInfo("/".join([start.lstrip("/"), *parts]))
            info.type, info.linkname = KINDS[kind], target
            info.size = 3 if kind == "file" else 0
            tar.addfile(info, io.BytesIO(b"bad"))

    def elsewhere() -> dict[str, bytes]:
        return {name: data for name, data in contents(machine.home).items() if not name.startswith(tuple(inside))}

    before = elsewhere()
    with suppress(LauncherError):
        engine.put(container, buffer.getvalue())
    assert elsewhere() == before


# --- the rest of the seam


def test_a_probe_gives_its_code_and_output(machine: Machine) -> None:
    engine = ProcessEngine("local")
    spec = replace(machine.spec(""), argv=("sh", "-c", "echo out; echo err >&2; echo $OWN; exit 3"), env={"OWN": "1"})
    assert engine.run_probe(spec) == (3, b"out\nerr\n1\n")
    with pytest.raises(EngineFailed, match="no-such"):
        engine.run_probe(replace(spec, argv=("no-such",)))


def test_a_probe_that_hangs_is_ended(machine: Machine) -> None:
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="did not end"):
        ProcessEngine("local").run_probe(replace(machine.spec(""), argv=("sh", "-c", "sleep 297 & wait")), timeout=1)
    assert time.monotonic() - began < 5
    assert subprocess.call(["pgrep", "-f", "sleep 297"], stdout=subprocess.DEVNULL) == 1


def test_reach_tells_open_from_refused() -> None:
    engine = ProcessEngine("local")
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        assert engine.reach("127.0.0.1", port, 2) is Reach.OPEN
    assert engine.reach("127.0.0.1", port, 2) is Reach.REFUSED


def test_facts_are_of_this_machine_and_this_python() -> None:
    facts = ProcessEngine("local-1").facts()
    assert (facts.name, facts.host, facts.python, facts.engine) == ("local-1", "local", sys.executable, None)
    assert (facts.uid, facts.cpus, facts.home) == (os.getuid(), len(os.sched_getaffinity(0)), os.environ["HOME"])
    assert abs(facts.clock_offset) < 1
    assert any(i.name == "lo" for i in facts.interfaces)


# --- with torchrun in it

WORKERS = """
import os, signal, sys, time
import torch, torch.distributed as dist
attempt = len(open(os.environ["LAUNCHER_OUTPUT"] + "/state/local-0.attempts").read().split("start")) - 1
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "attempt", attempt, "sum", int(total), flush=True)
if attempt == 1:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(total)  # fails when the other is gone
        time.sleep(0.1)
dist.destroy_process_group()
"""


def test_a_killed_worker_brings_both_nodes_back_and_the_run_finishes(machine: Machine) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]

    def node(rank: int) -> ContainerSpec:
        kit_folder = machine.output / ".node" / f"local-{rank}" / "kit"
        program = (
            f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --node_rank {rank} --nproc_per_node 1"
            f" --master_addr 127.0.0.1 --master_port {port} --rdzv_backend static --max_restarts 0"
            f" --no_python sh {kit_folder}/rank.sh {sys.executable} workers.py"
        )
        return machine.spec(program, rank, restarts=2, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

    pairs = [machine.start(node(rank), **{"workers.py": WORKERS}) for rank in (0, 1)]
    states = [engine.wait(name, 150) for engine, name in pairs]
    assert [state.exit_code for state in states] == [0, 0], machine.log(0) + machine.log(1)
    assert all(state.restarts >= 1 for state in states)
    for rank in (0, 1):
        lines = (machine.output / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} attempt 1 sum 2" in lines
        assert f"rank {rank} attempt 2 sum 2" in lines
    assert machine.alive() == set()
