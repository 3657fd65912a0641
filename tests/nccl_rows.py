# ruff: noqa: E501 - lines as they were published
"""Logs of NCCL's start in real runs, one per row: lines as published, with their source, and what they say.

No such run was made here, as this needs GPUs on two machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.faults.transport import Wires

NCCL, TESTS = "https://github.com/NVIDIA/nccl/issues/", "https://github.com/NVIDIA/nccl-tests/issues/"
TEN, MLX = Wires(speeds={"eth0": 10.0}), Wires(speeds={"eth0": 10.0}, active=("mlx5_0",))


@dataclass(frozen=True)
class Row:
    """says: after "gradients: ". wires: assumed, as the sources do not have them."""

    source: str
    version: str
    log: str
    says: str
    wires: Wires = field(default_factory=Wires)


ROWS = {
    "RoCE, one card chosen": Row(
        f"{NCCL}1052",
        "2.18.5",
        """
node2:14159:14159 [0] NCCL INFO Bootstrap : Using enp24s0np0:10.10.10.1<0>
node2:14159:14159 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared object file
node2:14159:14159 [0] NCCL INFO cudaDriverVersion 12020
NCCL version 2.18.5+cuda12.0
node2:14159:14168 [0] NCCL INFO NCCL_IB_HCA set to mlx5_4
node2:14159:14168 [0] NCCL INFO NET/IB : Using [0]mlx5_4:1/RoCE [RO]; OOB enp24s0np0:10.10.10.1<0>
node2:14159:14168 [0] NCCL INFO Using network IB
""",
        "RoCE on mlx5_4",
    ),
    "no libibverbs in the image": Row(
        f"{TESTS}166",
        "2.18.3",
        """
ubuntu:39964:39964 [0] NCCL INFO cudaDriverVersion 12020
NCCL version 2.18.3+cuda12.2
ubuntu:39964:39964 [0] NCCL INFO NCCL_COMM_BLOCKING set by environment to 1.
ubuntu:39964:40050 [6] NCCL INFO Failed to open libibverbs.so[.1]
ubuntu:39964:40050 [6] NCCL INFO NET/Socket : Using [0]ens4:10.0.0.1<0>
ubuntu:39964:40050 [6] NCCL INFO Using network Socket
ubuntu:9621:9685 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/Socket/0
ubuntu:9621:9685 [0] NCCL INFO Channel 01/0 : 7[7] -> 8[0] [receive] via NET/Socket/0
""",
        "TCP on ens4, although mlx5_0 is active: the image has no libibverbs.so "
        "-> install libibverbs1 and ibverbs-providers in the image",
        MLX,
    ),
    "RoCE, two cards": Row(
        f"{TESTS}185",
        "2.19.3",
        """
dgxh100-4:460770:460770 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory
dgxh100-4:460770:460770 [0] NCCL INFO cudaDriverVersion 12000
NCCL version 2.19.3+cuda12.3
dgxh100-4:460770:460842 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.136<0>
dgxh100-4:460770:460842 [0] NCCL INFO Using non-device net plugin version 0
dgxh100-4:460770:460842 [0] NCCL INFO Using network IB
""",
        "RoCE on mlx5_10, mlx5_11",
    ),
    "no device in the container": Row(
        f"{NCCL}952",
        "",
        """
<cluster_name>:919:919 [0] NCCL INFO cudaDriverVersion 12010
<cluster_name>:919:919 [0] NCCL INFO Bootstrap : Using ibp12s0:10.149.0.32<0>
<cluster_name>:920:1145 [1] NCCL INFO P2P plugin IBext
NCCL INFO NET/IB : No device found
<cluster_name>:920:1145 [1] NCCL INFO Channel 04/0 : 9[1] -> 10[2] via P2P/IPC/read
<cluster_name>:919:1150 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [receive] via NET/Socket/0
<cluster_name>:919:1150 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [send] via NET/Socket/0
<cluster_name>:922:1158 [3] NCCL INFO misc/socket.cc:567 -> 2
""",
        "TCP, although mlx5_0, mlx5_3 are active: NCCL sees no RDMA device with an active port "
        "-> the container needs /dev/infiniband, the image ibverbs-providers (EFA: aws-ofi-nccl); see `launcher doctor JOB`",
        Wires(active=("mlx5_3", "mlx5_0")),
    ),
    "InfiniBand switched off": Row(
        f"{TESTS}188",
        "",
        """
