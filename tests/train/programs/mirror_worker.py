"""python mirror_worker.py URL FOLDER: uploads two checkpoints of 9 MB, one after the other."""

import sys
from pathlib import Path

from train.__main__ import leave
from train.mirror import Mirror, new_name

if __name__ == "__main__":
    url, folder = sys.argv[1], Path(sys.argv[2])
    mirror = Mirror(url, folder, True, print)
    mirror.begin(fresh=False)
    for epoch in (1, 2):
        (folder / "last.pt").unlink(missing_ok=True)
        (folder / "last.pt").write_bytes(bytes([epoch]) * 9_000_000)
        state = {"run": "", "generation": 0, "progress": {"epoch": epoch, "step": 0, "validated": epoch}}
        mirror.offer([folder / "last.pt"], state, new_name(state), busy=False)
    mirror.end()
    leave(0)
