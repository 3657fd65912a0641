"""A rank with modules of its own: those in FOLDER/RANK. Its package `train` too, if it has one there."""

import os
import sys

sys.path.insert(0, f"{sys.argv[1]}/{os.environ['RANK']}")

from train.__main__ import exit_code, leave
from train.experiments.dual_batch.guard import GUARDED

os.environ[GUARDED] = str(os.getppid())  # no further process for a worker of a parameter server
leave(exit_code(sys.argv[2:]))
