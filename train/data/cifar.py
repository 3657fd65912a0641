"""CIFAR-10 and CIFAR-100 as published: a folder with the extracted `python` or `binary` version, read into memory.

https://www.cs.toronto.edu/~kriz/cifar.html describes both. Pickles are read by an unpickler that accepts only arrays.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.source import Dataset, Pixels
from train.errors import TrainError
from train.files import read_regular

SIDE, BYTES = 32, 3 * 32 * 32
FILES = {
    "cifar10 python": ([f"data_batch_{n}" for n in range(1, 6)], ["test_batch"], "batches.meta"),
    "cifar10 binary": ([f"data_batch_{n}.bin" for n in range(1, 6)], ["test_batch.bin"], "batches.meta.txt"),
    "cifar100 python": (["train"], ["test"], "meta"),
    "cifar100 binary": (["train.bin"], ["test.bin"], "fine_label_names.txt"),
}


@dataclass(frozen=True)
class ArraySource:
    """Decoded images in memory."""

    where: str
    pixels: Pixels  # (n, height, width, 3)
    labels: NDArray[np.int64]
    files = ()
    sizes = None

    @property
    def checksums(self) -> NDArray[np.uint32]:
        return np.array([zlib.crc32(image) for image in self.pixels], np.uint32)

    def name(self, index: int) -> str:
        """Return the file and the image's index."""
        return f"{self.where}#{index}"

    def read(self, index: int) -> Pixels:
        image: Pixels = self.pixels[index]
        return image

    def place(self, index: int) -> None:
        """Nowhere."""


def find_cifar(folder: Path) -> str | None:
    """Return the published format in the folder, or None."""
    for form, (train, _, meta) in FILES.items():
        if (folder / train[0]).is_file() and (folder / meta).is_file():
            return form
    return None


def open_cifar(folder: Path, form: str) -> Dataset:
    """Open the data set, with the published test images as the validation set.

    Raises:
        TrainError: a file is missing or invalid.
    """
    train, test, meta = FILES[form]
    try:
        classes = _classes(folder / meta, form)
        sources = [_source(folder, names, form) for names in (train, test)]
    except FileNotFoundError as error:
        raise TrainError(f"--data {folder}: {error.filename} is missing; extract the complete archive") from None
    except (KeyError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise TrainError(f"--data {folder}: not the published {form} files ({error})") from error
    return Dataset(classes, sources[0], sources[1])


def _classes(path: Path, form: str) -> Sequence[str]:
    if form.endswith("binary"):
        return tuple(path.read_text().split())
    meta = _unpickle(path)
    return tuple(name.decode() for name in meta[b"label_names" if "cifar10 " in form else b"fine_label_names"])


def _source(folder: Path, names: list[str], form: str) -> ArraySource:
    batches = [_batch(folder / name, form) for name in names]
    planes = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, SIDE, SIDE)
    labels = np.concatenate([labels for _, labels in batches]).astype(np.int64)
    return ArraySource(f"{folder}/{names[0]}", np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels)


def _batch(path: Path, form: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return planar pixels (n, 3072) and labels (n,)."""
    ten = "cifar10 " in form
    if form.endswith("python"):
        content = _unpickle(path)
        return np.asarray(content[b"data"], np.uint8), np.asarray(content[b"labels" if ten else b"fine_labels"])
    head = 1 if ten else 2  # CIFAR-100 has the coarse label before the fine one
    rows = np.frombuffer(read_regular(path), np.uint8).reshape(-1, head + BYTES)
    return rows[:, head:], rows[:, head - 1].astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Allows only the constructors needed for arrays and byte strings."""
        known = {"_reconstruct", "_frombuffer", "ndarray", "dtype", "encode", "scalar"}
        if name in known and module.split(".")[0] in ("numpy", "_codecs"):
            return super().find_class(module.replace("numpy.core", "numpy._core") if _RENAMED else module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a CIFAR file")


_RENAMED = hasattr(np, "_core")  # numpy 2 warns about the old name, which the published files use


def _unpickle(path: Path) -> Any:
    return _ArraysOnly(io.BytesIO(read_regular(path)), encoding="bytes").load()
