"""leaves.py HOW SECONDS: at step 3 rank 1 leaves with exit code 0 (exit) or suspends itself (stop); the others wait for
it, for SECONDS at most."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[2])))
for step in range(5):
    if step == 3 and dist.get_rank() == 1:
        if sys.argv[1] == "exit":
            dist.destroy_process_group()
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        print(f"step {step}", flush=True)
