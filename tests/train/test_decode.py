"""Decoded pixels are those a viewer shows, whatever the file holds; views are the field's own."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from train.config import Config
from train.data.augment import NUMBERS, View, random_box, training_view, validation_view
from train.data.decode import DecodeError, NotAnImageError, decode_pil, finish

CONFIG = Config(data="unused", image_size=32)


def scene(width: int = 80, height: int = 60) -> Image.Image:
    """Smooth and asymmetric, so that JPEG keeps it and a flip shows."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=2).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def whole(width: int, height: int) -> View:
    return View((0, 0, width, height))


def decode(data: bytes, side: int = 32) -> np.ndarray:
    return decode_pil(data, whole, side)[0]


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


def test_grey_and_cmyk_come_out_as_rgb() -> None:
    expected = decode(encoded(scene(), "PNG"))
    assert difference(decode(encoded(scene(), quality=95)), expected) < 2
    assert difference(decode(encoded(scene().convert("CMYK"), quality=95)), expected) < 6
    grey = decode(encoded(scene().convert("L"), quality=95))
    assert (grey[..., 0] == grey[..., 1]).all()
    assert difference(grey, decode(encoded(scene().convert("L").convert("RGB"), "PNG"))) < 2


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    out = decode(encoded(Image.fromarray(deep), "PNG"))
    assert out.min() < 5
    assert out.max() > 250
    assert 120 < out.mean() < 135


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone_before_the_crop(orientation: int) -> None:
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = scene().transpose(undo[orientation]) if orientation in undo else scene()
    exif = Image.Exif()
    exif[0x0112] = orientation
    sizes: list[tuple[int, int]] = []

    def choose(width: int, height: int) -> View:
        sizes.append((width, height))
        return whole(width, height)

    out, _ = decode_pil(encoded(stored, quality=95, exif=exif.tobytes()), choose, 32)
    assert sizes == [(80, 60)]
    assert difference(out, decode(encoded(scene(), "PNG"))) < 3


def test_what_is_no_image_and_what_is_damaged() -> None:
    with pytest.raises(NotAnImageError, match="it begins with b'hello"):
        decode(b"hello world, I am no image")
    for data in (b"", encoded(scene(), quality=95)[:500]):
        with pytest.raises(DecodeError):
            decode(data)


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.lists(st.floats(0, 1, exclude_max=True), min_size=41, max_size=41)
)
def test_a_random_box_lies_inside_the_image(width: int, height: int, numbers: list[float]) -> None:
    left, top, w, h = random_box(width, height, 0.08, numbers)
    assert 0 <= left <= left + w <= width
    assert 0 <= top <= top + h <= height
    assert w >= 1
    assert h >= 1


def test_random_boxes_have_the_area_and_ratio_asked_for() -> None:
    table = np.random.default_rng(0).random((4000, NUMBERS)).tolist()
    boxes = np.array([random_box(500, 400, 0.25, row) for row in table])
    area, ratio = boxes[:, 2] * boxes[:, 3] / 200_000, boxes[:, 2] / boxes[:, 3]
    assert area.min() > 0.24
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35
    assert 0.5 < area.mean() < 0.65


def test_the_validation_view_is_the_centre() -> None:
    config = Config(data="unused", image_size=224, val_resize=256)
    assert validation_view(config, 512, 256) == View((144, 16, 224, 224))
    assert validation_view(config, 512, 1024).box == (32, 288, 448, 448)


def test_shift_and_flip_move_the_picture() -> None:
    pixels = np.asarray(scene(32, 32))
    out = np.empty_like(pixels)
    finish(pixels, View((0, 0, 32, 32), shift=(3, -2), flip=True), out)
    assert (out[:30, 3:] == pixels[2:, ::-1][:, :29]).all()
    assert (out[30:] == 0).all()
    assert (out[:, :3] == 0).all()


def test_shifts_reach_an_eighth_of_the_side_and_no_further() -> None:
    config = Config(data="unused", image_size=32, val_resize=32, augment="shift")
    table = np.random.default_rng(0).random((500, NUMBERS)).tolist()
    shifts = {training_view(config, 32, 32, row).shift for row in table}
    assert {x for x, _ in shifts} == {y for _, y in shifts} == set(range(-4, 5))
