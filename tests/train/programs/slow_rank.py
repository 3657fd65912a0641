"""`python -m train` with slow data: SLOW is the rank for which each image takes longer to read, or `wander`.

With `wander` it is another rank in each interval of EVERY steps; SEED chooses the order.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time

from train.__main__ import leave, main
from train.data.folder import FileSource

DELAY = 0.03  # seconds an image
rank, world, slow = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["SLOW"]
in_an_interval, training = int(os.environ["IN_AN_INTERVAL"]), int(os.environ["TRAINING"])  # images
draw = random.Random(os.environ["SEED"])
turns = [turn for _ in range(100) for turn in draw.sample(range(world), world)]
count, read = itertools.count(), FileSource.read


def slowly(source: FileSource, index: int) -> bytes:
    if len(source.labels) == training:
        turn = turns[next(count) // in_an_interval]
        if (str(turn) if slow == "wander" else slow) == str(rank):
            time.sleep(DELAY)
    return read(source, index)


FileSource.read = slowly  # type: ignore[method-assign]
# no place to read several files from with one call of C, which would not be slow
FileSource.place = lambda source, index: None  # type: ignore[method-assign,assignment,return-value]
os.environ["LAUNCHER_NODE"] = f"gpu-{'abcd'[rank]}"
leave(main(sys.argv[1:]))
