"""How gradients travel, read from NCCL's log: public logs of real runs, and lines that nobody knows."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.faults.transport import NcclLog, Wires, parse, sentence, settled
from tests.nccl_rows import ROWS, Row

TEXTS = [row.log for row in ROWS.values()]
_KNOWN = ("NET", "NCCL_", "Using", "version", "Unable", "Failed")  # a line with none of these means nothing
OF_A_PROCESS = re.compile(r"\S+:\d+:\d+ \[\d+\] NCCL ", re.ASCII)
unknown_lines = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r")).filter(
        lambda line: not any(word in line for word in _KNOWN)
    )
    | st.sampled_from(["x:1:1 [0] NCCL INFO a line of NCCL 3", "x:1:1 [0] NCCL WARN \x1b[31m", "{}", "%s%n"]),
    max_size=4,
)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_published_log_says_how_its_gradients_travelled(row: Row) -> None:
    log = parse(row.log)
    assert sentence({"a": log}, {"a": row.wires}) == (f"gradients: {row.says}" if row.says else "")
    assert not row.version or f"NCCL version {row.version}" in row.log


@given(row=st.sampled_from(list(ROWS.values())), extra=unknown_lines, data=st.data())
def test_lines_that_nobody_knows_change_nothing(row: Row, extra: list[str], data: st.DataObject) -> None:
    lines = row.log.splitlines()
    begun = [OF_A_PROCESS.search(line) is not None for line in lines if line]
    for line in extra:
        if OF_A_PROCESS.search(line) and not all(begun):
            continue  # the lines after it, which name no process, would be that one's
        lines.insert(data.draw(st.integers(0, len(lines))), line)
    assert parse("\n".join(lines)) == parse(row.log)


@given(
    pieces=st.lists(st.sampled_from([line for text in TEXTS for line in text.splitlines()]) | st.text(), max_size=12),
    cut=st.integers(0, 400),
    active=st.booleans(),
)
def test_any_text_gives_one_printable_line_or_none(pieces: list[str], cut: int, active: bool) -> None:
    text = "\n".join(pieces)[cut:]
    known = Wires(speeds={"eth0": 10.0}, active=("mlx5_0",) if active else ())
    said = sentence({"a": parse(text), "b": parse(text[: len(text) // 2])}, {"a": known})
    assert said.isprintable()
    assert not said or said.startswith("gradients: ")


def test_nodes_that_differ_are_named() -> None:
    rdma, tcp = parse(ROWS["InfiniBand, newest lines"].log), parse(ROWS["sockets, newest lines"].log)
    both = {"gpu-a": rdma, "gpu-b": tcp}
    assert sentence(both, {}) == "gradients: gpu-a: InfiniBand on mlx5_0; gpu-b: TCP on eth0"
    assert sentence({**both, "gpu-c": parse("")}, {}).count("gpu-") == 2  # of gpu-c nothing is known yet
    assert sentence({"gpu-a": rdma, "gpu-c": parse("")}, {}) == "gradients: gpu-a: InfiniBand on mlx5_0"


def test_the_devices_that_a_nodes_processes_use_are_named() -> None:
    log = NcclLog(network="IB", ports=(("mlx5_10", "IB"), ("mlx5_2", "IB")), connections=2, direct=2)
    assert sentence({"a": log}, {}) == "gradients: InfiniBand on mlx5_2, mlx5_10, GPUDirect"


def process(pid: int, found: str, network: str, *devices: str) -> str:
    """Return the log of a process, with a connection by each device."""
    lines = (found, f"Using network {network}", *(f"Channel 00/0 : 0[0] -> 8[0] [send] via NET/{d}" for d in devices))
    return "".join(f"a:{pid}:{pid} [0] NCCL INFO {line}\n" for line in lines)


ROCE = "Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:1<0>\na:7:7 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'x'"


@pytest.mark.parametrize(
    ("known", "version", "says"),
    [
        ("never", "2.18.5", "without GPUDirect, which these GPUs do not have"),
        ("loaded", "2.18.5", "which is loaded -> use an image with torch 2.7 or newer (NCCL 2.23)"),
        ("loaded", "2.27.3", "NCCL does not use nvidia_peermem, which is loaded"),
        ("", "2.27.3", "-> sudo modprobe nvidia_peermem on the nodes; exceptions: docs/gpu.md"),
    ],
)
def test_no_module_is_advised_that_is_loaded_or_cannot_help(known: str, version: str, says: str) -> None:
    log = parse(f"NCCL version {version}+cuda12.2\n" + process(7, f"NET/IB : {ROCE}", "IB", "IB/0"))
    assert sentence({"a": log}, {"a": Wires(gpudirect=known)}).endswith(says)


def test_processes_of_a_node_that_use_different_networks_are_told_apart() -> None:
    infiniband = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:1<0>"
    sockets = "NET/Socket : Using [0]eth0:10.0.0.5<0>"
    logs = [process(pid, infiniband, "IB", "IB/0/GDRDMA") for pid in range(3)]
    logs += [
        process(7, sockets, "Socket", "Socket/0"),
        process(8, sockets, "Socket"),
    ]  # the last sends to no other node
    wires = {"a": Wires(speeds={"eth0": 10.0}, active=("mlx5_0",))}
    for text in ("".join(logs), "".join(reversed(logs))):
        log = parse(text)
        assert sentence({"a": log}, wires) == (
            "gradients: 3 of 4 processes: InfiniBand on mlx5_0, GPUDirect; 1 of 4 processes: TCP on eth0 (10 Gb/s), "
            "although mlx5_0 is active: NCCL does not say why -> check NCCL_NET and NCCL_IB_HCA; "
            "see `launcher doctor JOB`"
        )


def test_the_sentence_is_final_once_every_node_has_connected() -> None:
    connected, before = parse(ROWS["no libibverbs in the image"].log), parse(ROWS["RoCE, two cards"].log)
    assert settled({"a": connected, "b": connected})
    assert not settled({"a": connected, "b": before})
    assert not settled({"a": connected, "b": parse("")})


def test_the_network_that_nccl_fell_back_to_counts() -> None:
    log = parse(ROWS["InfiniBand, newest lines"].log + ROWS["no libibverbs in the image"].log)
    assert sentence({"a": log}, {}) == "gradients: TCP on ens4"
    assert (log.connections, log.direct) == (2, 0)


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (  # NCCL_IB_HCA differs between the processes, so that each numbers its cards from 0
            process(7, "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:1<0>", "IB", "IB/0/GDRDMA")
            + process(8, "NET/IB : Using [0]mlx5_1:1/IB [RO]; OOB eth0:1<0>", "IB", "IB/0/GDRDMA"),
            "InfiniBand on mlx5_0, mlx5_1, GPUDirect",
        ),
        (  # NCCL 2.20 to 2.23: joined ports, then one with the number of a port
            process(
                7, "NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [2]mlx5_4:1/RoCE [RO]; O", "IB", "IB/1"
            ),
            "RoCE on mlx5_4, without GPUDirect",
        ),
        (  # since NCCL 2.24
            process(
                7,
                "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:1<0>\n"
                "a:7:7 [0] NCCL INFO NET/IB : Made virtual device [2] name=mlx5_0+mlx5_1 speed=400000 ndevs=2",
                "IB",
                "IB/2(1)/GDRDMA(PCI)/Shared",
            ),
            "RoCE on mlx5_0, mlx5_1, GPUDirect",
        ),
        (  # since NCCL 2.30: with the rail and the plane that NCCL_IB_HCA may give
            process(7, "NET/IB : Using [0]mlx5_0:1:2:3/IB [1]mlx5_1:1::3/IB [RO]; OOB eth0:1<0>", "IB", "IB/1"),
            "InfiniBand on mlx5_1, without GPUDirect",
        ),
        (  # a device that the log does not name: no part of the truth
            process(7, "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:1<0>", "IB", "IB/0", "IB/1"),
            "RDMA, without GPUDirect",
        ),
        (  # GIN looks for InfiniBand too, although the gradients travel by another network
            process(7, "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:1<0>", "Libfabric", "Libfabric/0/GDRDMA"),
            "Libfabric (a network plugin of NCCL), GPUDirect",
        ),
        (
            process(7, "NET/OFI Selected provider is efa, fabric is efa-direct (found 1 nics)", "Libfabric"),
            "EFA on 1 card",
        ),
        (
            process(7, "NET/Socket : Using [0]eth0:2001:db8::5<0> [1]bond0.7:fe80::1%bond0.7<0>", "Socket", "Socket/1"),
            "TCP on bond0.7",
        ),
    ],
)
def test_devices_are_numbered_as_the_version_does(log: str, says: str) -> None:
    """Formats of NCCL's source (init.cc of net_ib, net.cc, net_socket.cc of these versions)."""
    assert sentence({"a": parse(log)}, {}) == f"gradients: {says}"
