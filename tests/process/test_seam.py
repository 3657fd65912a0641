"""Several nodes on one machine, their environment, and the rest of the Engine protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from launcher.errors import NodeUnreachable
from launcher.model import labels
from launcher.model.container import Phase
from launcher.node.process.engine import ProcessEngine
from tests.process.machine import Machine


def test_two_nodes_share_the_output_folder_and_are_listed_separately(machine: Machine) -> None:
    pairs = [machine.start(machine.spec(f"echo node {rank}; exit {rank}", rank)) for rank in (0, 1)]
    codes = [engine.wait(name, 20).exit_code for engine, name in pairs]
    assert codes == [0, 1]
    assert [machine.log(0), machine.log(1)] == ["node 0\n", "node 1\n"]
    assert [[s.name for s in engine.list({labels.RUN: machine.run})] for engine, _ in pairs] == [[n] for _, n in pairs]
    everything = ProcessEngine("local").list({labels.RUN: machine.run, labels.NODE: None})
    assert [s.name for s in everything] == [name for _, name in pairs]
    assert ProcessEngine("local").list({labels.RUN: "another"}) == []
    assert ProcessEngine("local").list({"launcher.unknown": None}) == []
    for engine, name in pairs:
        engine.remove(name)
    assert not (machine.output / ".node").exists()


def test_stopping_one_node_does_not_stop_the_other(machine: Machine) -> None:
    (first, one), (second, two) = [machine.start(machine.spec("exec sleep 300", rank)) for rank in (0, 1)]
    first.stop(one, 5)
    assert second.wait(two, 0.2).phase is Phase.RUNNING
    second.stop(two, 5)


def test_a_container_of_another_machine_in_a_shared_home_is_ignored(machine: Machine) -> None:
    engine, _ = machine.create(machine.spec("true"))
    spec = machine.output / ".node" / "local-0" / "spec.json"
    spec.write_text(json.dumps(json.loads(spec.read_text()) | {"machine": "another"}))
    assert engine.list({}) == []


def test_the_callers_environment_is_inherited_and_not_written_to_disk(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLERS_TOKEN", "hush-hush")
    engine, name = machine.start(machine.spec('[ ${#CALLERS_TOKEN} = 9 ] && [ "$OWN" = 1 ]', OWN="1"))
    assert engine.wait(name, 20).exit_code == 0
    for path in machine.home.rglob("*"):
        assert not path.is_file() or b"hush-hush" not in path.read_bytes(), path


def test_the_variables_of_a_run_that_starts_it_are_not_inherited(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller is a program of another run, whose time limit, rank and folders are in its environment."""
    others = {"LAUNCHER_TIMEOUT": "1", "LAUNCHER_GENERATION_OUTPUT": "/other", "LAUNCHER_JOB": "other/local-0"}
    others |= {"LAUNCHER_MIG": "a,b", "RANK": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**others, "LAUNCHER_SSH_CONFIG": "/my/config"}.items():
        monkeypatch.setenv(name, value)
    engine, name = machine.start(machine.spec("env"))
    assert engine.wait(name, 20).exit_code == 0
    found = dict(line.split("=", 1) for line in machine.log().splitlines() if "=" in line)
    assert not {*others} & {*found} - {"LAUNCHER_JOB"}
    assert found["LAUNCHER_JOB"] != "other/local-0"
    assert found["LAUNCHER_SSH_CONFIG"] == "/my/config"


def test_python_is_the_callers_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    engine, name = machine.start(machine.spec("python3 -c 'import sys; print(sys.prefix)'"))
    engine.wait(name, 20)
    assert machine.log() == f"{sys.prefix}\n"


def test_unusual_python_settings_of_the_caller_do_not_break_the_supervisor(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.home / "json.py").write_text("raise RuntimeError('not the json you meant')")
    monkeypatch.setenv("PYTHONPATH", str(machine.home))
    monkeypatch.chdir(machine.home)
    engine, name = machine.start(machine.spec("exit 6"))
    assert engine.wait(name, 20).exit_code == 6


def test_the_folder_is_private_to_the_user(machine: Machine) -> None:
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
    assert engine.wait(name, 240).exit_code == 0
    log = machine.output / ".node" / "local-0" / "output.log"
    assert log.stat().st_size < 30_000_000
    assert engine.logs(name, tail=1) == b"end\n"


def test_a_probe_returns_exit_code_and_output(machine: Machine) -> None:
    engine = ProcessEngine("local")
    spec = replace(machine.spec(""), argv=("sh", "-c", "echo out; echo err >&2; echo $OWN; exit 3"), env={"OWN": "1"})
    assert engine.run_probe(spec) == (3, b"out\n1\nerr\n")
    code, output = engine.run_probe(replace(spec, argv=("no-such",)))
    assert code == 127
    assert b"no-such" in output


def test_a_probe_that_hangs_is_ended(machine: Machine) -> None:
    began, mark = time.monotonic(), f"sleep 297.{os.getpid()}"  # other tests may run on this machine
    with pytest.raises(NodeUnreachable, match="did not exit within"):
        ProcessEngine("local").run_probe(replace(machine.spec(""), argv=("sh", "-c", f"{mark} & wait")), timeout=1)
    assert time.monotonic() - began < 60
    assert subprocess.call(["pgrep", "-f", mark], stdout=subprocess.DEVNULL) == 1


def test_facts_describe_this_machine_and_this_python() -> None:
    facts = ProcessEngine("local-1").facts()
    assert (facts.name, facts.host, facts.python, facts.engine) == ("local-1", "local", sys.executable, None)
    assert (facts.uid, facts.cpus, facts.home) == (os.getuid(), len(os.sched_getaffinity(0)), os.environ["HOME"])
    assert abs(facts.clock_offset) < 1
    assert any(i.name == "lo" for i in facts.interfaces)
