"""python unguarded.py ARG...: the trainer; a worker of a parameter server works here and not in a child process."""

import os
import sys

if __name__ == "__main__":
    from train.__main__ import leave, main
    from train.dual_batch.guard import GUARDED

    os.environ[GUARDED] = str(os.getppid())
    leave(main(sys.argv[1:]))
