"""What a user can put right: reported in one line, exit code 2, nothing overwritten."""


class TrainError(Exception):
    """The options, the data or a checkpoint do not fit; the message says where, what and the next step."""


class Stopped(Exception):  # noqa: N818 - not an error
    """SIGTERM arrived on some rank; all ranks agreed on the step and saved it. Ends the process with exit code 143."""
