"""Write digits.tar: scikit-learn's 1,797 real handwritten digits as JPEGs in train/<class>/ and val/<class>/.

    python jobs/data/make_digits.py jobs/data/digits.tar

The same version of Pillow gives the same bytes: members are sorted, times are 0, the owner is uid 0. The 397 validation
images are those with the smallest SHA-256 of their index, so the split depends on the index only. 397 is prime, so no
world size above 1 divides it.
"""

import hashlib
import io
import sys
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

SIDE = 32  # pixels; 8x8 is too small for convolutional networks with a pooling stem
VALIDATION = 397
QUALITY = 90


def jpeg(pixels: NDArray[np.float64]) -> bytes:
    """Encode an 8x8 array of 0..16 as a grey 32x32 JPEG, white on black."""
    small = Image.fromarray((pixels * (255 / 16)).round().astype("uint8"))
    out = io.BytesIO()
    small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(out, "JPEG", quality=QUALITY, optimize=True)
    return out.getvalue()


def members() -> dict[str, bytes]:
    """Return the content by path in the archive."""
    digits = load_digits()
    by_hash = sorted(range(len(digits.images)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
    validation = set(by_hash[:VALIDATION])
    return {
        f"{'val' if i in validation else 'train'}/{digits.target[i]}/{i:04d}.jpg": jpeg(image)
        for i, image in enumerate(digits.images)
    }


def write(path: Path) -> None:
    """Write a reproducible archive: USTAR, sorted, mtime 0, uid 0."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in sorted(members().items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} OUT.tar")
    write(Path(sys.argv[1]))
