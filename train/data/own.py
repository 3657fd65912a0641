"""The data set of --data MODULE:FUNCTION: as a Source, or as torchvision's and Hugging Face's data sets are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from train.data.decode import rgb
from train.data.source import Dataset, Pixels, Source
from train.errors import TrainError
from train.own import described, said, tried, unfit

KEYS = ("image", "img")  # of an item that is a mapping, as Hugging Face's are


@dataclass(frozen=True)
class Items:
    """A map-style object: `items[index]` is an image, or begins with one, or has one under `image`."""

    text: str  # of --data
    split: str
    items: Any
    labels: NDArray[np.int64]
    files = ()
    sizes = checksums = None

    def name(self, index: int) -> str:
        return f"{self.text} {self.split}[{index}]"

    def read(self, index: int) -> bytes | Pixels:
        """Return the image: encoded bytes as they are, else its pixels.

        Raises:
            OSError: the object raised an exception, which counts as a damaged image.
            TrainError: it returned something that is not an image.
        """
        try:
            found = self.items[index]
            image = next((found[key] for key in KEYS if key in found), found) if isinstance(found, Mapping) else found
            image = image[0] if isinstance(image, tuple | list) and image else image
            result = image if isinstance(image, bytes) else pixels(image)
        except Exception as error:
            raise OSError(said(error)) from error
        if result is None:
            raise unfit("data", self.text, f"a data set whose item {index} of {self.split} is {described(image)}")
        return result

    def place(self, index: int) -> None:
        """Nowhere."""


def pixels(image: Any) -> Pixels | None:
    """Return the (height, width, 3) pixels of a PIL image, a uint8 array or tensor; None for anything else.

    Arrays are (H, W, 3), (H, W, 1) or (H, W), tensors (3, H, W), (1, H, W) or (H, W).
    """
    if isinstance(image, Image.Image):
        return np.asarray(rgb(image))
    if isinstance(image, torch.Tensor):
        image = (image.movedim(0, -1) if image.ndim == 3 else image).numpy()
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or not image.size:
        return None
    grey = image[..., None] if image.ndim == 2 else image
    if grey.ndim != 3 or grey.shape[2] not in (1, 3):
        return None
    return np.ascontiguousarray(np.broadcast_to(grey, (*grey.shape[:2], 3)))


def open_own(text: str) -> Dataset:
    """Return the data set that the user's function returns.

    Raises:
        TrainError: it is not one, or its labels are not those of its classes.
    """
    found = tried("data", text)
    if not (isinstance(found, tuple) and len(found) == 3):
        raise unfit("data", text, described(found))
    classes, *splits = found
    if isinstance(classes, str) or not isinstance(classes, Sequence | np.ndarray) or len(classes) < 2:
        raise unfit("data", text, f"{classes!r} as the names of the classes, which are a sequence of two or more")
    train, val = (_source(text, name, each, len(classes)) for name, each in zip(("train", "val"), splits, strict=True))
    return Dataset(tuple(map(str, classes)), train, val)


def _source(text: str, split: str, found: Any, classes: int) -> Source:
    given = next((getattr(found, name) for name in ("targets", "labels") if hasattr(found, name)), None)
    if given is None:
        raise unfit(
            "data",
            text,
            f"{split} as {described(found)} without `targets` or `labels`: set one of them to the class numbers of "
            f"all images",
        )
    labels = np.asarray(given)
    if labels.ndim != 1 or not (labels.dtype.kind in "iu" and len(labels)):
        raise unfit("data", text, f"{split} with labels of shape {labels.shape} and type {labels.dtype}, not integers")
    if len(wrong := np.flatnonzero((labels < 0) | (labels >= classes))):
        raise unfit(
            "data",
            text,
            f"{split} with label {labels[wrong[0]]} of image {wrong[0]}: the {classes} classes are 0 to {classes - 1}",
        )
    if hasattr(found, "read") and hasattr(found, "place"):
        if labels is not given or labels.dtype != np.int64:
            raise unfit("data", text, f"{split} with labels that are not a NumPy array of int64")
        source: Source = found
        return source
    if not hasattr(found, "__getitem__") or (hasattr(found, "__len__") and len(found) != len(labels)):
        count = f" of length {len(found)}" if hasattr(found, "__len__") else ""
        raise unfit("data", text, f"{split} as {described(found)}{count} with {len(labels)} labels")
    items = Items(text, split, found, labels.astype(np.int64))
    _check_first(items)
    return items


def _check_first(items: Items) -> None:
    """Raise TrainError if the first image is none, or another one each time: a random transform."""
    try:
        first, again = (np.asarray(items.read(0)) for _ in range(2))
    except OSError:  # damaged, as the loader will say
        return
    if not np.array_equal(first, again):
        raise TrainError(
            f"{items.name(0)}: another image each time; leave random transforms out of the data set, so that a resumed "
            f"run sees the same images: use --augment, --auto-augment"
        )
