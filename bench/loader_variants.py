"""The loaders that are compared: ours, and the alternatives, each used as its documentation recommends."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from train.config import Config
from train.data import augment, decode, sampler
from train.data.batch import Request, Transfer
from train.data.loader import Loader
from train.data.open import open_dataset

SIDE, BATCH, WORKERS = 224, 64, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Box = tuple[int, int, int, int]  # left, top, width, height
Crop = Callable[[Path, Box], NDArray[np.uint8]]  # a given box of a file, at SIDE x SIDE: decoding without randomness


@dataclass
class Loaded:
    """A loader that is ready: `epoch` yields the number of images of each batch of one pass over the data."""

    epoch: Callable[[], Iterator[int]]
    crop: Crop | None = None
    expected: Crop | None = None  # what the crop is compared with, if not `of_file`
    workers: Callable[[], list[int]] = list  # pids of worker processes


@dataclass(frozen=True)
class Places:
    """The same images: a folder of train/ and val/, packed as JPEGs, packed as pixels."""

    folder: Path
    packed: Path
    raw: Path

    @property
    def files(self) -> list[Path]:
        """The training images, in index order."""
        return sorted((self.folder / "train").glob("*/*.jpg"))


def data_loader(dataset: Any, crop: Crop | None, **options: Any) -> Loaded:
    """torch's DataLoader with persistent worker processes."""
    loader = torch.utils.data.DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context="fork",  # torch's default; this process itself was spawned
        **options,
    )

    def epoch() -> Iterator[int]:
        for images, _labels in loader:
            yield len(images)

    def workers() -> list[int]:
        return [worker.pid for worker in multiprocessing.active_children() if worker.pid is not None]

    return Loaded(epoch, crop, workers=workers)


def classic(places: Places) -> Loaded:
    """The recipe of torch's own ImageNet example."""
    from torchvision import datasets, transforms

    recipe = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIDE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    return data_loader(datasets.ImageFolder(str(places.folder / "train"), recipe), None)


def torchvision_uint8(places: Places) -> Loaded:
    """torchvision's own decoder and v2 transforms, uint8 batches."""
    from torchvision import datasets
    from torchvision import io as tv_io
    from torchvision.transforms import v2
    from torchvision.transforms.v2 import functional

    recipe = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()])

    def load(path: str) -> torch.Tensor:
        return tv_io.decode_jpeg(tv_io.read_file(path), mode=tv_io.ImageReadMode.RGB)

    def crop(path: Path, box: Box) -> NDArray[np.uint8]:
        left, top, width, height = box
        image = functional.resized_crop(load(str(path)), top, left, height, width, [SIDE, SIDE], antialias=True)
        pixels: NDArray[np.uint8] = image.permute(1, 2, 0).numpy()
        return pixels

    return data_loader(datasets.ImageFolder(str(places.folder / "train"), recipe, loader=load), crop)


def timm(places: Places) -> Loaded:
    """timm's training transform to uint8 arrays, and its collate function; it decodes with Pillow."""
    from timm.data import ImageDataset, create_transform
    from timm.data.loader import fast_collate

    transform = create_transform(SIDE, is_training=True, use_prefetcher=True, auto_augment=None, color_jitter=None)
    dataset = ImageDataset(str(places.folder / "train"), transform=transform)
    return data_loader(dataset, None, collate_fn=fast_collate)


