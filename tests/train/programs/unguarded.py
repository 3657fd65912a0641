"""python unguarded.py ARG...: the trainer, with a parameter server's worker in this process, not in a child."""

import os
import sys

if __name__ == "__main__":
    from train.__main__ import exit_code, leave
    from train.experiments.dual_batch.guard import GUARDED

    os.environ[GUARDED] = str(os.getppid())
    leave(exit_code(sys.argv[1:]))
