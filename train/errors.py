"""Errors that the user can fix (one line, exit code 2, nothing overwritten), and the stop after SIGTERM."""


class TrainError(Exception):
    """Invalid options, data or checkpoint; the message contains the location, the problem and the fix."""


class Stopped(Exception):  # noqa: N818 - not an error
    """A rank received SIGTERM; all ranks stopped at the same step and saved a checkpoint. Exit code 143."""
