"""The bed provides the cluster that other tests expect."""

from __future__ import annotations

import concurrent.futures
import time

import pytest

from tests.bed import cluster, faults
from tests.bed.bed import Bed
from tests.bed.settings import TRAIN_IMAGE

pytestmark = [pytest.mark.bed, pytest.mark.slow]  # tests of the bed itself; every other test uses it

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print("sum", value.item(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


def test_openssh_reaches_every_node_as_a_user_who_is_not_root_and_may_use_docker(bed: Bed) -> None:
    for node in bed.nodes:
        answer = bed.ssh(node.alias, "id -un; hostname; docker version -f '{{.Server.Os}}'; which python3 || echo bare")
        assert answer.stdout.split() == ["trainer", node.alias, "linux", "bare"]


def test_nodes_see_each_other_and_jump_hosts_work(bed: Bed) -> None:
    one, two = bed.nodes[:2]
    assert bed.run(one, "bash", "-c", f"exec 3<>/dev/tcp/{two.address}/22; head -c 4 <&3").stdout == "SSH-"
    assert bed.ssh("node2-via-node1", "hostname; echo $SSH_CLIENT").stdout.split()[:2] == ["node2", one.address]


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ("refused", "Connection refused"),
        ("unknown-host-key", "Host key verification failed"),
        ("changed-host-key", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
        ("wrong-key", "Permission denied (publickey)"),
        ("no-such-host", "Could not resolve hostname"),
    ],
)
def test_broken_aliases_fail_as_named(bed: Bed, alias: str, message: str) -> None:
    done = bed.ssh(alias, "true", check=False)
    assert done.returncode == 255
    assert message in done.stderr


def test_the_blackhole_never_answers(bed: Bed) -> None:
    began = time.monotonic()
    done = bed.ssh("blackhole", "true", check=False, timeout=2)
    assert "timed out" in done.stderr
    assert time.monotonic() - began >= 2


def test_a_user_outside_the_docker_group_may_not_use_docker(bed: Bed) -> None:
    assert "permission denied" in bed.ssh("node1-nodocker", "docker ps", check=False).stderr


def test_two_nodes_all_reduce_by_hand(clean_bed: Bed) -> None:
    bed = clean_bed
    for rank, node in enumerate(bed.nodes[:2]):
        torchrun = ["python3", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
        torchrun += ["--node_rank", str(rank), "--master_addr", bed.nodes[0].address, "--master_port", "29400"]
        bed.sh(node, f"cat > /tmp/all_reduce.py <<'END'\n{ALL_REDUCE}\nEND")
        options = [*bed.torch_options(), "--name", "by-hand", TRAIN_IMAGE]
        bed.docker(node, "create", *options, *torchrun, "/all_reduce.py")
        bed.docker(node, "cp", "/tmp/all_reduce.py", "by-hand:/all_reduce.py")
    for node in bed.nodes[:2]:
        bed.docker(node, "start", "by-hand")
    for node in bed.nodes[:2]:
        assert (bed.docker(node, "wait", "by-hand"), bed.docker(node, "logs", "by-hand")) == ("0", "sum 3.0 of 2")


def test_leftovers_are_found_and_swept(clean_bed: Bed) -> None:
    node = clean_bed.nodes[0]
    assert clean_bed.leftovers(node).lines() == []
    clean_bed.docker(
        node, "run", "-d", "--label", "launcher.run=x", "--name", "dirt", "--ipc", "host", TRAIN_IMAGE, "sleep", "60"
    )
    clean_bed.docker(node, "network", "create", "dirt-net")
    clean_bed.sh(node, "touch /dev/shm/dirt /tmp/dirt; mkdir -p ~/.launcher/run-x", user="trainer")
    found = clean_bed.leftovers(node)
    assert found.containers == ("dirt running",)
    assert found.networks == ("dirt-net",)
    assert any("sleep 60" in process for process in found.processes)
    assert (found.shm, found.tmp, found.home) == (
        ("/dev/shm/dirt",),
        ("/tmp/dirt",),
        ("/home/trainer/.launcher/run-x",),
    )
    clean_bed.sweep(node)
    assert clean_bed.leftovers(node).lines() == []


def test_a_paused_node_stops_its_containers(clean_bed: Bed) -> None:
    node = clean_bed.nodes[1]
    ticker = "while :; do date +%s.%N; sleep 0.1; done"
    clean_bed.docker(node, "run", "-d", "--name", "ticker", "--init", TRAIN_IMAGE, "sh", "-c", ticker)

    def ticks_until(moment: float) -> list[float]:
        deadline = time.monotonic() + 60
        while not (ticks := list(map(float, clean_bed.docker(node, "logs", "ticker").split()))) or ticks[-1] < moment:
            assert time.monotonic() < deadline
        return ticks

    assert ticks_until(0)
    with faults.paused(node):
        began = time.time()
        assert "timed out" in clean_bed.ssh(node.alias, "true", check=False, timeout=2).stderr
        ended = time.time()
    ticks = ticks_until(ended)
    assert ticks[0] < began
    assert not [tick for tick in ticks if began < tick < ended], "the container kept running in a paused node"


def test_a_partition_heals(clean_bed: Bed) -> None:
    one, two = clean_bed.nodes[:2]
    reach = ("timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{two.address}/22")
    with faults.partition(clean_bed, one, two):
        assert clean_bed.run(one, *reach, check=False).returncode == 124
        assert clean_bed.ssh("node1", "true").returncode == clean_bed.ssh("node2", "true").returncode == 0
    assert clean_bed.run(one, *reach, check=False).returncode == 0


def test_an_isolated_node_is_silent_and_a_lossy_one_slow(clean_bed: Bed) -> None:
    node = clean_bed.nodes[1]
    with faults.isolated(clean_bed, node):
        assert "timed out" in clean_bed.ssh(node.alias, "true", check=False, timeout=1).stderr
    with faults.blocked_port(clean_bed, node, 22):
        assert "timed out" in clean_bed.ssh(node.alias, "true", check=False, timeout=1).stderr
    with faults.packet_loss(clean_bed, node, 0.1):
        for _ in range(20):  # 300 kB may be only 20 packets
            assert clean_bed.ssh(node.alias, "head -c 300000 /dev/zero | wc -c").stdout.strip() == "300000"
            if _dropped(clean_bed):
                break
        else:
            pytest.fail("no packet was dropped")
    assert clean_bed.ssh(node.alias, "true").returncode == 0


def _dropped(bed: Bed) -> int:
    """Packets dropped by faults of the second node so far."""
    rules = bed.sh(bed.nodes[1], "iptables -nvxL BED_FAULT").splitlines()[2:]
    return sum(int(rule.split()[0]) for rule in rules)


def test_open_ssh_sessions_break_on_demand(clean_bed: Bed) -> None:
    node = clean_bed.nodes[1]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        session = pool.submit(clean_bed.ssh, node.alias, "echo started >/tmp/started; sleep 60", check=False)
        clean_bed.sh(node, "until [ -e /tmp/started ]; do sleep 0.05; done", timeout=60)
        faults.kill_ssh_sessions(clean_bed, node)
        assert session.result(timeout=60).returncode == 255
    assert clean_bed.ssh(node.alias, "true").returncode == 0


def test_power_loss_clears_memory_and_keeps_the_disk(clean_bed: Bed) -> None:
    node = clean_bed.nodes[1]
    clean_bed.sh(node, "touch /dev/shm/gone /home/trainer/kept")
    clean_bed.docker(node, "run", "-d", "--name", "phoenix", "--restart", "on-failure:3", TRAIN_IMAGE, "sleep", "600")
    faults.power_off(node)
    assert clean_bed.ssh(node.alias, "true", check=False, timeout=5).returncode == 255
    faults.power_on(clean_bed, node)
    assert clean_bed.ssh(node.alias, "ls /dev/shm; ls").stdout.split() == ["kept"]
    assert clean_bed.docker(node, "inspect", "-f", "{{.State.Running}}", "phoenix") == "true"
    clean_bed.sh(node, "rm /home/trainer/kept")


def test_sshd_and_the_engine_can_be_killed_and_restarted(clean_bed: Bed) -> None:
    node = clean_bed.nodes[1]
    with faults.without_sshd(clean_bed, node):
        assert "Connection refused" in clean_bed.ssh(node.alias, "true", check=False).stderr
    with faults.without_engine(clean_bed, node):
        assert "Cannot connect to the Docker daemon" in clean_bed.ssh(node.alias, "docker ps", check=False).stderr
    assert clean_bed.ssh(node.alias, "docker ps -q").stdout == ""


def test_small_file_systems_fill_up(clean_bed: Bed) -> None:
    node = clean_bed.nodes[1]
    with faults.small_shm(clean_bed, node), faults.small_disk(clean_bed, node, "/home/trainer/.launcher"):
        assert "65536" in clean_bed.ssh(node.alias, "df -k /dev/shm").stdout
        full = clean_bed.ssh(node.alias, "head -c 2M /dev/zero > .launcher/x", check=False)
        assert "No space left on device" in full.stderr
    with faults.small_data_root(clean_bed, node, "32m"):
        assert clean_bed.docker(node, "images", "-q") == ""
    assert clean_bed.docker(node, "images", "-q", TRAIN_IMAGE)


def test_up_is_idempotent_and_can_run_concurrently(bed: Bed) -> None:
    before = [bed.docker(node, "info", "-f", "{{.ID}}") for node in bed.nodes]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: cluster.up(bed.settings, 2, install=False), range(2)))
    assert [bed.docker(node, "info", "-f", "{{.ID}}") for node in bed.nodes] == before
