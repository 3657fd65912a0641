"""`launcher doctor --bench`: measures all components, finds a slow node, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.features.bench import container_scripts
from launcher.features.bench.run import bench as measure
from launcher.node.connect import connect
from launcher.node.process import supervisor
from launcher.node.process.engine import ProcessEngine
from launcher.run.end.leftovers import Leftovers, find_leftovers, remove_leftovers
from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.e2e.scene import Scene

pytestmark = pytest.mark.timeout(300)
SCRIPTS = Path(container_scripts.__file__).parent


def job(cli: Cli, nodes: int) -> Path:
    local = {"runtime": "process", "nodes": ["local"] * nodes, "gpus": "none", "env": {"OMP_NUM_THREADS": "1"}}
    return cli.job("bench", **local, run={"command": ["true"]})


def left(cli: Cli) -> list[Path]:
    """Remaining output folders; locks and cached facts of this machine are in hidden folders."""
    return [path for path in Path(cli.env["HOME"], ".launcher").glob("*") if not path.name.startswith(".")]


def kinds(bench: dict[str, Any], node: str) -> set[str]:
    return {measure["kind"] for measure in bench["measures"] if node in (measure["node"], measure["to"])}


def until(happened: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Wait for a true value and return it; the launcher must still be running."""
    deadline = time.monotonic() + 90
    while not (found := happened()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def has_started(cli: Cli, node: str) -> Callable[[], bool]:
    def check() -> bool:
        logs = Path(cli.env["HOME"], ".launcher").glob(f"*/logs/{node}.log")
        return any('"begun"' in log.read_text() for log in logs)

    return check


@pytest.mark.ci
def test_two_nodes_are_measured_and_nothing_is_left(home_cli: Cli) -> None:
    done = home_cli("doctor", job(home_cli, 2), "--bench", "--minutes", "0.1", "--json", code=None)
    bench = json.loads(done.stdout)["bench"]
    assert done.returncode == (0 if all(each["undecided"] for each in bench["findings"]) else 3)
    for node in ("local-0", "local-1"):
        assert kinds(bench, node) >= {"matmul", "memory"}
    ways = [measure["kind"] for measure in bench["measures"]].count("bandwidth")
    # On a busy machine a pair may miss its time slot: it is reported as failed, or a node's CPU as slow.
    why = [each for each in bench["findings"] if each["what"].startswith("failed: ") or each["part"] == "processor"]
    assert ways == 2 or why
    assert (bench["lost"], bench["skipped"]) == ({}, {})
    assert left(home_cli) == []


@pytest.mark.ci
def test_a_node_that_does_not_respond_is_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("home", "project"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "project")
    local = {"runtime": "process", "nodes": ["local"] * 3, "gpus": "none", "env": {"OMP_NUM_THREADS": "1"}}
    job = launcher.load({"name": "bench", "run": {"command": ["true"]}, **local})
    with connect(job.hosts(), job.runtime, None) as fleet:
        found = measure(job, fleet, 3, {"local-1": "no response within 10 s"}, lambda _: None)
    assert found.skipped == {"local-1": "no response within 10 s"}
    assert found.nodes == ("local-0", "local-2")
    assert {measure.node for measure in found.measures} | set(found.lost) == {"local-0", "local-2"}


@pytest.mark.slow
def test_a_lost_node_is_reported_and_the_others_are_evaluated(home_cli: Cli) -> None:
    process = home_cli.start("doctor", job(home_cli, 3), "--bench", "--minutes", "0.5", "--json")
    until(has_started(home_cli, "local-2"), process)
    found = subprocess.run(["pgrep", "-f", "bench_node.py"], capture_output=True, text=True, check=True).stdout.split()
    (lost,) = [pid for pid in found if is_rank(pid, 2, home_cli)]
    subprocess.run(["kill", "-9", lost], check=True)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    bench = json.loads(out)["bench"]
    assert list(bench["lost"]) == ["local-2"]
    assert bench["findings"][0]["nodes"] == ["local-2"]
    pairs = {(m["node"], m["to"]) for m in bench["measures"] if m["kind"] == "bandwidth"}
    assert pairs >= {("local-0", "local-1"), ("local-1", "local-0")}
    assert left(home_cli) == []


def is_rank(pid: str, rank: int, cli: Cli) -> bool:
    """Return whether this is the Python process of the rank, in this test's home folder."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        program = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    except OSError:
        return False
    in_this_home = any(value.startswith("LAUNCHER_OUTPUT=") and cli.env["HOME"] in value for value in variables)
    return in_this_home and f"RANK={rank}" in variables and "python" in program and "supervisor" not in program


@pytest.mark.ci
def test_a_paused_node_exits_instead_of_reporting_what_it_measured(tmp_path: Path) -> None:
    for name in ("bench_node.py", "bench_links.py", "bench_parts.py"):
        script = (SCRIPTS / name).read_text()
        (tmp_path / name).write_text(script.replace("PAUSED = 10.0", "PAUSED = 2.0"))
    times = {"join": 60, "local": 60, "read": 0, "pair": 0, "together": 0}
    spec = {"times": times, "rounds": [], "paths": [], "gpus": False, "precision": "none", "model": None}
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, str(tmp_path / "bench_node.py"), json.dumps(spec)]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert '"kind": "begun"' in process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read().splitlines()[-1].startswith("paused for ")
        assert process.wait() == 75


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_leave_nothing_also_if_repeated(home_cli: Cli, stop: signal.Signals) -> None:
    process = home_cli.start("doctor", job(home_cli, 2), "--bench", "--minutes", "2")
    until(has_started(home_cli, "local-1"), process)
    process.send_signal(stop)
    until(lambda: list(Path(home_cli.env["HOME"], ".launcher").glob(f"*/.node/*/{supervisor.STOP}")), process)
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    assert "kept" not in err
    assert process.returncode == 5  # exit code of Ctrl-C
    assert left(home_cli) == []


def leftovers(engine: ProcessEngine) -> Leftovers:
    (found,) = find_leftovers([engine], [])
    assert isinstance(found, Leftovers)
    return found


@pytest.mark.slow
def test_clean_removes_leftovers_of_a_killed_doctor(home_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    process = home_cli.start("doctor", job(home_cli, 2), "--bench", "--minutes", "0.5")
    until(has_started(home_cli, "local-1"), process)
    process.kill()
    process.communicate()
    another = home_cli("doctor", job(home_cli, 2), "--bench", code=3).stdout  # beside its containers
    assert "skipped local-0: in use: `doctor --bench` of " in another
    assert another.endswith("\nnothing was measured; repeat the command once a node is free and passes its checks\n")
    monkeypatch.setenv("HOME", home_cli.env["HOME"])
    engine, deadline = ProcessEngine("local"), time.monotonic() + 90
    assert not leftovers(engine).containers  # still running
    while len(leftovers(engine).containers) < 2:
        assert time.monotonic() < deadline
        time.sleep(1)
    remove_leftovers(leftovers(engine))
    assert left(home_cli) == []


@pytest.mark.slow
@pytest.mark.bed
@pytest.mark.parametrize("scene", [4], indirect=True)
def test_a_slow_link_and_a_lost_node_on_the_bed(scene: Scene) -> None:
    """The node with a slow link is reported, even if another node loses power during the measurement."""
    bed, cli = scene.bed, scene.cli
    path = cli.job("bench", **bed_job(nodes=[node.alias for node in scene.nodes], run={"command": ["true"]}))
    slow, lost = scene.nodes[1], scene.nodes[3]
    bed.sh(slow, "tc qdisc replace dev eth0 root tbf rate 20mbit burst 64kb latency 50ms")
    try:
        bench = json.loads(cli("doctor", path, "--bench", "--minutes", "1", "--json", code=3).stdout)["bench"]
        assert [slow.alias] in [each["nodes"] for each in bench["findings"] if each["kinds"] == ["sends"]]
        assert bed.wait_clean(scene.nodes, home=True) == []
        process = cli.start("doctor", path, "--bench", "--minutes", "1", "--json")
        log = f"cat /home/*/.launcher/*/logs/{lost.alias}.log 2>/dev/null || true"
        until(lambda: '"begun"' in bed.sh(lost, log), process)
        with faults.powered_off(bed, lost):
            out, err = process.communicate(timeout=240)
        assert process.returncode == 3, err
        bench = json.loads(out)["bench"]
        assert list(bench["lost"]) == [lost.alias]
        assert slow.alias in [name for each in bench["findings"][1:] for name in each["nodes"]], bench
        assert bed.wait_clean(scene.nodes[:3], home=True) == []
    finally:
        bed.run(slow, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)


@pytest.mark.bed
def test_an_image_without_python_is_known_before_the_measurement(bed_cli: Cli, bed: Bed) -> None:
    node, removed = bed.nodes[0], "rm -f $(command -v python3 python) /usr/bin/python* /usr/local/bin/python*"
    bed.docker(node, "run", "--name=python-less", "--user=0", "--entrypoint=sh", "launcher-bed-train", "-c", removed)
    bed.docker(node, "commit", "python-less", "python-less")
    bed.docker(node, "rm", "python-less")
    one = bed_job(nodes=["node1"], image={"ref": "python-less"}, mounts={}, env={}, run={"command": ["true"]})
    done = bed_cli("doctor", bed_cli.job(**one), "--bench", code=4)
    assert "error image python-less: has no Python, which --bench needs" in done.stderr
    bed.docker(node, "rmi", "python-less")


@pytest.mark.bed
def test_bench_uses_the_image_that_the_lock_file_pins(bed_cli: Cli) -> None:
    path = bed_cli.job("pinned", **bed_job(image={"base": "launcher-bed-train"}, run={"command": ["true"]}))
    path.with_suffix(".lock.json").write_text("{}")
    refused = bed_cli("doctor", path, "--bench", "--minutes", "0.1", code=2)
    assert "pinned.lock.json" in refused.stderr


@pytest.mark.bed
def test_the_nodes_of_the_bed_are_measured(bed_cli: Cli, bed: Bed) -> None:
    path = bed_cli.job("bench", **bed_job(run={"command": ["true"]}))
    done = bed_cli("doctor", path, "--bench", "--minutes", "0.3", "--json", code=None)
    report = json.loads(done.stdout)
    faulty = [found for found in report["bench"]["findings"] if not found["undecided"]]
    assert done.returncode == (3 if faulty else 0)  # a busy machine may have a slow node
    assert {measure["node"] for measure in report["bench"]["measures"]} == {node.alias for node in bed.nodes[:2]}
    assert bed.wait_clean(home=True) == []
