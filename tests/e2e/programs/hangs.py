"""After a few steps one rank stops taking part; the others wait. Before the first step, sitecustomize.py prints."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def reads_data_forever() -> None:
    while True:
        time.sleep(1)


dist.init_process_group("gloo", timeout=timedelta(minutes=30))
for step in range(5):
    dist.all_reduce(torch.ones(1))
    Path(os.environ["LAUNCHER_OUTPUT"], "begun").touch()
    if dist.get_rank() == 0:
        print(f"step {step}", flush=True)
    if step == 3 and dist.get_rank() == int(sys.argv[1]):
        reads_data_forever()
