"""An MPI program on the nodes of a job: `python3 mpirun.py PROGRAM [ARGUMENTS]` as each node's command.

mpirun starts its daemons by ssh, which containers do not have. Its agent is this file instead, which hands a daemon's
command line to the same file on the other node, through a torch store at MASTER_ADDR. One process per GPU, else one.
"""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

ARRIVAL = timedelta(minutes=10)  # for all nodes to be there: each may compile its program first
RUN = timedelta(days=1)


def open_store(*, hosts: bool) -> TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=hosts, timeout=RUN if not hosts else ARRIVAL, wait_for_workers=False)


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing; selects the route
        return str(probe.getsockname()[0])


def slots() -> int:
    """Return the number of this node's GPUs, 1 without any."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return 1
    return max(1, sum(line.startswith("GPU ") for line in listed.splitlines()))


def agent(host: str, command: list[str]) -> int:
    """Called by mpirun in place of ssh: have the command run on the host, and return its exit code."""
    store = open_store(hosts=False)
    store.set(f"command-{host}", " ".join(command))  # as ssh does: a shell of the host takes it apart
    return int(store.get(f"code-{host}"))


def serve(rank: int) -> int:
    """Run the daemon that mpirun sends to this node; return mpirun's exit code."""
    store, address = open_store(hosts=False), own_address()
    store.set(f"node-{rank}", json.dumps([address, slots()]))
    command = store.get(f"command-{address}").decode()
    if command:
        code = subprocess.run(["sh", "-c", command], check=False).returncode
        store.set(f"code-{address}", str(code))
    code = int(store.get("end"))
    store.set(f"left-{rank}", "")
    return code


def lead(program: list[str], nodes: int) -> int:
    store = open_store(hosts=True)
    others = [json.loads(store.get(f"node-{rank}")) for rank in range(1, nodes)]
    every = [[os.environ["MASTER_ADDR"], slots()], *others]
    started = f"{sys.executable} {Path(__file__).resolve()} --agent"
    # Open MPI 4 calls it plm_rsh, 5 prte's plm_ssh. Daemons of daemons would need an agent on every node.
    os.environ |= {"OMPI_MCA_plm_rsh_agent": started, "PRTE_MCA_plm_ssh_agent": started}
    os.environ |= {"OMPI_MCA_plm_rsh_no_tree_spawn": "1", "PRTE_MCA_plm_ssh_no_tree_spawn": "1"}
    os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # docker0 has the same address on every node
    os.environ |= {"OMPI_MCA_btl_tcp_if_exclude": "lo,docker0", "OMPI_MCA_oob_tcp_if_exclude": "lo,docker0"}
    hosts = ",".join(f"{address}:{count}" for address, count in every)
    count = sum(count for _, count in every)
    print(f"mpirun -np {count} --host {hosts} {' '.join(program)}")
    code = 127
    try:
        code = subprocess.run(["mpirun", "-np", str(count), "--host", hosts, *program], check=False).returncode
    except FileNotFoundError:
        print("mpirun is not in this image: use one with Open MPI, such as nvcr.io/nvidia/pytorch", file=sys.stderr)
    finally:
        for address, _ in others:
            store.compare_set(f"command-{address}", "", "")  # no daemon was started there
        store.set("end", str(code))
        store.wait([f"left-{rank}" for rank in range(1, nodes)])
    return code


def main() -> int:
    if sys.argv[1] == "--agent":
        return agent(sys.argv[2], sys.argv[3:])
    rank, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return serve(rank) if rank else lead(sys.argv[1:], nodes)


if __name__ == "__main__":
    sys.exit(main())
