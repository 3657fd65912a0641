"""epochs.py EPOCHS: loads its checkpoint if there is one, on every rank, as most scripts do. Rank 0 saves it.

Every rank also saves a shard, and rank 0 changes a file of the code, both in the working directory.
"""

import hashlib
import json
import os
import random
import sys
from pathlib import Path

import helper

epochs, rank = int(sys.argv[1]), os.environ["LAUNCHER_NODE_RANK"]
last, shard = Path("models/last.json"), Path(f"rank-{rank}.json")
state = json.loads(last.read_text()) if last.exists() else {"epoch": 0, "weights": [0.0] * 100}
own = json.loads(shard.read_text()) if shard.exists() else 0
digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]
print(f"starts at epoch {state['epoch']} with weights {digest}")
print(f"shard of epoch {own}, {helper.WORD} code, config {Path('config.txt').read_text()}", flush=True)
for epoch in range(state["epoch"] + 1, epochs + 1):
    chance = random.Random(epoch)
    state = {"epoch": epoch, "weights": [weight + chance.random() for weight in state["weights"]]}
    if rank == "0":
        last.parent.mkdir(exist_ok=True)
        last.write_text(json.dumps(state))
    shard.write_text(json.dumps(epoch))
if rank == "0":
    Path("config.txt").write_text("changed")
