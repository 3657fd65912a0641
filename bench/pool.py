"""Cost of a sweep over a pool for the launcher: `python -m bench.pool`.

Runs fifty short variants on eight plain-process nodes of this machine. Prints the launcher's own CPU time per variant,
without that of the variants, and the longest time for which a node was idle while a variant waited.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARIANT = "date +%s.%N >>LOG; sleep SECONDS; date +%s.%N >>LOG.ends"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4, help="duration of each variant")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        script = VARIANT.replace("LOG", str(log)).replace("SECONDS", str(options.seconds))
        job = {
            "name": "pool",
            "runtime": "process",
            "nodes": {"pool": ["local"] * options.nodes},
            "run": {"command": ["sh", "-c", script, "sh"]},
            "sweep": {"grid": {"x": list(range(options.variants))}},
        }
        (Path(folder) / "job.yaml").write_text(json.dumps(job))
        began = time.monotonic()
        used, code = processor_seconds([sys.executable, "-m", "launcher", "up", "job.yaml"], Path(folder))
        took = time.monotonic() - began
        begins, ends = (sorted(map(float, path.read_text().split())) for path in (log, Path(f"{log}.ends")))
    # the n-th variant to finish frees a node for the n-th waiting one
    idle = [begin - end for begin, end in zip(begins[options.nodes :], ends, strict=False)]
    print(f"{len(begins)} variants on {options.nodes} nodes in {took:.1f} s, exit code {code}")
    print(f"{used / options.variants:.2f} s of the launcher's CPU time per variant")
    print(f"idle between two variants: median {sorted(idle)[len(idle) // 2]:.2f} s, longest {max(idle):.2f} s")


def processor_seconds(command: list[str], folder: Path) -> tuple[float, int]:
    """Return the CPU time of the process without children (/proc/PID/stat, fields 14 and 15), and its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    used, ticks = 0, os.sysconf("SC_CLK_TCK")
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        used = max(used, int(fields[11]) + int(fields[12]))
        time.sleep(0.1)
    return used / ticks, process.returncode


if __name__ == "__main__":
    main()
