"""A rank whose data is in a folder of its own, DATA/RANK. With STUCK, reading a file of that name never returns."""

import os
import sys
import time
from typing import Any

from train import deadline
from train.__main__ import leave, main
from train.data.folder import FileSource
from train.dual_batch.guard import GUARDED

if stuck := os.environ.get("STUCK"):
    deadline.SECONDS = 1.0
    read: Any = FileSource.read

    def hang(source: FileSource, index: int) -> bytes:
        if source.name(index).endswith(stuck):
            print("stuck", flush=True)
            time.sleep(1000)
        return bytes(read(source, index))

    FileSource.read = hang  # type: ignore[method-assign]

os.environ[GUARDED] = str(os.getppid())  # no further process for a worker of a parameter server
leave(main(["--data", f"{sys.argv[1]}/{os.environ['RANK']}", *sys.argv[2:]]))
