"""Errors that the user can fix (one line, exit code 2, nothing overwritten), and the end after SIGTERM."""


class TrainError(Exception):
    """Invalid options, data or checkpoint; the message says where, what and the next step."""


class Stopped(Exception):  # noqa: N818 - not an error
    """SIGTERM arrived on a rank; all ranks stopped at the same step and it was saved. Leads to exit code 143."""
