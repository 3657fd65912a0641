"""What a user would load images with instead: each one as its own documentation has it, uint8 where it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SIDE, BATCH, WORKERS = 224, 64, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Box = tuple[int, int, int, int]  # left, top, width, height
Crop = Callable[[Path, Box], NDArray[np.uint8]]  # the box of a file, at SIDE x SIDE: how it decodes, without its chance


@dataclass
class Loaded:
    """One way of loading, ready: `epoch` yields the number of images of each batch of one pass over the data."""

    name: str
    epoch: Callable[[], Iterator[int]]
    crop: Crop | None = None
    workers: Callable[[], list[int]] = list  # processes beside this one
    context: AbstractContextManager[Any] = field(default_factory=nullcontext)
    close: Callable[[], None] = lambda: None


def data_loader(name: str, dataset: Any, crop: Crop | None, **options: Any) -> Loaded:
    """Through torch's DataLoader with worker processes that stay."""
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, **options
    )

    def epoch() -> Iterator[int]:
        for images, _labels in loader:
            yield len(images)

    def workers() -> list[int]:
        return [worker.pid for worker in loader._iterator._workers] if loader._iterator else []

    return Loaded(name, epoch, crop, workers)


def classic(folder: Path) -> Loaded:
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
    return data_loader("torchvision classic (PIL, float32)", datasets.ImageFolder(str(folder), recipe), None)


def torchvision_uint8(folder: Path) -> Loaded:
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

    return data_loader("torchvision uint8 (decode_jpeg, v2)", datasets.ImageFolder(str(folder), recipe, loader=load), crop)


def timm(folder: Path) -> Loaded:
    """timm's training transform, uint8 to numpy, and its collate; it decodes with Pillow."""
    from timm.data import ImageDataset, create_transform
    from timm.data.loader import fast_collate

    transform = create_transform(SIDE, is_training=True, use_prefetcher=True, auto_augment=None, color_jitter=None)
    dataset = ImageDataset(str(folder), transform=transform)
    return data_loader("timm (uint8, fast_collate)", dataset, None, collate_fn=fast_collate)


def dali(folder: Path) -> Loaded:
    """DALI's CPU pipeline: fused decode and random crop, resize, flip; uint8."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)
    def training() -> Any:
        files, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, name="reader")
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

    return Loaded("DALI on CPU (fused crop)", epoch, crop)


PEERS: dict[str, Callable[[Path], Loaded]] = {
    "torchvision": torchvision_uint8,
    "timm": timm,
    "nvidia-dali-cuda120": dali,
}
