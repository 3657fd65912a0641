"""A rank with its data in DATA/RANK, which ends with the state of its process group.

On rank STUCK, reading an image never returns. DEADLINE: seconds after SIGTERM, in which a busy machine gets to a step.
"""

import os
import sys
import time

import torch.distributed as dist

from train import deadline
from train.__main__ import exit_code, leave
from train.data.folder import FileSource
from train.experiments.dual_batch.guard import GUARDED


def hang(source: FileSource, index: int) -> bytes:
    print("stuck", flush=True)
    time.sleep(1000)
    raise AssertionError


if stuck := os.environ.get("STUCK"):
    deadline.SECONDS = 1.0
    if stuck == os.environ["RANK"]:
        FileSource.read = hang  # type: ignore[method-assign]
        FileSource.place = lambda source, index: None  # type: ignore[method-assign,assignment,return-value]

if seconds := os.environ.get("DEADLINE"):
    deadline.SECONDS = float(seconds)

os.environ[GUARDED] = str(os.getppid())  # no further process for a worker of a parameter server
code = exit_code(["--data", f"{sys.argv[1]}/{os.environ['RANK']}", *sys.argv[2:]])
print(f"process group {'kept' if dist.is_initialized() else 'destroyed'}", flush=True)
leave(code)