user:852750:852802 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
user:852750:852802 [0] NCCL INFO NET/Socket : Using [0]ibs85f0:192.168.1.14<0> [1]ib0:192.168.1.15<0>
user:852750:852802 [0] NCCL INFO Using network Socket
user:852751:852807 [1] NCCL INFO Channel 01/0 : 1[2a000] -> 8[27000] [send] via NET/Socket/0
""",
        "TCP on ibs85f0 (100 Gb/s), although mlx5_0 is active: NCCL_IB_DISABLE is set "
        "-> remove it from `env` or the image",
        Wires({"ibs85f0": 100.0, "ib0": 100.0}, ("mlx5_0",)),
    ),
    "no RDMA on the machine": Row(
        f"{NCCL}1410",
        "",
        """
h100-kickoff-llama-70b-chat-20230328-bcf75c4f6-gn6nd:2340:2384 [4] NCCL INFO Failed to open libibverbs.so[.1]
h100-kickoff-llama-70b-chat-20230328-bcf75c4f6-gn6nd:2340:2384 [4] NCCL INFO NET/Socket : Using [0]eth0:10.177.137.15<0>
h100-kickoff-llama-70b-chat-20230328-bcf75c4f6-gn6nd:2340:2384 [4] NCCL INFO Using non-device net plugin version 0
h100-kickoff-llama-70b-chat-20230328-bcf75c4f6-gn6nd:2340:2384 [4] NCCL INFO Using network Socket
""",
        "TCP on eth0 (10 Gb/s)",
        TEN,
    ),
    "a device that cannot be opened": Row(
        f"{NCCL}451",
        "",
        """
NCCL INFO NCCL_IB_DISABLE set by environment to 0.
misc/ibvwrap.cc:212 NCCL WARN Call to ibv_open_device failed
transport/net_ib.cc:148 NCCL WARN NET/IB : Unable to open device mlx5_bond_0
NCCL INFO NET/IB : No device found.
NCCL INFO NET/Socket : Using [0]bond0:200.1.93.2<0>
NCCL INFO Using network Socket
NCCL INFO Bootstrap : Using [0]bond0:200.1.93.2<0>
""",
        "TCP on bond0, although mlx5_bond_0 is active: NCCL could not open mlx5_bond_0 "
        "-> the container needs /dev/infiniband; see `launcher doctor JOB`",
        Wires(active=("mlx5_bond_0",)),
    ),
    "RoCE without GPUDirect": Row(
        f"{NCCL}1537",
        "",
        """
hostname1:25668:27396 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB primaryip:10.10.10.10<0>
hostname1:25668:27396 [0] NCCL INFO Using non-device net plugin version 0
hostname1:25668:27396 [0] NCCL INFO Using network IB
hostname1:25668:27396 [0] NCCL INFO comm 0x55cc8aa86c70 rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 1c000 commId 0x65e0bd6ee7449db4 - Init START
hostname1:25668:27396 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'
hostname1:25668:27396 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1'
""",
        "RoCE on mlx5_0, mlx5_1, without GPUDirect: NCCL finds neither nvidia_peermem nor DMA-BUF "
        "-> sudo modprobe nvidia_peermem on the nodes; exceptions: docs/gpu.md",
    ),
    "a bond of two ports": Row(
        f"{TESTS}307",
        "2.21.5",
        """
node031:1936469:1936469 [0] NCCL INFO NET/Plugin: Using internal network plugin.
node031:1936469:1936469 [7] NCCL INFO cudaDriverVersion 12060
NCCL version 2.21.5+cuda12.4
node031:1936469:1936513 [0] NCCL INFO NET/IB : Using [0]mlx5_bond_0:1/RoCE [RO]; OOB vlan503:172.16.163.31<0>
node031:1936469:1936513 [0] NCCL INFO Using non-device net plugin version 0
node031:1936469:1936513 [0] NCCL INFO Using network IB
""",
        "RoCE on mlx5_bond_0",
    ),
    "InfiniBand and RoCE cards, a plugin": Row(
        f"{NCCL}1737",
        "2.21.5",
        """
