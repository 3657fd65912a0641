"""Check a JPEG's header for features that only Pillow supports. ITU-T T.81, annex B; EXIF 2.32, 4.5 and 4.6."""

from __future__ import annotations

import struct

from PIL import Image

ORIENTATION = 0x0112
_APP1, _SCAN = 0xE1, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def is_plain(data: bytes) -> bool:
    """Whether it is grey or YCbCr, not rotated by EXIF, and of a size that Pillow accepts.

    Pillow reads or rejects all other files, and damaged ones. A wrong False only costs time.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return False
    position = 2
    try:
        while data[position] == 0xFF:
            marker, start = data[position + 1], position + 4
            end = position + 2 + (data[position + 2] << 8 | data[position + 3])
            if marker == _APP1 and data.startswith(b"Exif\0\0", start) and _orientation(data, start + 6, end) != 1:
                return False
            if marker in _FRAMES:
                _, height, width, channels = struct.unpack_from(">BHHB", data, start)
                limit = Image.MAX_IMAGE_PIXELS
                if channels not in (1, 3) or (limit and width * height > 2 * limit):  # Pillow rejects larger images
                    return False
            if marker == _SCAN:
                return True
            position = end
    except (struct.error, IndexError):
        pass
    return False


def _orientation(data: bytes, start: int, end: int) -> int:
    """Return the EXIF orientation, by default 1; `data[start:end]` is a TIFF header with its directories."""
    order = "<" if data[start : start + 2] == b"II" else ">"
    (directory,) = struct.unpack_from(f"{order}I", data, start + 4)
    (entries,) = struct.unpack_from(f"{order}H", data, start + directory)
    for position in range(start + directory + 2, min(start + directory + 2 + 12 * entries, end), 12):
        tag, _, _, value = struct.unpack_from(f"{order}HHIH", data, position)
        if tag == ORIENTATION:
            return int(value)
    return 1
