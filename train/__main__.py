"""The command line of the trainer. Errors that the user can fix are printed as one line, with exit code 2."""

from __future__ import annotations

import errno
import importlib
import os
import socket
import sys
from contextlib import ExitStack
from typing import NoReturn

from train.combinations import check_early
from train.config import Config, declared, parse
from train.errors import Stopped, TrainError, alike_on_a_machine, tell

EXIT_USAGE, EXIT_STOPPED = 2, 143
# a folder that is full or write-protected, a disk that fails, a network file system that is lost
OF_THE_USER = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV, errno.ESTALE),
)
CHECK = "--check"  # as `launcher plan` and `up` call it, where torch may not be installed

# first argument -> module whose main(argv) handles it; any other first argument means training
COMMANDS = {"dual-batch": "train.experiments.dual_batch.cli", "export": "train.export", "pack": "train.data.pack"}


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 success, 2 invalid options, data or checkpoint, or a file that could not be written,
    143 stopped by SIGTERM with a checkpoint.

    Any other exception is raised, after torch's `record` has written it to torchrun's error file.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in COMMANDS:
            importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
            return 0
        with alike_on_a_machine():
            if CHECK in argv:
                config, _ = declared([word for word in argv if word != CHECK])
                check_early(config, os.environ, code=False)
                return 0
            config = parse(argv)
            check_early(config, {"WORLD_SIZE": "1"} | os.environ)
        if config.parallel == "dual_batch":
            from train.experiments.dual_batch import guard

            if guard.needed():
                return guard.guard(argv)
        # imported after parsing: --help and option errors must not wait for torch
        from torch.distributed.elastic.multiprocessing.errors import record

        if failure := record(_run)(config):
            raise failure
    except TrainError as error:
        tell(error)
        return EXIT_USAGE
    except Stopped:
        return EXIT_STOPPED
    return 0


def _run(config: Config) -> TrainError | None:
    """Return a TrainError, which `tell` records: torch's `record` would record it with its traceback."""
    try:
        run(config)
    except TrainError as error:
        return error
    except OSError as error:
        if error.errno not in OF_THE_USER:
            raise
        where = error.filename2 or error.filename or f"a file in {config.output}"
        failure = TrainError(f"{where} could not be written: {error.strerror}")
        failure.alike = config.shards_weights  # its ranks write together, and all report the error of one
        return failure
    return None


def run(config: Config) -> None:
    """Join the process group, print the first line, train and leave the group.

    Raises:
        TrainError, Stopped: see `train.trainer.Trainer`.
    """
    if config.parallel == "dual_batch":
        from train.experiments.dual_batch.run import run as run_dual_batch

        run_dual_batch(config)
        return
    import torch
    import torch.distributed as dist

    from train.deadline import exit_after_sigterm
    from train.distributed.world import StopSignal, report_lost_peers, start

    stop, process = StopSignal(), f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
    together = False  # whether all ranks end here: a failed one must not wait for collectives that others never join
    try:
        with ExitStack() as block:
            stops, torchrun = exit_after_sigterm(process, stop.ask, stop.reached), "TORCHELASTIC_RUN_ID" in os.environ
            if not torchrun:  # which ends all ranks; without it, the others would wait --timeout for this one
                block.enter_context(stops)
            stop.world = world = start(config)
            if torchrun:
                block.enter_context(stops)
            if world.first:  # before the slow imports below, to show that all ranks have joined
                print(
                    f"train: {world.size} process{'es' * (world.size > 1)}, {world.device.type}, backend "
                    f"{world.backend}, torch {torch.__version__}",
                    flush=True,
                )
            block.enter_context(report_lost_peers(world))
            from train.trainer import Trainer

            Trainer(config, world).train(stop)
        together = True
    except Stopped:
        together = True
        raise
    finally:
        if together and dist.is_initialized():
            dist.destroy_process_group()


def exit_code(argv: list[str] | None = None) -> int:
    """Return the exit code of `main`, and 1 after an unexpected error, with its traceback."""
    try:
        return main(argv)
    except SystemExit as ended:  # --help, or another rank reports the error
        return ended.code if isinstance(ended.code, int) else 0
    except Exception:  # noqa: BLE001 - it is printed as Python prints it
        sys.excepthook(*sys.exc_info())
        return 1


def leave(code: int) -> NoReturn:
    """Exit without running C++ destructors.

    All files are written and closed by now. If a thread of a communication library is still running when the
    interpreter shuts down, the process aborts with "terminate called without an active exception". The process
    group's threads have exited (see `train.distributed.world`), but those of torch RPC may still be running, and a
    successful training must not end with SIGABRT.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(exit_code())
