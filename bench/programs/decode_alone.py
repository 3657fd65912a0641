"""Decodes JPEGs of a data set in one thread, without torch for the compiled decoder; used by bench/gpu.py.

    python -m bench.programs.decode_alone FOLDER DECODER SECONDS

Prints a line when it is ready, waits for one on stdin, and prints its images/s.
"""

from __future__ import annotations

import sys
import time
from itertools import cycle
from pathlib import Path

import numpy as np
from PIL import Image

from train.data.augment import NUMBERS, View, random_box
from train.data.decode import choose_decoder


def main(folder: str, name: str, length: float) -> None:
    decoder, out, views = choose_decoder(name), np.empty((224, 224, 3), np.uint8), []
    for path in sorted(Path(folder).glob("train/*/*.jpg"))[:64]:
        numbers = np.random.default_rng(len(views)).random(NUMBERS).tolist()
        views.append((path.read_bytes(), View(random_box(*Image.open(path).size, 0.08, numbers))))
    print("ready", flush=True)
    sys.stdin.readline()
    begin, images = time.perf_counter(), 0
    for data, view in cycle(views):
        decoder.decode(data, lambda *_, view=view: view, out)  # type: ignore[misc]
        images += 1
        if time.perf_counter() - begin > length:
            break
    print(images / (time.perf_counter() - begin))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
