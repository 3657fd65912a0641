"""Files to batches: images per CPU-second of our loader against what a user would write instead, in one run.

    python bench/loader.py [--images 256] [--json FILE]

ImageNet-sized JPEGs (made here from two real photos), RandomResizedCrop to 224, batches of 64. CPU-seconds are of this
process and its workers, after one warm-up pass, so that a shared machine does not blur the ratio. PSNR is of the same
crops against Pillow's.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from train.config import Config  # noqa: E402
from train.data import augment, decode, pack, sampler  # noqa: E402
from train.data.loader import Loader, Request  # noqa: E402
from train.data.open import open_dataset  # noqa: E402
from train.data.roi import BuildError, build  # noqa: E402

SIDE, BATCH, WORKERS = 224, 64, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = ((500, 375), (375, 500), (500, 333), (333, 500), (500, 500), (640, 480), (400, 300), (480, 360))


@dataclass(frozen=True)
class Row:
    """One way of loading."""

    name: str
    images_per_cpu_s: float
    images_per_s: float
    ratio: float = 1.0  # of images per CPU-second, to the classic recipe
    psnr: float | None = None  # dB


def make_images(folder: Path, count: int) -> None:
    """`count` JPEGs, quality 95, three of four 4:2:0: crops of two photos, enlarged and shaded differently."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    rng = np.random.default_rng(0)
    for index in range(count):
        photo, size = photos[index % 2], SIZES[index % len(SIZES)]
        zoom = rng.uniform(0.5, 1.0)
        w, h = int(photo.width * zoom), int(photo.height * zoom)
        x, y = int(rng.integers(photo.width - w + 1)), int(rng.integers(photo.height - h + 1))
        picture = photo.resize(size, Image.Resampling.BICUBIC, box=(x, y, x + w, y + h))
        gain = rng.uniform(0.8, 1.2)
        picture = picture.point([min(int(value * gain), 255) for value in range(256)] * 3)
        for split in ("train", "val") if index < 8 else ("train",):
            path = folder / split / str(index % 4) / f"{index:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path, quality=95, subsampling=0 if index % 4 == 0 else 2)


def cpu_seconds(children: list[int]) -> float:
    """Of this process and of its live worker processes."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for pid in children:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(name: str, passes: Callable[[int], Iterator[int]], workers: Callable[[], list[int]], count: int) -> Row:
    """`passes(n)` yields the images of each batch of n passes over the data."""
    for _ in passes(1):
        pass
    cpu, wall = cpu_seconds(workers()), time.perf_counter()
    images = sum(passes(max(2, 1024 // count)))
    cpu, wall = cpu_seconds(workers()) - cpu, time.perf_counter() - wall
    return Row(name, images / cpu, images / wall)


def data_loader(name: str, dataset: Any, count: int, **options: Any) -> Row:
    """Through torch's DataLoader with worker processes that stay."""
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, **options
    )

    def passes(number: int) -> Iterator[int]:
        for _ in range(number):
            for images, _labels in loader:
                yield len(images)

    def workers() -> list[int]:
        return [worker.pid for worker in loader._iterator._workers]

    return measure(name, passes, workers, count)


def classic(folder: Path, count: int) -> Row:
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
    return data_loader("torchvision classic (PIL, float32)", datasets.ImageFolder(str(folder / "train"), recipe), count)


def torchvision_uint8(folder: Path, count: int) -> Row:
    """torchvision's own decoder and v2 transforms, uint8 batches."""
    from torchvision import datasets
    from torchvision import io as tv_io
    from torchvision.transforms import v2

    recipe = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()])

    def load(path: str) -> torch.Tensor:
        return tv_io.decode_jpeg(tv_io.read_file(path), mode=tv_io.ImageReadMode.RGB)

    dataset = datasets.ImageFolder(str(folder / "train"), recipe, loader=load)
    return data_loader("torchvision uint8 (decode_jpeg, v2)", dataset, count)


def timm(folder: Path, count: int) -> Row:
    """timm's training transform, uint8 to numpy, and its collate."""
    from timm.data import ImageDataset, create_transform
    from timm.data.loader import fast_collate

    transform = create_transform(SIDE, is_training=True, use_prefetcher=True, auto_augment=None, color_jitter=None)
    dataset = ImageDataset(str(folder / "train"), transform=transform)
    return data_loader("timm (uint8, fast_collate)", dataset, count, collate_fn=fast_collate)


