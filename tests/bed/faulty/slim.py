"""Removes the CUDA libraries that `import torch` does not map: nothing here has a GPU, and every node gets a copy."""

import os
import shutil

import torch

site = os.path.dirname(os.path.dirname(torch.__file__))
with open("/proc/self/maps") as maps:
    used = {line.split(maxsplit=5)[5].strip() for line in maps if line.rstrip().endswith((".so",)) or ".so." in line}
used = {os.path.realpath(path) for path in used}
for folder, _, names in os.walk(os.path.join(site, "nvidia")):
    for name in names:
        path = os.path.join(folder, name)
        if ".so" in name and os.path.realpath(path) not in used:
            os.remove(path)
shutil.rmtree(os.path.join(site, "triton"), ignore_errors=True)
