"""The process in which bench/gpu.py measures: python -m tests.gpu.worker RESULTS [--dry].

Reads the names of sections from stdin, a line each, and writes their rows to the inherited pipe RESULTS, a line of JSON
each, then {"end": NAME}. An exception ends the process: what it leaves on the GPU or in torch is unknown.
"""

from __future__ import annotations

import json
import os
import sys


def main(results: int, *flags: str) -> None:
    os.set_inheritable(results, False)  # else what a section starts would keep the pipe open
    from tests.gpu.checks import rows

    for line in sys.stdin:
        name = line.strip()
        for row, figures in rows(name, "--dry" in flags):
            tell(results, {"row": row, "figures": figures})
        tell(results, {"end": name})


def tell(results: int, what: object) -> None:
    text = f"{json.dumps(what, default=str)}\n".encode()
    while text:
        text = text[os.write(results, text) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
