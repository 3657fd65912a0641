"""measured.py FILE LR: writes in a moment what a training writes, metrics, a curve and a checkpoint; waits for FILE."""

import json
import os
import sys
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

end, lr, output = Path(sys.argv[1]), float(sys.argv[2]), Path(os.environ["LAUNCHER_OUTPUT"])
start = {"kind": "start", "time": 0.0, "arch": "smallcnn", "world": 1, "global_batch": 64}
step = {"kind": "step", "epoch": 1, "epochs": 1, "steps": 20, "images_per_s": 100.0, "loss": lr}
lines = [start, *({**step, "time": float(number), "step": number} for number in range(1, 21))]
(output / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
(output / "checkpoints").mkdir()
(output / "checkpoints" / "last.pt").write_bytes(b"weights")
writer = EventFileWriter(str(output))
writer.add_event(Event(step=1, summary=Summary(value=[Summary.Value(tag="Loss/train", simple_value=lr)])))
writer.close()
print(f"trained with {lr}", flush=True)
while not end.exists():
    time.sleep(0.1)
