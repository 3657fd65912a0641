"""The compiled decoder: roi.c, built once with the machine's C compiler and libjpeg-turbo, called without the GIL."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from train.data.augment import View
from train.data.source import Pixels

SOURCE = Path(__file__).with_name("roi.c")
FLAGS = ("-O3", "-fPIC", "-shared", "-ffp-contract=off")  # off: else weights are rounded as the processor likes
LIBRARIES = ("-ljpeg", "-lm")
MESSAGE_BYTES = 200  # libjpeg's JMSG_LENGTH_MAX
OK, ERROR, UNSUPPORTED = 0, 1, 2


class BuildError(Exception):
    """The library cannot be built: no compiler, or no libjpeg-turbo."""


def build() -> Path:
    """Return the shared library, built unless it is cached for this source, compiler and machine.

    Raises:
        BuildError: the library cannot be built on this machine.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise BuildError("no C compiler")
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "launcher-train"
        key = hashlib.sha256(SOURCE.read_bytes() + repr((compiler, FLAGS, os.uname().machine)).encode()).hexdigest()
        library = cache / f"roi-{key[:16]}.so"
        if not library.exists():
            cache.mkdir(parents=True, exist_ok=True)
            _compile(compiler, library)
    except (OSError, RuntimeError) as error:  # the cache is not writable, or there is no home folder
        raise BuildError(str(error)) from error
    return library


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / "roi.so"
        done = subprocess.run(
            [compiler, *FLAGS, "-o", str(made), str(SOURCE), *LIBRARIES], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise BuildError(lines[0].strip() if lines else f"{compiler} exited with {done.returncode}")
        made.replace(library)  # atomic: another rank may be building the same library


class Library:
    """The functions of roi.c."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"cannot load {path}: {error}") from error
        data, size, out, message = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
        number, box = ctypes.c_int, ctypes.POINTER(ctypes.c_double * 4)
        self._size, self._decode, self._resample = loaded.roi_size, loaded.roi_decode, loaded.roi_resample
        self._size.argtypes = [data, size, ctypes.POINTER(ctypes.c_int * 2), message]
        self._decode.argtypes = [data, size, box, number, number, number, out, message]
        self._resample.argtypes = [out, number, number, box, number, number, number, out]

    def size(self, data: bytes) -> tuple[int, int] | None:
        """Return width and height of a JPEG, or None if only Pillow can read it (CMYK, damaged header)."""
        size, message = (ctypes.c_int * 2)(), ctypes.create_string_buffer(MESSAGE_BYTES)
        if self._size(data, len(data), ctypes.byref(size), message) != OK:
            return None
        return size[0], size[1]

    def decode(self, data: bytes, view: View, out: Pixels) -> str | None:
        """Write the view but its shift to `out`, (side, side, 3) and contiguous; return an error message, or None."""
        box, message = (ctypes.c_double * 4)(*view.box), ctypes.create_string_buffer(MESSAGE_BYTES)
        code = self._decode(
            data, len(data), ctypes.byref(box), view.inside, len(out), view.flip, out.ctypes.data, message
        )
        return None if code == OK else message.value.decode(errors="replace")

    def resample(self, pixels: Pixels, view: View, out: Pixels) -> None:
        """Write the view but its shift of (height, width, 3) pixels to `out`; both contiguous."""
        height, width, _ = pixels.shape
        box = (ctypes.c_double * 4)(*view.box)
        if self._resample(
            pixels.ctypes.data, width, height, ctypes.byref(box), view.inside, len(out), view.flip, out.ctypes.data
        ):
            raise MemoryError("roi_resample")
