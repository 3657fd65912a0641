"""The compiled decoder: roi.c, built once with the machine's C compiler and libjpeg-turbo, called without the GIL."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL.Image

from train.data.augment import View
from train.data.reading import Progress
from train.data.source import Data, Pixels, Place

SOURCE = Path(__file__).with_name("roi.c")
IN_IMAGE = Path("/opt/launcher/decoder")  # where images/Dockerfile builds it
FLAGS = ("-O3", "-fPIC", "-shared", "-ffp-contract=off")  # off: else weights are rounded as the processor likes
LIBRARIES = ("-ljpeg", "-lm")
MESSAGE_BYTES = 200  # libjpeg's JMSG_LENGTH_MAX
OK, ERROR, UNSUPPORTED = 0, 1, 2
ROOM = 4 << 20  # bytes for the files of one call
NEEDS = "it needs a C compiler and libjpeg-turbo's headers (Debian, Ubuntu: gcc libc6-dev libjpeg-dev)"


class BuildError(Exception):
    """The library cannot be built or does not work: no compiler, no libjpeg-turbo, or that of another machine."""


def load() -> Library:
    """Return the library of the image, else that of the cache, else compile it and keep it in the cache.

    Raises:
        BuildError: there is none that works on this machine, and it cannot be compiled.
    """
    for folder in (IN_IMAGE, *_cache()):
        with suppress(BuildError):  # built for another C library or libjpeg, as on another machine with the same home
            return Library(folder / file_name())
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / file_name()
        _compile(made)
        library = Library(made)
        for cache in _cache():
            with suppress(OSError):  # not writable: each start compiles it
                cache.mkdir(parents=True, exist_ok=True)
                part = cache / f"{made.name}.{os.getpid()}"
                shutil.copy(made, part)
                part.replace(cache / made.name)  # atomic: another rank may have built the same library
        return library


def file_name() -> str:
    """Return the library's file name: of this source, for this kind of processor."""
    return f"roi-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}-{os.uname().machine}.so"


def _cache() -> Iterator[Path]:
    """Yield the folder of the cache, if there is one."""
    with suppress(RuntimeError):  # no home folder
        caches = os.environ.get("LAUNCHER_CACHE") or os.environ.get("XDG_CACHE_HOME")
        yield Path(caches or Path.home() / ".cache") / "launcher-train"


def _compile(library: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise BuildError(f"no C compiler; {NEEDS}")
    command = [compiler, *FLAGS, "-o", str(library), str(SOURCE), *LIBRARIES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{compiler}: {error.strerror}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        what = lines[0].strip() if lines else f"{compiler} exited with {done.returncode}"
        raise BuildError(f"{what}; {NEEDS}")


# an image to decode, and the result; as in roi.c
IMAGE = np.dtype(
    [
        ("data", np.uintp),
        ("length", np.uintp),
        ("size", np.intc, 2),
        ("box", np.double, 4),
        ("inside", np.intc),
        ("side", np.intc),
        ("flip", np.intc),
        ("out", np.uintp),
        ("code", np.intc),
        ("message", f"S{MESSAGE_BYTES}"),
    ],
    align=True,
)


class Item(ctypes.Structure):
    """What to read, and the result; as in roi.c."""

    _fields_ = [
        ("path", ctypes.c_char_p),
        ("descriptor", ctypes.c_int),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("start", ctypes.c_size_t),
        ("error", ctypes.c_int),
    ]


class Encoded(NamedTuple):
    """A JPEG and its size, the view of it that is wanted, and where its pixels go: (side, side, 3), contiguous."""

    data: Data
    size: tuple[int, int]  # width and height
    view: View
    out: Pixels


class Library:
    """The functions of roi.c."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"cannot load {path}: {error}") from error
        self.path, self._own = path, threading.local()
        self._decode, self._resample, self._read = loaded.roi_decode, loaded.roi_resample, loaded.roi_read
        number, out, box = ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_double * 4)
        self._decode.argtypes, self._decode.restype = [out, number], None
        self._resample.argtypes = [out, number, number, box, number, number, number, out]
        self._read.argtypes = [ctypes.POINTER(Item), number, out, ctypes.c_size_t, ctypes.POINTER(Progress)]
        self._read.restype = None
        pixel = io.BytesIO()
        PIL.Image.new("RGB", (1, 1)).save(pixel, "JPEG")
        black = np.empty((1, 1, 3), np.uint8)
        [(code, why)] = self.decode([Encoded(pixel.getvalue(), (1, 1), View((0, 0, 1, 1)), black)])
        if code != OK:  # libjpeg of another version
            raise BuildError(f"{path} does not work: {why.decode(errors='replace')}")

    def decode(self, images: Sequence[Encoded]) -> list[tuple[int, bytes]]:
        """Write the views but their shifts to `out`; return OK, or another code and the reason, for each.

        UNSUPPORTED: the header is damaged, or is of another size or kind.
        """
        if not images:
            return []
        table = np.zeros(len(images), IMAGE)
        table["data"] = [_address(image.data) for image in images]
        table["length"] = [len(image.data) for image in images]
        table["size"] = [image.size for image in images]
        table["box"] = [image.view.box for image in images]
        table["inside"] = [image.view.inside for image in images]
        table["flip"] = [image.view.flip for image in images]
        table["out"] = [_address(image.out) for image in images]
        table["side"] = [len(image.out) for image in images]
        self._decode(table.ctypes.data, len(images))
        return list(zip(table["code"].tolist(), table["message"].tolist(), strict=True))

    def resample(self, pixels: Pixels, view: View, out: Pixels) -> None:
        """Write the view but its shift of (height, width, 3) pixels to `out`; both contiguous."""
        height, width, _ = pixels.shape
        box = (ctypes.c_double * 4)(*view.box)
        if self._resample(
            pixels.ctypes.data, width, height, ctypes.byref(box), view.inside, len(out), view.flip, out.ctypes.data
        ):
            raise MemoryError("roi_resample")

    def read(self, places: Sequence[Place], progress: Progress) -> list[memoryview | OSError | None]:
        """Read items into memory that this thread's next call uses again; None: too large for it.

        `progress` shows which item is being read, to other threads.
        """
        memory: Pixels | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = np.empty(ROOM, np.uint8)
        table = (Item * len(places))(*(Item(*place) for place in places))
        self._read(table, len(places), memory.ctypes.data, len(memory), ctypes.byref(progress))
        view = memory.data
        return [self._result(row, place, view) for row, place in zip(table, places, strict=True)]

    def _result(self, row: Item, place: Place, memory: memoryview) -> memoryview | OSError | None:
        if not row.error:
            return memory[row.start : row.start + row.size]
        if row.error == errno.ENOBUFS:
            return None
        why = "not a regular file" if row.error < 0 else os.strerror(row.error)
        return OSError(max(row.error, 0), why, os.fsdecode(place.path or b""))


def _address(buffer: Data | Pixels) -> int:
    """Return where the memory begins; quickly, as the GIL is held."""
    if isinstance(buffer, bytes):
        return int(np.frombuffer(buffer, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # type: ignore[arg-type]  # both are buffers