gh-3714u06:4197:4197 [0] NCCL INFO Bootstrap : Using ib0.0065:10.1.32.3<0>
NCCL version 2.21.5+cuda12.4
gh-3714u06:4197:4267 [0] NCCL INFO Plugin Path : /opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so
gh-3714u06:4197:4267 [0] NCCL INFO P2P plugin IBext_v8
gh-3714u06:4197:4267 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP [2]mlx5_4:1/IB/SHARP [3]mlx5_5:1/IB/SHARP [4]mlx5_2:1/RoCE [RO]; OOB ib0.0065:10.1.32.3<0>
gh-3714u06:4197:4267 [0] NCCL INFO Using non-device net plugin version 0
gh-3714u06:4197:4267 [0] NCCL INFO Using network IBext_v8
gh-3714u06:4197:4267 [0] NCCL INFO comm 0x5594b5eb16a0 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0
""",
        "InfiniBand on mlx5_0, mlx5_1, mlx5_4, mlx5_5; RoCE on mlx5_2",
    ),
    "eight RoCE cards": Row(
        f"{NCCL}1538",
        "",
        """
job-3bb823c0-6d27-4312-8094-1c5910bf9b51-worker-0:5664:5734 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [2]mlx5_2:1/RoCE [3]mlx5_3:1/RoCE [4]mlx5_4:1/RoCE [5]mlx5_5:1/RoCE [6]mlx5_6:1/RoCE [7]mlx5_7:1/RoCE [RO]; OOB eth0:172.24.180.73<0>
job-3bb823c0-6d27-4312-8094-1c5910bf9b51-worker-0:5664:5734 [1] NCCL INFO Using network IBext_v8
job-3bb823c0-6d27-4312-8094-1c5910bf9b51-worker-0:5663:5809 [0] NCCL INFO Channel 04/0 : 0[0] -> 7[7] via P2P/CUMEM
""",
        "RoCE on mlx5_0, mlx5_1, mlx5_2, mlx5_3 and 4 more",
    ),
    "ports that NCCL joins, one of two pairs used": Row(
        f"{TESTS}373",
        "",
        """
bigo:1884:1884 [0] NCCL INFO Bootstrap : Using bond0.526:169.136.106.9<0>
bigo:1884:2298 [0] NCCL INFO P2P plugin IBext_v8
bigo:1884:2298 [0] NCCL INFO NET/IB : Using [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE} [1]={[2] mlx5_0:1/RoCE, [3] mlx5_1:1/RoCE} [RO]; OOB bond0.526:169.136.106.9<0>
bigo:1884:2298 [0] NCCL INFO Using network IBext_v8
bigo:1884:2298 [0] NCCL INFO comm 0x564531f27c80 rank 2 nRanks 3 nNodes 3 localRanks 1 localRank 0 MNNVL 0
bigo:1884:2298 [0] NCCL INFO Channel 00/0 : 1[0] -> 2[0] [receive] via NET/IBext_v8/1
bigo:1884:2298 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [send] via NET/IBext_v8/1
""",
        "RoCE on mlx5_0, mlx5_1, without GPUDirect",
    ),
    "InfiniBand without GPUDirect, one of several cards": Row(
        f"{NCCL}1412",
        "",
        """
swat1-04:2017630:2017697 [7] NCCL INFO Channel 00/0 : 7[7] -> 6[6] via P2P/direct pointer/read
swat1-04:2017630:2017699 [5] NCCL INFO Channel 03/0 : 5[5] -> 12[4] [send] via NET/IB/3
swat1-04:2017630:2017700 [4] NCCL INFO Channel 03/0 : 13[5] -> 4[4] [receive] via NET/IB/3
""",
        "RDMA, without GPUDirect",
    ),
    "InfiniBand with GPUDirect": Row(
        "https://github.com/Azure/aks-rdma-infiniband/pull/36",
        "",
        """
leader-h2nng:523:564 [0] NCCL INFO NCCL_NET_GDR_LEVEL set by environment to SYS
leader-h2nng:523:564 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
leader-h2nng:523:564 [0] NCCL INFO Channel 08/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
""",
        "RDMA, GPUDirect",
    ),
    "DGX Spark, both twins": Row(
        "https://github.com/mark-ramsey-ri/vllm-dgx-spark/issues/1",
        "",
        """
