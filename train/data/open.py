"""From `--data` to a data set: which of the formats it is."""

from __future__ import annotations

from pathlib import Path

from train.data.folder import open_folder, open_tar
from train.data.source import Dataset
from train.errors import TrainError


def open_dataset(data: str) -> Dataset:
    """The data set that `--data` names.

    Raises:
        TrainError: nothing is there, or it is no data set; the message says what was expected.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        return open_folder(path)
    if path.is_file():
        return open_tar(path)
    raise TrainError(f"--data {data}: no such file or folder on this machine")
