"""Real engines over real ssh: containers from creation to removal."""

from __future__ import annotations

import contextlib
import io
import secrets
import tarfile
import threading
import time
from collections.abc import Iterator

import pytest

from launcher.errors import (
    ContainerGone,
    EngineFailed,
    EngineForbidden,
    EngineUnavailable,
    NameTaken,
    NodesFailed,
    NodeUnfit,
    NodeUnreachable,
)
from launcher.model.container import ContainerSpec, Layout, Mount, Phase
from launcher.model.facts import Reach
from launcher.node.connect import Fleet, connect
from launcher.node.docker.engine import DockerEngine
from tests.bed import faults
from tests.bed.bed import Bed
from tests.bed.settings import TRAIN_IMAGE

pytestmark = pytest.mark.bed
OUTPUT = "/home/trainer/.launcher/engine-test"


@pytest.fixture(scope="module")
def fleet(bed: Bed) -> Iterator[Fleet]:
    with connect([("a", "node1"), ("b", "node2")], "docker", bed.ssh_config) as connected:
        yield connected


@pytest.fixture
def engine(fleet: Fleet, clean_bed: Bed) -> DockerEngine:
    first = fleet.engines[0]
    assert isinstance(first, DockerEngine)
    first.files.make_dir(OUTPUT)
    return first


def spec(*argv: str, **changes: object) -> ContainerSpec:
    values: dict[str, object] = {
        "name": f"launcher-test-{secrets.token_hex(4)}",
        "image": TRAIN_IMAGE,
        "argv": argv,
        "env": {},
        "labels": {"launcher.run": "t"},
        "layout": Layout("/workspace/code", "/output", "/opt/launcher"),
        "output_dir": OUTPUT,
        "user": "1001:1001",
    }
    return ContainerSpec(**(values | changes))  # type: ignore[arg-type]