spark-3995:2981:2981 [0] NCCL INFO P2P plugin v10 IBext_v10
spark-3995:2981:2981 [0] NCCL INFO NCCL_SOCKET_IFNAME set to enp1s0f1np1
spark-3995:2981:2981 [0] NCCL INFO NET/IB : Made virtual device [0] name=rocep1s0f1 speed=200000 ndevs=1
spark-3995:2981:2981 [0] NCCL INFO NET/IB : Made virtual device [1] name=roceP2p1s0f1 speed=200000 ndevs=1
spark-3995:2981:3111 [0] NCCL INFO NET/IB : GPU Direct RDMA (DMABUF) enabled for HCA 1 'roceP2p1s0f1
spark-3995:2981:3113 [0] NCCL INFO Channel 09/0 : 1[0] -> 0[0] [send] via NET/IBext_v10/1
spark-3995:2981:3113 [0] NCCL INFO Channel 10/0 : 1[0] -> 0[0] [send] via NET/IBext_v10/0
""",
        "RDMA on roceP2p1s0f1, rocep1s0f1, without GPUDirect",
    ),
    "before a network is chosen": Row(
        f"{NCCL}1866",
        "2.27.6",
        """
cl4-gpu03-vm:1134070:1134070 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to enp9s0np0
cl4-gpu03-vm:1134070:1134070 [0] NCCL INFO Bootstrap: Using enp9s0np0:10.99.0.2<0>
cl4-gpu03-vm:1134070:1134070 [0] NCCL INFO cudaDriverVersion 13000
cl4-gpu03-vm:1134070:1134070 [0] NCCL INFO NCCL version 2.27.6+cuda13.0
cl4-gpu03-vm:1134070:1134070 [0] NCCL INFO init.cc:1798 Cuda Host Alloc Size 4 pointer 0x82fa00000
""",
        "",
    ),
    "InfiniBand, newest lines": Row(
        f"{NCCL}1925",
        "",
        """
nccl-sleep-c7d759db6-2bp29:2620971:2620971 [3] NCCL INFO NCCL_IB_DISABLE set by environment to 0.
nccl-sleep-c7d759db6-2bp29:2620971:2620971 [3] NCCL INFO NCCL_IB_HCA set to mlx5_0
nccl-sleep-c7d759db6-2bp29:2620971:2620971 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:172.25.30.42<0>
nccl-sleep-c7d759db6-2bp29:2620971:2620971 [3] NCCL INFO Initialized NET plugin IB
nccl-sleep-c7d759db6-2bp29:2620971:2620971 [3] NCCL INFO Assigned NET plugin IB to comm
nccl-sleep-c7d759db6-2bp29:2620971:2620971 [3] NCCL INFO Assigned GIN plugin GIN_IB_GDAKI to comm
nccl-sleep-c7d759db6-2bp29:2620971:2620971 [3] NCCL INFO Using network IB
nccl-sleep-c7d759db6-cgz82:3769902:3769902 [3] NCCL INFO DMA-BUF is available on GPU device 3
""",
        "InfiniBand on mlx5_0",
    ),
    "sockets, newest lines": Row(
        "https://github.com/NVIDIA/nccl/pull/2047",
        "2.29.2",
        """
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO ENV/Plugin: Could not find: libnccl-env.so
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO Bootstrap: Using eth0:172.17.16.2<0>
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO NCCL version 2.29.2+cuda12.8
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO Failed to open libibverbs.so[.1]
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO transport/net_ib/init.cc:370 -> 3
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO Failed to initialize NET plugin IB
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO NET/Socket : Using [0]eth0:172.17.16.2<0>
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO Initialized NET plugin Socket
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO Assigned NET plugin Socket to comm
VM-16-2-ubuntu:20184:20184 [0] NCCL INFO Using network Socket
""",
        "TCP on eth0 (10 Gb/s)",
        TEN,
    ),
    "a plug-in that finds no EFA": Row(
        f"{NCCL}229",
        "2.4.6",
        """
