"""After a few steps one rank stops taking part; the others wait for it. Until the first step each says it is alive."""

import os
import subprocess
import sys
import time
from datetime import timedelta

# A thread would be silent, too, while a library is loaded on a busy machine.
alive = subprocess.Popen(["sh", "-c", f"while kill -0 {os.getpid()} 2>/dev/null; do echo starting; sleep 1; done"])


def reads_data_for_ever() -> None:
    while True:
        time.sleep(1)


import torch  # noqa: E402 - it takes longer than the hang timeout if the machine is busy
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo", timeout=timedelta(minutes=30))
for step in range(5):
    dist.all_reduce(torch.ones(1))
    alive.kill()
    if dist.get_rank() == 0:
        print(f"step {step}", flush=True)
    if step == 3 and dist.get_rank() == int(sys.argv[1]):
        reads_data_for_ever()
