"""What the program leaves of a generation on this node: its error, and how far its metrics go.

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
    import words  # beside this file

TAIL = 1 << 16  # bytes at the end of a log or of the metrics


@dataclass(frozen=True)
class Begun:
    """A generation that has begun on this node."""

    folder: Path  # of the generation
    log: Path  # of the node
    offset: int  # bytes of the log before it began

    def error(self, code: int, *, torchrun: bool) -> str:
        """The program's own error, of a command its exit code; "" where it only lost its peers."""
        ranks = sorted(self.folder.glob("rank-*.log"))
        texts = [_end_of(file) for file in ranks] if torchrun else [_end_of(self.log, self.offset)]
        said = {text: words.LOST_PEER.search(words.last_words(text)) is not None for text in texts}
        own = next((error for text, victim in said.items() if not victim and (error := words.error(text))), "")
        if any(said.values()) and not own:
            return ""
        return own if own and torchrun else f"exit code {code}"

    def step(self, further: int) -> int:
        """The last step in the metrics of this generation. further: of lines without a step."""
        last = 0
        for line in _end_of(self.folder / "metrics.jsonl").splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # torn
                told = json.loads(line)
                if isinstance(told, dict) and told.get("kind") != "start":
                    step = told.get("step")
                    last = max(last, step if isinstance(step, int) else further)
        return last


def _end_of(file: Path, begin: int = 0) -> str:
    """The end of a file, from that byte on at most; "" where it cannot be read."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(begin, stream.seek(0, os.SEEK_END) - TAIL))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
