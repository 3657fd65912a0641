"""The steps of chaos_steps.py under torchft: each node is a separate replica, and lost ones are left out of a step.

    chaos_torchft.py lighthouse LEAST PORT
    chaos_torchft.py SECONDS INTERVAL TIMEOUT FOLDER LEAST ADDRESS LIGHTHOUSE

The lighthouse, one process on one node, decides which replicas take part.
"""

import json
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer

LOST_MS = 6000  # time without a heartbeat after which a replica is lost, as for torchrun in chaos.py


def lighthouse(least: int, port: int) -> None:
    server = LighthouseServer(f"[::]:{port}", least, join_timeout_ms=5000, heartbeat_timeout_ms=LOST_MS)
    print(server.address(), flush=True)
    while server:  # the server stops with this object
        time.sleep(60)


def replica(seconds: float, interval: int, limit: float, folder: Path, least: int, address: str, lights: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file, timeout = folder / "checkpoint.json", timedelta(seconds=limit)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    state: dict[str, Any] = {}
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=state.update,
        state_dict=lambda: dict(state),
        min_replica_size=least,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lights,
        replica_id=socket.gethostname(),
        hostname=address,
    )
    if file.exists():
        manager.load_state_dict(json.loads(file.read_text()))
    while True:
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        time.sleep(seconds)
        if not manager.should_commit():
            continue
        if manager.participating_rank() == 0:
            with (folder / "steps.txt").open("a") as steps:
                steps.write(f"{manager.current_step()} {time.time():.3f}\n")
        if manager.current_step() % interval == 0:
            file.with_suffix(".part").write_text(json.dumps(manager.state_dict()))
            file.with_suffix(".part").replace(file)


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse(int(sys.argv[2]), int(sys.argv[3]))
    else:
        seconds, interval, limit, folder, least, address, lights = sys.argv[1:]
        replica(float(seconds), int(interval), float(limit), Path(folder), int(least), address, lights)
