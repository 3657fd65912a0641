"""Everything about the trainer that only a GPU can show, in one command of at most nine minutes.

    python -m bench.gpu [--json FILE] [--only NAME ...] [--dry]

Each check (bench/gpu_checks.py) runs in a process of its own, with a time limit, and takes torch and torchvision as it
finds them. It needs one GPU and no network. `--dry` runs the same code with small models on a CPU. Prints a line per
check and a row for docs/benchmarks.md; the exit code is 1 if a check failed.
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
from pathlib import Path
from typing import Any

from bench import report

BUDGET = 540.0  # seconds in all
LIMITS = {  # name of a check -> seconds it may take; the cheap and the important ones first
    "slots": 60,
    "syncbn": 60,
    "ddp": 60,
    "step": 120,
    "amp": 120,
    "overlap": 120,
    "data": 60,
    "launcher": 120,
    "channels_last": 60,
    "compile": 120,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--only", nargs="+", choices=tuple(LIMITS), default=tuple(LIMITS))
    parser.add_argument("--dry", action="store_true", help="small, on a CPU")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": report.machine(), "dry": options.dry, "checks": {}}
    end = time.monotonic() + BUDGET
    for name in options.only:
        found = run(name, options.dry, end - time.monotonic())
        result["checks"][name] = found
        verdict = {True: "ok", False: "FAILED", None: "-"}[found["ok"]]
        shown = ", ".join(f"{key} {value}" for key, value in found.items() if key not in ("ok", "seconds"))
        print(f"{name:<14} {verdict:<7} {found['seconds']:5.1f} s  {shown}", flush=True)
    print(f"\n{row(result['checks'])}")
    if options.json:
        report.write(options.json, result)
    return int(any(found["ok"] is False for found in result["checks"].values()))


def run(name: str, dry: bool = False, left: float = BUDGET) -> dict[str, Any]:
    """The check's figures, `seconds` and `ok`: None if it did not run or has nothing to fail.

    It ends after its limit, or after `left` seconds if that is less.
    """
    limit, begun = min(LIMITS[name], left), time.monotonic()
    if limit < 1:
        return {"ok": None, "seconds": 0.0, "why": "no time left"}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "bench.gpu_checks", name, str(output), *(["--dry"] if dry else [])]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # with all that it has started
            process.communicate()
            return {"ok": False, "seconds": round(limit, 1), "why": f"not done after {limit:.0f} s"}
        seconds = round(time.monotonic() - begun, 1)
        if process.returncode or not output.exists():
            lines = [line for line in errors.splitlines() if line.strip()] or ["no output"]
            return {"ok": False, "seconds": seconds, "why": lines[-1]}
        figures: dict[str, Any] = json.loads(output.read_text())
        return {"ok": figures.pop("ok"), "seconds": seconds, **figures}


def row(checks: dict[str, dict[str, Any]]) -> str:
    """A row of the table in docs/benchmarks.md; its head is printed with it."""
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
    }
    values = {head: str(checks.get(check, {}).get(key, "")) for head, (check, key) in cells.items()}
    failed = [name for name, found in checks.items() if found["ok"] is False]
    values["checks"] = f"failed: {', '.join(failed)}" if failed else "all ok"
    lines = (values, ["---"] * len(values), values.values())
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