def archive(**files: tuple[int, int, bytes]) -> bytes:
    """A tar archive; in names, __ stands for /: (uid, mode, content), without content for a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, (uid, mode, data) in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.uid = member.gid = uid
            member.mode = mode
            member.type = tarfile.REGTYPE if data else tarfile.DIRTYPE
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_facts_describe_the_node(bed: Bed, fleet: Fleet) -> None:
    one, two = fleet.each(lambda engine: engine.facts())
    for facts, node in ((one, bed.nodes[0]), (two, bed.nodes[1])):
        assert facts.hostname == node.alias
        assert (facts.user, facts.uid, facts.home) == ("trainer", 1001, "/home/trainer")
        assert any(f"{node.address}/24" in interface.addresses for interface in facts.interfaces)
        assert 22 in facts.listening
        assert abs(facts.clock_offset) < 3
        assert facts.shm_size == 1 << 30
        assert facts.engine is not None
        assert facts.engine.disk_free > 0
    assert one.engine
    assert two.engine
    assert one.engine.id != two.engine.id


def test_a_container_from_creation_to_exit(bed: Bed, engine: DockerEngine) -> None:
    script = 'id -u; id -G; stat -c "%u %a" . secret; pwd; cat; echo done >/output/f; exit 5'
    made = spec("sh", "-c", script, groups=(102,), env={"A": "1"})
    container = engine.create(made)
    assert engine.inspect(container).phase is Phase.CREATED
    engine.put(
        container,
        archive(workspace__code=(1001, 0o755, b""), workspace__code__secret=(1001, 0o600, b"x")),
    )
    engine.start(container)
    state = engine.wait(container, 30)
    assert (state.phase, state.exit_code, state.oom_killed, state.error) == (Phase.EXITED, 5, False, "")
    assert state.started > 1.7e9
    assert state.finished > state.started - 1  # an engine may note the start of a short one after its end
    assert engine.logs(container).split(b"\n")[:5] == [
        b"1001",
        b"1001 102",
        b"1001 755",
        b"1001 600",
        b"/workspace/code",
    ]
    assert engine.files.read(f"{OUTPUT}/f", below=OUTPUT) == b"done\n"
    assert [found.id for found in engine.list({"launcher.run": "t"})] == [container]
    assert engine.list({"launcher.run": "other"}) == []
    assert engine.list({"launcher.run": None, "launcher.other": None}) == []
    engine.remove(container)
    engine.remove(container)
    assert engine.list({"launcher.run": None}) == []


def test_a_container_has_what_its_spec_asks_for(bed: Bed, engine: DockerEngine) -> None:
    limit = "cat /sys/fs/cgroup/memory*/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null"
    script = f"ulimit -s; cat /proc/sys/kernel/hostname; grep store /etc/hosts; {limit}; cat /data/x; touch /data/y"
    bed.sh(bed.nodes[0], "mkdir -p /tmp/data && echo hello >/tmp/data/x && chmod -R a+rwX /tmp/data")
    made = spec(
        *("sh", "-c", script),
        ulimits=(("stack", 67108864),),
        docker={"extra_hosts": {"store": "10.9.9.9"}},
        memory=256 << 20,
        cpus=0.5,
        mounts=(Mount("/tmp/data", "/data", read_only=True),),
    )
    code, output = engine.run_probe(made)
    lines = output.decode().splitlines()
    assert lines[0] == "65536"
    assert lines[1] == "node1"
    assert lines[2].split() == ["10.9.9.9", "store"]
    assert lines[3] == str(256 << 20)
    assert lines[4] == "hello"
    assert "Read-only" in lines[5]
    assert code == 1
    assert engine.list({"launcher.run": None}) == []


def test_dev_shm_is_the_hosts_or_has_the_requested_size(engine: DockerEngine) -> None:
    shm = ("sh", "-c", "df -Pk /dev/shm | tail -1 | awk '{print $2}'")
    assert engine.run_probe(spec(*shm))[1].strip() == b"1048576"
    assert engine.run_probe(spec(*shm, docker={"ipc": "private"}, shm_size=128 << 20))[1].strip() == b"131072"


def test_a_guarded_container_created_after_the_caller_disconnected_is_removed(bed: Bed, engine: DockerEngine) -> None:
    made = spec("true")
    guarded = contextlib.ExitStack()
    with connect([("a", "node1")], "docker", bed.ssh_config) as connected:
        guarded.enter_context(connected.engines[0].guard(made.name))
    engine.create(made)  # as an engine does if the request arrived before the connection ended
    deadline = time.monotonic() + 60
    while engine.list({"launcher.run": None}):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with contextlib.suppress(NodeUnreachable):
        guarded.close()


def test_a_restart_does_not_end_the_wait(engine: DockerEngine) -> None:
    container = engine.create(spec("sh", "-c", "sleep 1; exit 3", restarts=2))
    engine.start(container)
    assert not engine.wait(container, 1.0).phase.ended
    state = engine.wait(container, 30)
    assert (state.phase, state.exit_code, state.restarts) == (Phase.EXITED, 3, 2)


def test_wait_returns_the_state_at_its_time_limit(engine: DockerEngine) -> None:
    container = engine.create(spec("sleep", "60"))
    began = time.monotonic()
    assert engine.wait(container, 0.5).phase is Phase.CREATED
    engine.start(container)
    assert engine.wait(container, 0.5).phase is Phase.RUNNING
    assert time.monotonic() - began < 30
    engine.stop(container, 0)


def test_wait_sees_a_container_that_starts_and_exits_while_it_waits(engine: DockerEngine) -> None:
    container = engine.create(spec("true"))
    threading.Timer(0.7, engine.start, (container,)).start()
    began = time.monotonic()
    assert engine.wait(container, 60).phase is Phase.EXITED
    assert time.monotonic() - began < 50


def test_wait_survives_lost_connections(bed: Bed, engine: DockerEngine) -> None:
    container = engine.create(spec("sh", "-c", "sleep 4; exit 7"))
    engine.start(container)
    cuts = [threading.Timer(at, faults.kill_ssh_sessions, (bed, bed.nodes[0])) for at in (0.5, 2.0)]
    for cut in cuts:
        cut.start()
    assert engine.wait(container, 30).exit_code == 7
    for cut in cuts:
        cut.join()


def test_stop_waits_for_the_grace_period_then_kills(engine: DockerEngine) -> None:
    kind = engine.create(spec("sh", "-c", "trap 'exit 9' TERM; echo ready; while :; do sleep 0.1; done"))
    deaf = engine.create(spec("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done", restarts=5))
    for container in (kind, deaf):
        engine.start(container)
    deadline = time.monotonic() + 60
    while not all(b"ready" in engine.logs(container) for container in (kind, deaf)):
        assert time.monotonic() < deadline
    assert engine.stop(kind, 20).exit_code == 9
    began = time.monotonic()
    state = engine.stop(deaf, 1)
    assert (state.phase, state.exit_code) == (Phase.EXITED, 137)
    assert time.monotonic() - began < 60
    assert engine.stop(deaf, 1).phase is Phase.EXITED
    assert engine.wait(deaf, 1).restarts == 0


def test_stop_stops_a_container_that_waits_for_its_next_restart(engine: DockerEngine) -> None:
    container = engine.create(spec("sh", "-c", "exit 1", restarts=50))
    engine.start(container)
    time.sleep(2.5)
    engine.stop(container, 1)
    time.sleep(2.0)
    assert engine.inspect(container).phase is Phase.EXITED
    engine.remove(container)


def test_refused_requests_say_what_is_wrong(engine: DockerEngine) -> None:
    made = spec("true")
    engine.create(made)
    with pytest.raises(NameTaken, match=made.name):
        engine.create(made)
    with pytest.raises(NodeUnfit, match="a: mount source /no/such does not exist"):
        engine.create(spec("true", mounts=(Mount("/no/such", "/x"),)))
    with pytest.raises(NodeUnfit, match="a: the image is missing"):
        engine.create(spec("true", image="no/such:image"))
    with pytest.raises(NodeUnfit, match="NVIDIA Container Toolkit"):
        engine.run_probe(spec("true", gpus=("GPU-1",), gpu_driver="nvidia"))
    with pytest.raises(EngineFailed, match="a: container gone no longer exists"):
        engine.inspect("gone")
    with pytest.raises(ContainerGone):
        engine.stop("gone", 0)
    running = engine.create(spec("sleep", "30"))
    engine.start(running)
    with pytest.raises(EngineFailed, match="running"):
        engine.remove(running)
    engine.stop(running, 0)


def test_a_missing_program_fails_at_start_with_the_engines_message(engine: DockerEngine) -> None:
    container = engine.create(spec("/no/such/program", init=False))
    with pytest.raises(EngineFailed, match="/no/such/program"):
        engine.start(container)
    assert "/no/such/program" in engine.inspect(container).error
    engine.remove(container)


def test_a_probe_that_hangs_is_stopped_and_removed(engine: DockerEngine) -> None:
    with pytest.raises(EngineFailed, match="did not exit within 1 s: waiting"):
        engine.run_probe(spec("sh", "-c", "echo waiting; sleep 60"), timeout=1)
    assert engine.list({"launcher.run": None}) == []


def test_logs_can_be_read_in_full_and_by_tail(engine: DockerEngine) -> None:
    code, output = engine.run_probe(spec("sh", "-c", "seq 200000; exit 0"))
    assert code == 0
    assert output.endswith(b"200000\n")
    container = engine.create(spec("sh", "-c", "echo out; echo err >&2"))
    engine.start(container)
    engine.wait(container, 10)
    assert sorted(engine.logs(container).split()) == [b"err", b"out"]
    assert len(engine.logs(container, tail=1).split()) == 1


def test_granted_ulimits_are_probed_and_cached(
    engine: DockerEngine, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    granted = engine.granted_ulimits(TRAIN_IMAGE)
    # listed limits work, limits that are not listed are refused
    assert engine.run_probe(spec("true", ulimits=granted))[0] == 0
    if ("memlock", -1) not in granted:
        with pytest.raises(EngineFailed, match="rlimit"):
            engine.run_probe(spec("true", ulimits=(("memlock", -1),)))
    assert engine.granted_ulimits("an image that is not inspected") == granted
    assert engine.list({}) == []


def test_reachability_between_nodes(bed: Bed, fleet: Fleet) -> None:
    one, two = fleet.engines
    address = bed.nodes[1].address
    mine, other = one.machine.host_key() or "", two.machine.host_key() or ""
    assert one.machine.has_host_key(address, 22, other, 3) is True
    assert one.machine.has_host_key(address, 22, mine, 3) is False
    assert one.machine.has_host_key(address, 29512, other, 3) is None
    assert one.machine.reach(address, 22, 3) is Reach.OPEN
    assert one.machine.reach(address, 29512, 3) is Reach.REFUSED
    assert two.machine.reach(bed.blackhole, 29512, 1) is Reach.SILENT
    with faults.blocked_port(bed, bed.nodes[1], 29512):
        assert one.machine.reach(address, 29512, 1) is Reach.SILENT
    assert [node.ssh_port for node in fleet.facts()] == [22, 22]


def test_many_concurrent_probes_are_not_confused(bed: Bed, fleet: Fleet) -> None:
    one = fleet.engines[0]
    address = bed.nodes[1].address
    wanted = [(22, Reach.OPEN), (29513, Reach.REFUSED)] * 10
    seen: dict[int, Reach] = {}

    def probe(index: int) -> None:
        seen[index] = one.machine.reach(address, wanted[index][0], 3)

    threads = [threading.Thread(target=probe, args=(index,)) for index in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen[index] for index in range(len(wanted))] == [reach for _, reach in wanted]


def test_shared_memory_of_dead_processes_is_removed(bed: Bed, engine: DockerEngine) -> None:
    bed.sh(bed.nodes[0], "touch /dev/shm/torch_1_2_3 /dev/shm/mine", user="trainer")
    assert list(engine.clear_shared_memory(time.time() - 60)) == ["torch_1_2_3"]
    assert bed.sh(bed.nodes[0], "ls /dev/shm").split() == ["mine"]


def test_missing_permission_and_missing_engine_come_with_a_fix(bed: Bed) -> None:
    with pytest.raises(NodesFailed) as caught:
        connect([("a", "node1-nodocker")], "docker", bed.ssh_config)
    assert isinstance(caught.value.errors[0], EngineForbidden)
    assert "sudo usermod -aG docker nodocker" in str(caught.value)
    with faults.without_engine(bed, bed.nodes[1]), pytest.raises(NodesFailed) as caught:
        connect([("b", "node2")], "docker", bed.ssh_config)
    assert isinstance(caught.value.errors[0], EngineUnavailable)
    assert "systemctl start docker" in str(caught.value)


def test_calls_work_again_after_the_engine_was_restarted(bed: Bed, fleet: Fleet, clean_bed: Bed) -> None:
    engine = fleet.engines[1]
    assert engine.list({}) == []
    with faults.without_engine(bed, bed.nodes[1]), pytest.raises(EngineUnavailable):
        engine.list({})
    assert engine.list({}) == []


def test_nothing_is_left_open(bed: Bed) -> None:
    before = threading.active_count()
    with connect([("a", "node1"), ("b", "node2")], "docker", bed.ssh_config) as fleet:
        fleet.each(lambda engine: engine.facts())
        began = time.monotonic()
    assert time.monotonic() - began < 5
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
