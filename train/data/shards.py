"""Tar shards: a folder with train*.tar and val*.tar, indexed once and read in place, with random access for shuffling.

An image's class is its folder in the archive (`n01440764/x.JPEG`), or the content of `x.cls` next to it, as in
WebDataset.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from train.data.folder import EXTENSIONS, SPLITS, TarSource
from train.data.index import members
from train.data.source import Dataset
from train.errors import TrainError
from train.files import open_regular

Entry = tuple[str, str, tuple[int, int, int]]  # class, name, (descriptor, offset, size)


def find_shards(folder: Path) -> bool:
    """Whether the folder has shards of both splits."""
    return all(any(folder.glob(f"{split}*.tar")) for split in SPLITS)


def open_shards(folder: Path) -> Dataset:
    """Open the data set in the shards.

    Raises:
        TrainError: a shard is not a tar archive, an image has no class, or the splits' classes do not match.
    """
    entries = {
        split: [entry for path in sorted(folder.glob(f"{split}*.tar")) for entry in _index(path)] for split in SPLITS
    }
    classes = sorted({label for label, _, _ in entries["train"]}, key=_natural)
    if len(classes) < 2:
        raise TrainError(f"--data {folder}: {len(classes)} classes in train*.tar; a classifier needs two or more")
    number = {label: index for index, label in enumerate(classes)}
    if unknown := [entry for entry in entries["val"] if entry[0] not in number]:
        raise TrainError(f"--data {folder}: {unknown[0][1]} has class {unknown[0][0]}, which train*.tar lacks")
    sources = {}
    for split, found in entries.items():
        labels = np.array([number[label] for label, _, _ in found], np.int64)
        sources[split] = TarSource(folder, [name for _, name, _ in found], [extent for *_, extent in found], labels)
    return Dataset(tuple(classes), sources["train"], sources["val"])


def _natural(label: str) -> tuple[int, str]:
    """Sort key: WebDataset's class numbers in numeric order, names in alphabetical order."""
    return (int(label), "") if label.isdigit() else (1 << 62, label)


def _index(path: Path) -> Iterator[Entry]:
    """Yield the images of one shard, sorted by name."""
    descriptor = open_regular(path)
    images: dict[str, tuple[str, tuple[int, int, int]]] = {}
    labels: dict[str, str] = {}
    try:
        for name, offset, size in members(path):
            if any(part.startswith(".") for part in PurePosixPath(name).parts):
                continue
            stem, suffix = os.path.splitext(name)  # noqa: PTH122 - a member's name, not a local path
            if suffix.lower() in EXTENSIONS:
                images[stem] = (name, (descriptor, offset, size))
            elif suffix == ".cls":
                labels[stem] = os.pread(descriptor, size, offset).decode().strip()
    except tarfile.TarError as error:
        raise TrainError(f"--data {path}: not an uncompressed tar archive ({error})") from error
    for stem, (name, extent) in sorted(images.items()):
        label = labels.get(stem) or PurePosixPath(name).parent.name
        if not label:
            raise TrainError(f"--data {path}: {name} has no class: neither a folder nor {stem}.cls")
        yield label, f"{path.name}:{name}", extent
