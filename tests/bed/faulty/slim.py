"""Removes the CUDA libraries that `import torch` does not map: nothing here has a GPU, and every node gets a copy."""

import shutil
from pathlib import Path

import torch

site = Path(torch.__file__).parents[1]
maps = Path("/proc/self/maps").read_text().splitlines()
used = {Path(line.split(maxsplit=5)[5].strip()).resolve() for line in maps if ".so" in line}
for path in (site / "nvidia").rglob("*.so*"):
    if path.resolve() not in used:
        path.unlink()
shutil.rmtree(site / "triton", ignore_errors=True)