ip-192-168-22-101:5245:5245 [0] NCCL INFO NET/OFI Forcing AWS OFI ndev 4
ip-192-168-22-101:5245:5245 [0] get_ofi_provider:312 NCCL WARN NET/OFI Could not find any optimal provider
ip-192-168-22-101:5245:5245 [0] misc/ibvwrap.cu:61 NCCL WARN Failed to open libibverbs.so[.1]
ip-192-168-22-101:5245:5245 [0] NCCL INFO NET/Socket : Using [0]ens5:192.168.22.101<0>
ip-192-168-22-101:5245:5245 [0] NCCL INFO Using network Socket
NCCL version 2.4.6+cuda10.0
""",
        "TCP on ens5, although efa_0 is active: NCCL's plug-in aws-ofi-nccl finds no EFA -> `fi_info -p efa` in the "
        "container must list it: it needs /dev/infiniband, and the image EFA's libfabric",
        Wires(active=("efa_0",), efa=True),
    ),
    "a plug-in for EFA where there is none": Row(
        f"{NCCL}229, on a machine with InfiniBand",
        "",
        """
ip-192-168-22-101:5245:5245 [0] get_ofi_provider:312 NCCL WARN NET/OFI Could not find any optimal provider
ip-192-168-22-101:5245:5245 [0] misc/ibvwrap.cu:61 NCCL WARN Failed to open libibverbs.so[.1]
ip-192-168-22-101:5245:5245 [0] NCCL INFO NET/Socket : Using [0]ens5:192.168.22.101<0>
ip-192-168-22-101:5245:5245 [0] NCCL INFO Using network Socket
""",
        "TCP on ens5, although mlx5_0 is active: the image has no libibverbs.so -> install libibverbs1 and "
        "ibverbs-providers in the image",
        MLX,
    ),
    "EFA": Row(
        f"{NCCL}1597",
        "",
        """
8h200-2:6831:6840 [0] NCCL INFO NET/OFI Skipping NCCL_PROTO checks on P5en + RDMA
8h200-2:6831:6840 [0] NCCL INFO NET/OFI Support for DMA-BUF registrations: false
8h200-2:6831:6840 [0] NCCL INFO PROFILER/Plugin: Could not find: libnccl-profiler.so.
8h200-2:6831:6840 [0] NCCL INFO Using network Libfabric
8h200-3:6310:6318 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
8h200-3:6310:6318 [0] NCCL INFO NET/OFI NIC group 0 device #0 0000:56:00.0
""",
        "EFA on 16 cards",
    ),
    "EFA, earlier name": Row(
        "https://github.com/aws/aws-ofi-nccl/issues/715",
        "",
        """
algo-1:18567:18642 [5] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
algo-1:18564:18638 [2] NCCL INFO NET/OFI Setting NCCL_PROTO to "simple"
algo-1:18564:18638 [2] NCCL INFO Using non-device net plugin version 0
algo-1:18564:18638 [2] NCCL INFO Using network AWS Libfabric
""",
        "EFA on 4 cards",
    ),
    "the interface of another container": Row(
        "https://github.com/Oneflow-Inc/oneflow/issues/3586",
        "",
        """
worker:101542:101542 [0] NCCL INFO Bootstrap : Using [0]eno1:172.18.40.41<0> [1]veth25f2e72:fe80::380d:bfff:fe5b:54d2%veth25f2e72<0>
worker:101542:101542 [0] NCCL INFO NET/IB : No device found.
worker:101542:101542 [0] NCCL INFO NET/Socket : Using [0]eno1:172.18.40.41<0> [1]veth25f2e72:fe80::380d:bfff:fe5b:54d2%veth25f2e72<0>
worker:101542:101542 [0] NCCL INFO Using network Socket
worker:101542:101934 [0] NCCL INFO Channel 00 : 0[18000] -> 1[18000] [receive] via NET/Socket/1
worker:101542:101934 [0] NCCL INFO Channel 00 : 1[18000] -> 0[18000] [send] via NET/Socket/1
""",
        "TCP on veth25f2e72",
    ),
    "both InfiniBand networks switched off": Row(
        f"{NCCL}1053",
        "",
        """
axa:3048391:3048566 [0] NCCL INFO NCCL_IBEXT_DISABLE set by environment to 1.
axa:3048391:3048566 [0] NCCL INFO net.cc:79 -> 3
axa:3048391:3048566 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
axa:3048391:3048566 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
axa:3048391:3048566 [0] NCCL INFO Using network Socket
axa:3048391:3048566 [0] NCCL INFO NET/Socket : GPU Direct RDMA Disabled for HCA 0 'lo'
""",
        "TCP on lo, although mlx5_0 is active: NCCL_IB_DISABLE is set -> remove it from `env` or the image",
        MLX,
    ),
    "NCCL_NET=Socket, which NCCL does not log": Row(
        f"{NCCL}676",
        "2.11.4",
        """
