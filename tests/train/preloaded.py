"""Import the modules of a training process, which is slow: tests/train/forks.py forks from such a process."""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # as of every rank; it is read when torch is loaded
importlib.import_module("train.data.decode").choose_decoder("auto")  # before torchvision, as a rank does

for name in (
    "sympy",  # torch imports this one and the next when the first optimiser is made
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.run",
    "torch.utils.tensorboard.summary",
    "torchvision.models",
    "torchvision.transforms.v2",
    "train.experiments.dual_batch.run",
    "train.trainer",
    "train.distributed.fsdp",
    "train.experiments.model",
    "train.experiments.pipeline",
    "train.distributed.shards",
):
    importlib.import_module(name)
