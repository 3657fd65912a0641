"""Open the data set of `--data` in any supported format."""

from __future__ import annotations

import re
from pathlib import Path

from train.data.cifar import find_cifar, open_cifar
from train.data.folder import SPLITS, open_folder, open_tar
from train.data.own import open_own
from train.data.packed import is_packed, open_packed
from train.data.repeat import synthetic
from train.data.shards import find_shards, open_shards
from train.data.source import Dataset
from train.errors import TrainError
from train.own import is_own

SYNTHETIC = re.compile(r"synthetic(:(\d+))?")
IMAGENET = 1_281_167  # images: the default size of `synthetic`


def is_synthetic(data: str) -> bool:
    """Whether `--data` selects synthetic images."""
    return SYNTHETIC.fullmatch(data) is not None


def open_dataset(data: str, side: int = 224) -> Dataset:
    """Open the data set of `--data`; `side`: the side of synthetic images.

    Raises:
        TrainError: the path does not exist, is not a data set or cannot be read.
    """
    if found := SYNTHETIC.fullmatch(data):
        return synthetic(max(2, int(found[2] or IMAGENET)), side)
    if is_own(data):
        return open_own(data)
    path = Path(data).expanduser()
    try:
        return _open(data, path)
    except OSError as error:
        where = error.filename or path
        raise TrainError(f"--data {data}: {where} cannot be read: {error.strerror or error}") from error


def _data_set_below(path: Path) -> Path | None:
    """Return a folder in `path` that looks like a data set, as archives are extracted into."""
    for folder in sorted(each for each in path.iterdir() if each.is_dir()):
        if find_cifar(folder) or find_shards(folder) or all((folder / split).is_dir() for split in SPLITS):
            return folder
    return None


def _open(data: str, path: Path) -> Dataset:
    if path.is_dir():
        if form := find_cifar(path):
            return open_cifar(path, form)
        if find_shards(path):
            return open_shards(path)
        if not (path / SPLITS[0]).is_dir() and (below := _data_set_below(path)):
            raise TrainError(f"--data {data}: the data set is in its folder {below.name}; use --data {below}")
        return open_folder(path)
    if path.is_file():
        return open_packed(path) if is_packed(path) else open_tar(path)
    raise TrainError(f"--data {data}: no such file or folder on this machine")