gpu01:124172:124172 [0] NCCL INFO NCCL_SOCKET_IFNAME set to en
gpu01:124172:124172 [0] NCCL INFO Bootstrap : Using enp225s0f1:10.10.10.2<0>
gpu01:124172:124172 [0] NCCL INFO NET/Socket : Using [0]enp225s0f1:10.10.10.2<0>
gpu01:124172:124172 [0] NCCL INFO Using network Socket
NCCL version 2.11.4+cuda11.4
""",
        "TCP on enp225s0f1, although mlx5_0 is active: NCCL does not say why "
        "-> check NCCL_NET and NCCL_IB_HCA; see `launcher doctor JOB`",
        MLX,
    ),
    "no device, newest lines": Row(
        f"{NCCL}2057",
        "2.29.2",
        """
VM-16-64-ubuntu:28471:28471 [0] NCCL INFO NCCL version 2.29.2+cuda12.8
VM-16-64-ubuntu:28471:28471 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
VM-16-64-ubuntu:28471:28471 [0] NCCL INFO NET/IB : No device found.
VM-16-64-ubuntu:28471:28471 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:172.17.16.64<0>
VM-16-64-ubuntu:28471:28471 [0] NCCL INFO Failed to initialize NET plugin IB
""",
        "",
    ),
    "a plugin over TCP": Row(
        f"{NCCL}1519",
        "2.20.5",
        """
nathan-h100-1:14492:14492 [0] NCCL INFO NET/Plugin: Loaded net plugin FastSocket (v6)
nathan-h100-1:14492:14492 [0] NCCL INFO NCCL version 2.20.5+cuda12.4
nathan-h100-1:14492:14605 [0] NCCL INFO NET/FastSocket : Using [0]enp0s12:10.0.0.6<0> [1]enp6s0f0:10.0.1.4<0> [2]enp7s0f0:10.0.2.4<0>
nathan-h100-1:14492:14605 [0] NCCL INFO Using network FastSocket
""",
        "FastSocket (a network plugin of NCCL)",
    ),
    "AWS's plugin without EFA": Row(
        f"{NCCL}229",
        "2.4.6",
        """
ip-192-168-16-255:25604:25604 [0] NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm
NCCL version 2.4.6+cuda10.0
ip-192-168-16-255:35481:35549 [1] NCCL INFO Ring 00 : 15 -> 0 [receive] via NET/AWS Libfabric/0
""",
        "TCP by libfabric, without GPUDirect",
    ),
    "several processes, each with a card": Row(
        f"{NCCL}1357",
        "",
        """
qh100-gpu20:39631:39742 [2] NCCL INFO Channel 05/0 : 2[2] -> 10[2] [receive] via NET/IBext/1/GDRDMA
qh100-gpu20:39633:39743 [4] NCCL INFO Channel 06/0 : 4[4] -> 12[4] [receive] via NET/IBext/2/GDRDMA
qh100-gpu20:39635:39741 [6] NCCL INFO Channel 11/0 : 6[6] -> 14[6] [receive] via NET/IBext/3/GDRDMA
qh100-gpu20:39632:39747 [3] NCCL INFO Channel 14/0 : 11[3] -> 9[1] via P2P/CUMEM
""",
        "RDMA, GPUDirect",
    ),
    "GPUDirect in one direction": Row(
        f"{NCCL}897",
        "",
        """
NCCL INFO Channel 00/0 : 9[1a000] -> 2[6b000] [send] via NET/IB/0/GDRDMA
NCCL INFO Channel 00/0 : 9[1a000] -> 2[6b000] [receive] via NET/IB/1
""",
        "RDMA, GPUDirect in part",
    ),
    "several nodes' links with NVLink": Row(
        f"{NCCL}1769",
        "",
        """
gb200a-04:2101743:2101803 [1] NCCL INFO MNNVL busId 0x901000 fabric UUID 3143b15bc2cd192b.28cc9b5473fb5b93 cliqueId 0x7ffe state 3 healthMask 0xaa
gb200a-04:2101743:2101803 [1] NCCL INFO Setting affinity for GPU 1 to ff,ffffffff,ffffffff
gb200a-04:2101745:2101800 [3] NCCL INFO NCCL_NVLS_ENABLE set by environment to 1.
""",
        "",
    ),
}
