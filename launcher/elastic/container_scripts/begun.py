"""Results of a generation on this node: the program's error and the last step in its metrics.

Python 3.8 without packages.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.container_scripts import words
else:
    import words  # in the same folder

TAIL = 1 << 16  # bytes at the end of a log or of the metrics


@dataclass(frozen=True)
class StartedGeneration:
    """A generation that was started on this node."""

    folder: Path  # of the generation
    log: Path  # of the node
    offset: int  # size of the log in bytes before it started

    def error(self, code: int, *, torchrun: bool) -> str:
        """Return the program's error, or its exit code if it named none; "" if it failed because it lost its peers."""
        ranks = sorted(self.folder.glob("rank-*.log"))
        texts = [_end_of(file) for file in ranks] if torchrun else [_end_of(self.log, self.offset)]
        lost = words.lost_peer if torchrun else words.lost_connection
        victims = {text: lost(words.error_or_last_lines(text)) for text in texts}
        own = next((error for text, victim in victims.items() if not victim and (error := words.error(text))), "")
        if any(victims.values()) and not own:
            return ""
        return own or f"exit code {code}"

    def step(self, further: int) -> int:
        """Return the last step in the metrics of this generation. further: the step to assume for lines without one."""
        last = 0
        for line in _end_of(self.folder / "metrics.jsonl").splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # truncated line
                row = json.loads(line)
                if isinstance(row, dict) and row.get("kind") != "start":
                    step = row.get("step")
                    last = max(last, step if isinstance(step, int) else further)
        return last


def _end_of(file: Path, start: int = 0) -> str:
    """Return the last bytes of a file, none before `start`; "" if it cannot be read."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(start, stream.seek(0, os.SEEK_END) - TAIL))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
