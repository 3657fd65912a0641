"""writes.py CODE: what an ordinary script writes, to its working directory. Fails once, goes on, exits with CODE."""

import os
import sys
from pathlib import Path

import helper

before = Path("checkpoints/last.pt").exists()
Path("checkpoints").mkdir(exist_ok=True)
Path("checkpoints/last.pt").write_bytes(os.environ["LAUNCHER_NODE"].encode() * 1000)
Path("runs/mine").mkdir(parents=True, exist_ok=True)
Path("runs/mine/events.out.tfevents.1.host").write_bytes(b"not read here")
Path("config.yaml").write_text("lr: 2\n")
print("found its checkpoint" if before else f"starts with {helper.WORD}")
sys.exit(int(sys.argv[1]) if before else 1)
