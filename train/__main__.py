"""The command line; an error that a user can cure is one line and exit code 2."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import NoReturn

from train.config import parse
from train.dual_batch import guard
from train.errors import Stopped, TrainError

EXIT_USAGE, EXIT_STOPPED = 2, 143

# first word -> module whose main(argv) it means; without one of these words a model is trained
COMMANDS = {"dual-batch": "train.dual_batch.cli", "pack": "train.data.pack"}


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 something in the call or the data does not fit, 143 stopped by SIGTERM and saved.

    Any other exception leaves with its traceback, which torchrun's error file gets too.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in COMMANDS:
            importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
            return 0
        config = parse(argv)
        if guard.needed(config.parallel):
            return guard.guard(argv)
        # after parsing: --help and a wrong option must not wait for torch
        gc.disable()  # modules are not garbage: looking for some while torch loads is a seventh of its time
        from torch.distributed.elastic.multiprocessing.errors import record

        from train.launch import run

        gc.enable()
        record(run)(config)
    except TrainError as error:
        print(f"train: error: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except Stopped:
        return EXIT_STOPPED
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process without running C++ destructors.

    Everything is written and closed by now. A communication library's thread that is still there when the interpreter
    shuts down ends in "terminate called without an active exception". The process group's own are gone by then (see
    `train.parallel.world`), those of torch RPC need not be: a training that succeeded must not end with SIGABRT.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
