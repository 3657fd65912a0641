"""Validates several data sets in one process group and prints each rank's results as JSON."""

import json
import sys
from pathlib import Path

from train.__main__ import leave
from train.config import parse
from train.distributed.world import StopSignal, start
from train.trainer import Trainer

folder, way, *names = sys.argv[1:]
world = None
for name in names:
    options = "--arch smallcnn --image-size 8 --val-resize 8 --augment none --batch-size 4 --dtype float64 --workers 1"
    config = parse(
        ["--data", str(Path(folder) / name), "--output", str(Path(folder) / "none"), "--metrics", way, *options.split()]
    )
    world = world or start(config)
    stop = StopSignal(world)
    scores = Trainer(config, world).validate(stop)
    stop.settle()
    print(json.dumps({"name": name, "images": scores.images, "loss": scores.loss, "top1": scores.top1}), flush=True)
leave(0)
