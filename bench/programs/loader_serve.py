"""loader_serve.py FOLDER NAME: a loader of the checkout in PYTHONPATH; a line on stdin -> passes, images/CPU-second."""

import sys
from pathlib import Path

import torch

from bench.loader import cpu_seconds

try:
    from bench.loader_variants import VARIANTS, Places
except ImportError:  # its name in old checkouts
    from bench.loader_ways import WAYS as VARIANTS  # type: ignore[import-not-found,no-redef]
    from bench.loader_ways import Places  # type: ignore[no-redef]

PASSES = 6
torch.set_num_threads(1)
root = Path(sys.argv[1])
loaded = VARIANTS[sys.argv[2]](Places(root / "images", root / "jpeg400.pack", root / "raw256.pack"))
sum(loaded.epoch())  # fills caches
before = cpu_seconds(loaded.workers())
print("ready", flush=True)
for _ in sys.stdin:
    images = sum(sum(loaded.epoch()) for _ in range(PASSES))
    now = cpu_seconds(loaded.workers())
    print(images / (now - before), flush=True)
    before = now
