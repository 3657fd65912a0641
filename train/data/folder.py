"""Images in class folders, train/<class>/*.jpg and val/<class>/*.jpg, in a directory or in an uncompressed tar archive.

An archive is indexed once and read in place, by offset. Nothing is extracted, so path traversal is impossible.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from train.data.index import members
from train.data.source import Dataset, Place
from train.errors import TrainError
from train.files import open_regular, read_regular

EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"))
SPLITS = ("train", "val")
LAYOUT = "expected train/<class>/*.jpg and val/<class>/*.jpg"


@dataclass(frozen=True)
class FileSource:
    """Image files in a folder."""

    root: Path
    files: Sequence[str]
    labels: NDArray[np.int64]
    sizes = checksums = None

    def name(self, index: int) -> str:
        """Return the file's path."""
        return str(self.root / self.files[index])

    def read(self, index: int) -> bytes:
        """Read the file.

        Raises:
            OSError: the file cannot be read, or is not a regular file.
        """
        return read_regular(f"{self.root}/{self.files[index]}")  # a Path object per image costs more than the call

    def place(self, index: int) -> Place:
        """Return the file."""
        return Place(os.fsencode(f"{self.root}/{self.files[index]}"))


@dataclass(frozen=True)
class TarSource:
    """Members of tar archives, read at their offsets; `pread` needs no lock between threads."""

    path: Path
    files: Sequence[str]
    extents: Sequence[tuple[int, int, int]]  # the archive's file descriptor, offset, size
    labels: NDArray[np.int64]
    checksums = None

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([size for *_, size in self.extents], np.int64)

    def name(self, index: int) -> str:
        """Return the archive and the member."""
        return f"{self.path}:{self.files[index]}"

    def read(self, index: int) -> bytes:
        """Read the member."""
        descriptor, offset, size = self.extents[index]
        return os.pread(descriptor, size, offset)

    def place(self, index: int) -> Place:
        """Return the member's part of the archive."""
        return Place(None, *self.extents[index])


def open_folder(path: Path) -> Dataset:
    """Open the data set in a directory.

    Raises:
        TrainError: the layout is invalid.
    """
    listing = {split: _walk(path / split) for split in SPLITS}
    classes = _classes(str(path), listing)

    def source(names: list[str], labels: NDArray[np.int64]) -> FileSource:
        return FileSource(path, names, labels)

    return _dataset(classes, listing, source)


def open_tar(path: Path) -> Dataset:
    """Open the data set in an uncompressed tar archive; train/ and val/ may be in one top-level folder.

    Raises:
        TrainError: not an uncompressed tar archive, or the layout is invalid.
    """
    extents: dict[str, tuple[int, int]] = {}
    listing: dict[str, dict[str, list[str]]] = {split: {} for split in SPLITS}
    try:
        for name, offset, size in members(path):
            if found := _parse_path(PurePosixPath(name).parts):
                split, label, rest = found
                file = f"{split}/{label}/{rest}"
                if file not in extents:
                    listing[split].setdefault(label, []).append(file)
                extents[file] = (offset, size)  # of a repeated member, the last one counts, as in extraction
    except tarfile.TarError as error:
        raise TrainError(
            f"--data {path}: not an uncompressed tar archive ({error}); for .tar.gz, run gunzip first"
        ) from error
    if not extents:
        raise TrainError(f"--data {path}: no images in the archive; {LAYOUT}")
    classes = _classes(str(path), listing)
    descriptor = open_regular(path)

    def source(names: list[str], labels: NDArray[np.int64]) -> TarSource:
        return TarSource(path, names, [(descriptor, *extents[name]) for name in names], labels)

    return _dataset(classes, listing, source)


def _parse_path(parts: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Split a member's path into (split, class, rest); return None if it is not an image of the data set."""
    if ".." in parts:
        return None
    for start in (0, 1):
        if len(parts) < start + 3 or any(part.startswith(".") for part in parts[start + 1 :]):
            continue
        if parts[start] in SPLITS and _is_image(parts[-1]):
            return parts[start], parts[start + 1], "/".join(parts[start + 2 :])
    return None


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS  # noqa: PTH122 - a string, not a Path


def _walk(root: Path) -> dict[str, list[str]]:
    """Return image paths, such as train/class/x.jpg, by class; an empty list for an empty class folder."""
    if not root.is_dir():
        return {}
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    return {name: sorted(_images(f"{root}/{name}", f"{root.name}/{name}", frozenset())) for name in folders}


def _images(folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield image paths. `above`: device and inode of the parent folders."""
    status = os.stat(folder)  # noqa: PTH116 - a string, not a Path
    if (own := (status.st_dev, status.st_ino)) in above:
        raise TrainError(f"--data {folder}: a link to one of its parent folders; remove the link")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):  # .ipynb_checkpoints, for example, has copies of images
                continue
            if entry.is_dir():
                yield from _images(entry.path, f"{prefix}/{entry.name}", above | {own})
            elif _is_image(entry.name):
                yield f"{prefix}/{entry.name}"


def _classes(where: str, listing: dict[str, dict[str, list[str]]]) -> list[str]:
    for split in SPLITS:
        if not listing[split]:
            raise TrainError(f"--data {where}: no class folders in {split}/; {LAYOUT}")
    classes = sorted(listing["train"])
    if len(classes) < 2:
        raise TrainError(f"--data {where}: only one class ({classes[0]}) in train/; a classifier needs two or more")
    for split in SPLITS:
        if empty := [name for name, files in listing[split].items() if not files]:
            raise TrainError(f"--data {where}: no images in {split}/{empty[0]}; add images or remove the folder")
    if unknown := sorted(set(listing["val"]) - set(classes)):
        raise TrainError(f"--data {where}: val/{unknown[0]} is not a class in train/; remove it, or add it to train/")
    return classes


def _dataset(
    classes: list[str],
    listing: dict[str, dict[str, list[str]]],
    source: Callable[[list[str], NDArray[np.int64]], FileSource | TarSource],
) -> Dataset:
    number = {name: index for index, name in enumerate(classes)}
    sources = {}
    for split in SPLITS:
        pairs = [(file, number[name]) for name in sorted(listing[split]) for file in sorted(listing[split][name])]
        sources[split] = source([file for file, _ in pairs], np.array([label for _, label in pairs], np.int64))
    return Dataset(tuple(classes), sources["train"], sources["val"])
