"""leaves.py HOW SECONDS [RANK]: at step 3, this rank (default 1) exits with code 0 or suspends itself.

HOW: exit; plain: without destroy_process_group; quit: immediately, by os._exit; stop. The others wait
for at most SECONDS.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

leaver = int(sys.argv[3]) if sys.argv[3:] else 1
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[2])))
for step in range(5):
    if step == 3 and dist.get_rank() == leaver:
        if sys.argv[1] == "exit":
            dist.destroy_process_group()
        if sys.argv[1] == "quit":
            os._exit(0)
        if sys.argv[1] != "stop":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        print(f"step {step}", flush=True)
