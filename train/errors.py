"""Errors that the user can fix (one line, exit code 2, nothing overwritten), and the stop after SIGTERM."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class TrainError(Exception):
    """Invalid options, data or checkpoint; the message contains the location, the problem and the fix."""

    alike = False  # raised by every process of this machine


@contextmanager
def alike_on_a_machine() -> Iterator[None]:
    """Mark a TrainError as one that every process of this machine raises, before they know each other."""
    try:
        yield
    except TrainError as error:
        error.alike = True
        raise


def tell(error: TrainError) -> None:
    """Print the error as one line, on one rank; record it, without a traceback, in the error file that torchrun reads.

    A message of several lines is joined, so that launchers and logs show all of it as the last line.
    """
    line = " ".join(f"train: error: {error}".split("\n"))
    if not error.alike or os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        try:
            with Path(file).open("w", encoding="utf-8") as stream:
                json.dump({"message": {"message": line, "extraInfo": extra}}, stream)
        except OSError as failure:
            print(f"train: warning: {file} could not be written: {failure.strerror}", file=sys.stderr, flush=True)


class Stopped(Exception):  # noqa: N818 - not an error
    """A rank received SIGTERM; all ranks stopped at the same step and saved a checkpoint. Exit code 143."""
