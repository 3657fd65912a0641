"""python little_memory.py RANK MEGABYTES ARG...: the trainer, with a memory limit for that rank after it has joined."""

import os
import resource
import sys
from pathlib import Path

if __name__ == "__main__":
    rank, megabytes, *argv = sys.argv[1:]
    from train.__main__ import leave, main

    if os.environ["RANK"] == rank:
        from train.experiments.dual_batch import worker
        from train.experiments.dual_batch.guard import GUARDED

        os.environ[GUARDED] = str(os.getppid())  # no guard: a child process would not have the limit
        train_epoch = worker.train_epoch

        def epoch(*values: object) -> object:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + int(megabytes) * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return train_epoch(*values)  # type: ignore[arg-type]

        worker.train_epoch = epoch  # type: ignore[assignment]
    leave(main(argv))