def dali(folder: Path, count: int) -> Row:
    """DALI's CPU pipeline: fused decode and random crop, resize, flip; uint8."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(folder / "train"), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(files, device="cpu", output_type=types.RGB)
        return fn.flip(fn.resize(images, size=(SIDE, SIDE)), horizontal=fn.random.coin_flip()), labels

    built = pipeline()
    built.build()
    iterator = DALIGenericIterator(
        built, ["images", "labels"], reader_name="reader", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )

    def passes(number: int) -> Iterator[int]:
        for _ in range(number):
            for batch in iterator:
                yield len(batch[0]["images"])

    return measure("DALI on CPU (fused crop)", passes, list, count)


def ours(name: str, data: Path, decoder: str, count: int) -> Row:
    """Our loader, as the trainer uses it."""
    config = Config(data=str(data), image_size=SIDE, workers=WORKERS)
    source = open_dataset(str(data)).train
    chosen = decode.choose_decoder(decoder)
    loader = Loader(config, source, chosen, BATCH, local_world=1, pin=False)

    def passes(number: int) -> Iterator[int]:
        for epoch in range(number):
            order = sampler.order(0, epoch, count)
            pieces = (order[start : start + BATCH] for start in range(0, count, BATCH))
            for batch in loader.batches((Request(piece, len(piece)) for piece in pieces), epoch):
                yield len(batch.labels)

    row = measure(name, passes, list, count)
    loader.close()
    return replace(row, psnr=psnr(chosen, config, data))


def psnr(decoder: decode.Decoder, config: Config, data: Path) -> float:
    """Mean over crops, of what the decoder makes of the packed or plain files against Pillow on the same bytes."""
    source, pillow, errors = open_dataset(str(data)).train, decode.Pillow(), []
    for index in range(32):
        numbers = sampler.uniforms(0, 0, np.array([index]), augment.NUMBERS)[0].tolist()

        def choose(width: int, height: int, numbers: list[float] = numbers) -> augment.View:
            return augment.training_view(config, width, height, numbers, SIDE)

        record, images = source.read(index), []
        for one in (decoder, pillow):
            out = np.empty((SIDE, SIDE, 3), np.uint8)
            one.resize(record, choose, out) if isinstance(record, np.ndarray) else one.decode(record, choose, out)
            images.append(out.astype(float))
        errors.append(((images[0] - images[1]) ** 2).mean())
    error = float(np.mean(errors))
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))


def installed(name: str) -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec(name) is not None


def compiled() -> bool:
    """Whether the compiled decoder can be built here."""
    try:
        build()
    except BuildError as error:
        print(f"without the compiled decoder: {error}")
        return False
    return True


def run(folder: Path, count: int) -> list[Row]:
    """All that can run here; names what cannot."""
    make_images(folder, count)
    sizes = [path.stat().st_size for path in folder.rglob("*.jpg")]
    print(f"{count} JPEGs of {sum(sizes) / len(sizes) / 1e3:.0f} kB on average")
    packed, raw = folder.parent / "jpeg400.pack", folder.parent / "raw256.pack"
    pack.main([str(folder), str(packed), "--max-side", "400", "--quality", "90"])
    pack.main([str(folder), str(raw), "--raw", "256"])
    rows = [classic(folder, count), torchvision_uint8(folder, count)]
    for name, peer in (("timm", timm), ("nvidia.dali", dali)):
        try:
            rows.append(peer(folder, count))
        except ImportError as error:
            print(f"left out {name}: {error}")
    rows.append(ours("ours, pil", folder, "pil", count))
    if installed("simplejpeg") and installed("cv2"):
        rows.append(ours("ours, simplejpeg", folder, "simplejpeg", count))
    else:
        print("left out ours, simplejpeg: simplejpeg and opencv-python-headless are not installed")
    if compiled():
        rows.append(ours("ours, roi (compiled)", folder, "roi", count))
        rows.append(ours("ours, packed JPEG <= 400 px, roi", packed, "roi", count))
        rows.append(ours("ours, packed raw 256 px, roi", raw, "roi", count))
    rows.append(ours("ours, packed JPEG <= 400 px, pil", packed, "pil", count))
    return [replace(row, ratio=row.images_per_cpu_s / rows[0].images_per_cpu_s) for row in rows]


def main() -> None:
    """Prints the table, and writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(Path(folder) / "images", options.images)
    out = io.StringIO()
    out.write(f"{'':36} {'images/CPU-s':>12} {'images/s':>9} {'ratio':>6} {'PSNR dB':>8}\n")
    for row in rows:
        quality = "" if row.psnr is None else f"{row.psnr:8.1f}"
        out.write(f"{row.name:36} {row.images_per_cpu_s:12.0f} {row.images_per_s:9.0f} {row.ratio:6.2f} {quality:>8}\n")
    sys.stdout.write(out.getvalue())
    if options.json:
        facts = {"torch": torch.__version__, "machine": platform.processor(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
