"""After a few steps one rank stops taking part; the others wait for it. Until the first step each says it is alive."""

import sys
import threading
import time
from datetime import timedelta

begun = threading.Event()


def says_so() -> None:
    while not begun.wait(1):
        print("starting", flush=True)


def reads_data_for_ever() -> None:
    while True:
        time.sleep(1)


threading.Thread(target=says_so).start()
import torch  # noqa: E402 - it takes longer than the hang timeout if the machine is busy
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo", timeout=timedelta(minutes=30))
for step in range(5):
    dist.all_reduce(torch.ones(1))
    begun.set()
    if dist.get_rank() == 0:
        print(f"step {step}", flush=True)
    if step == 3 and dist.get_rank() == int(sys.argv[1]):
        reads_data_for_ever()
