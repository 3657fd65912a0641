"""Any program with a process per node: the ranks add their numbers over TCP, at the rendezvous of the environment."""

import os
import socket
import time

rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
if rank == 0:
    with socket.create_server(("", port)) as server:
        total = 1 + sum(int(server.accept()[0].recv(10)) for _ in range(world - 1))
    print(f"rank 0 of {world}: sum {total}", flush=True)
else:
    while True:
        try:
            link = socket.create_connection((os.environ["MASTER_ADDR"], port))
            break
        except ConnectionRefusedError:  # rank 0 has not started yet
            time.sleep(0.1)
    link.sendall(str(rank + 1).encode())