def dali(places: Places) -> Loaded:
    """DALI's CPU pipeline: fused decode and random crop, resize, flip; uint8."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)
    def training() -> Any:
        files, labels = fn.readers.file(file_root=str(places.folder / "train"), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(files, device="cpu", output_type=types.RGB)
        return fn.flip(fn.resize(images, size=(SIDE, SIDE)), horizontal=fn.random.coin_flip()), labels

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def fixed() -> Any:
        data, start, shape = (fn.external_source(name=name) for name in ("data", "start", "shape"))
        part = fn.decoders.image_slice(
            data, start, shape, normalized_anchor=False, normalized_shape=False, output_type=types.RGB
        )
        return fn.resize(part, size=(SIDE, SIDE))

    built, one = training(), fixed()
    built.build()
    one.build()
    iterator = DALIGenericIterator(
        built, ["images", "labels"], reader_name="reader", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )

    def epoch() -> Iterator[int]:
        for batch in iterator:
            yield len(batch[0]["images"])

    def crop(path: Path, box: Box) -> NDArray[np.uint8]:
        left, top, width, height = box
        one.feed_input("data", [np.frombuffer(path.read_bytes(), np.uint8)])
        one.feed_input("start", [np.array([left, top], np.float32)])
        one.feed_input("shape", [np.array([width, height], np.float32)])
        (images,) = one.run()
        pixels: NDArray[np.uint8] = images.as_array()[0]
        return pixels

    return Loaded(epoch, crop)


def of_file(path: Path, box: Box) -> NDArray[np.uint8]:
    """The reference: Pillow's antialiased crop of the file."""
    out = np.empty((SIDE, SIDE, 3), np.uint8)
    decode.Pillow().decode(path.read_bytes(), lambda *_: augment.View(box), out)
    return out


def ours(places: Places, data: Path, decoder: str) -> Loaded:
    """Our loader, used as in the trainer.

    Raises:
        TrainError: the decoder does not work on this machine.
    """
    config = Config(data=str(data), image_size=SIDE, workers=WORKERS)
    source, chosen = open_dataset(str(data)).train, decode.choose_decoder(decoder)
    loader = Loader(config, source, chosen, BATCH, 1, Transfer(torch.device("cpu")))
    count = len(source.labels)
    numbers, files = iter(range(1_000_000)), places.files

    def epoch() -> Iterator[int]:
        number = next(numbers)
        order = sampler.order(0, number, count)
        pieces = (order[start : start + BATCH] for start in range(0, count, BATCH))
        for batch in loader.batches((Request(piece, len(piece)) for piece in pieces), number):
            yield len(batch.labels)

    def crop_by(decoder: decode.Decoder, path: Path, box: Box) -> NDArray[np.uint8]:
        """A packed record may be smaller than the original, so the box is scaled with it."""
        wide, high = Image.open(path).size
        out = np.empty((SIDE, SIDE, 3), np.uint8)

        def choose(width: int, height: int) -> augment.View:
            x, y = width / wide, height / high
            left, top, w, h = round(box[0] * x), round(box[1] * y), round(box[2] * x), round(box[3] * y)
            return augment.View((left, top, max(min(w, width - left), 1), max(min(h, height - top), 1)))

        record = source.read(files.index(path))
        if isinstance(record, np.ndarray):
            decoder.resize(record, choose, out)
        else:
            decoder.decode(record, choose, out)
        return out

    return Loaded(epoch, functools.partial(crop_by, chosen), functools.partial(crop_by, decode.Pillow()))


CLASSIC, UINT8 = "torchvision classic (PIL, float32)", "torchvision uint8 (decode_jpeg, v2)"
TIMM, DALI = "timm (uint8, fast_collate)", "DALI on CPU (fused crop)"
COMPILED, TORCHVISION = "ours, compiled", "ours, torchvision"
PACKED = "ours, compiled, packed JPEG <= 400 px"

VARIANTS: dict[str, Callable[[Places], Loaded]] = {
    CLASSIC: classic,
    UINT8: torchvision_uint8,
    TIMM: timm,
    DALI: dali,
    COMPILED: lambda places: ours(places, places.folder, "roi"),
    TORCHVISION: lambda places: ours(places, places.folder, "torchvision"),
    "ours, Pillow": lambda places: ours(places, places.folder, "pil"),
    PACKED: lambda places: ours(places, places.packed, "roi"),
    "ours, torchvision, packed JPEG <= 400 px": lambda places: ours(places, places.packed, "torchvision"),
    "ours, compiled, packed raw 256 px": lambda places: ours(places, places.raw, "roi"),
}
