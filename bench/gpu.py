"""All checks of the trainer that require a GPU, in one command that takes some minutes.

    python -m bench.gpu [--json FILE] [--only NAME ...] [--dry]

Each check (tests/gpu/checks.py) runs in a separate process with a time limit, with the installed torch and torchvision.
Requires one GPU and no network. `--dry` runs the same checks with the same number of steps and images, with a small
model on a simulated GPU on the CPU (tests/gpu/pretend.py). Prints a line per check and a row for
docs/internals/benchmarks.md; the exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import report

LIMITS = {  # name of a check -> time limit in seconds; cheap and important ones first
    "slots": 60,
    "syncbn": 60,
    "ddp": 60,
    "fsdp": 60,
    "fp16": 60,
    "ema": 60,
    "step": 120,
    "amp": 180,
    "overlap": 120,
    "data": 60,
    "launcher": 120,
    "channels_last": 90,
    "options": 120,
    "compile": 240,
}
PATIENCE = 5  # factor of the limits on a CPU
GRACE = 10.0  # seconds from SIGTERM to SIGKILL, for a process that is stuck in the driver
CHECK = (sys.executable, "-m", "tests.gpu.checks")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--only", nargs="+", choices=tuple(LIMITS), default=tuple(LIMITS))
    parser.add_argument("--dry", action="store_true", help="small models on a CPU")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": report.machine(), "dry": options.dry, "checks": {}}
    for name in options.only:
        found = run(name, options.dry)
        result["checks"][name] = found
        verdict = {True: "ok", False: "FAILED", None: "-"}[found["ok"]]
        shown = ", ".join(f"{key} {value}" for key, value in found.items() if key not in ("ok", "seconds"))
        print(f"{name:<14} {verdict:<7} {found['seconds']:5.1f} s  {shown}", flush=True)
    print(f"\n{row(result['checks'])}")
    if options.json:
        report.write(options.json, result)
    return int(any(found["ok"] is False for found in result["checks"].values()))


def run(name: str, dry: bool = False) -> dict[str, Any]:
    """Return the results of a check, `seconds` and `ok`: None if it did not run or cannot fail."""
    limit, begun = LIMITS[name] * (PATIENCE if dry else 1), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        output = Path(folder) / "result.json"
        command = [*CHECK, name, str(output), *(["--dry"] if dry else [])]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _end(process)
            return {"ok": False, "seconds": round(limit, 1), "why": f"timed out after {limit:.0f} s"}
        seconds = round(time.monotonic() - begun, 1)
        if process.returncode or not output.exists():
            lines = [line for line in errors.splitlines() if line.strip()] or ["no output"]
            return {"ok": False, "seconds": seconds, "why": lines[-1]}
        figures: dict[str, Any] = json.loads(output.read_text())
        return {"ok": figures.pop("ok"), "seconds": seconds, **figures}


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate the process and all of its children."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE)
            return


def row(checks: dict[str, dict[str, Any]]) -> str:
    """Return a row of the table in docs/internals/benchmarks.md with the table's head."""
    cells = {
        "GPU": ("step", "device"),
        "torch": ("step", "torch"),
        "images/s": ("step", "images/s"),
        "bare loop": ("step", "bare images/s"),
        "ratio": ("step", "ratio"),
        "MFU": ("step", "MFU"),
        "peak MB": ("step", "peak MB"),
        "data wait": ("overlap", "data wait"),
        "loader images/s": ("data", "images/s"),
        "channels_last": ("channels_last", "ratio"),
        "compile": ("compile", "ratio"),
        "syncbn": ("options", "syncbn"),
    }
    values = {head: str(checks.get(check, {}).get(key, "")) for head, (check, key) in cells.items()}
    failed = [name for name, found in checks.items() if found["ok"] is False]
    values["checks"] = f"failed: {', '.join(failed)}" if failed else "all ok"
    lines = (values, ["---"] * len(values), values.values())
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
