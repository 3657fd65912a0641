"""Decoded pixels are as an image viewer shows them, whatever the file's format; crops follow the usual definitions."""

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from train.config import Config
from train.data.augment import NUMBERS, View, random_box, training_view, validation_view
from train.data.decode import Choose, DecodeError, Decoder, NotAnImageError, Pillow, choose_decoder, finish
from train.errors import TrainError

# torchvision deprecates its decoder; without it the next decoder is chosen
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")

CONFIG = Config(data="unused", image_size=32)


def scene(width: int = 80, height: int = 60) -> Image.Image:
    """Smooth, so that JPEG preserves it, and asymmetric, so that a flip is visible."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=2).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def whole(width: int, height: int) -> View:
    return View((0, 0, width, height))


def decode(data: bytes, choose: Choose = whole, side: int = 32, decoder: Decoder | None = None) -> np.ndarray:
    out = np.empty((side, side, 3), np.uint8)
    (decoder or Pillow()).decode(data, choose, out)
    return out


@pytest.fixture(scope="module")
def roi() -> Decoder:
    try:
        return choose_decoder("roi")
    except TrainError as error:
        pytest.skip(str(error))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


def test_grey_and_cmyk_images_become_rgb() -> None:
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
@pytest.mark.parametrize("kind", ["pil", "auto"])
def test_exif_rotation_is_undone_before_the_crop(orientation: int, kind: str) -> None:
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

    out = decode(encoded(stored, quality=95, exif=exif.tobytes()), choose, decoder=choose_decoder(kind))
    assert sizes == [(80, 60)]
    assert difference(out, decode(encoded(scene(), "PNG"))) < 3


def test_files_that_are_not_images_and_damaged_images_are_distinguished() -> None:
    with pytest.raises(NotAnImageError, match="it starts with b'hello"):
        decode(b"hello world, I am no image")
    for data in (b"", encoded(scene(), quality=95)[:500]):
        with pytest.raises(DecodeError):
            decode(data)


def photo(width: int = 320, height: int = 240) -> Image.Image:
    """Detail everywhere, so that decoding errors are visible."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (height // 4, width // 4, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("flip", [False, True])
def test_the_compiled_decoder_is_two_tap_bilinear_of_the_crop(roi: Decoder, subsampling: int, flip: bool) -> None:
    """Compared with Pillow's full decode and torch's resampling; 55 dB is rounding error."""
    data = encoded(photo(), quality=90, subsampling=subsampling)
    full = torch.from_numpy(np.asarray(Image.open(io.BytesIO(data))).copy()).permute(2, 0, 1)[None].float()
    for row in np.random.default_rng(1).random((40, NUMBERS)).tolist():
        left, top, w, h = (int(v) for v in random_box(320, 240, 0.05, row))
        view = View((left, top, w, h), flip=flip)
        ours = decode(data, lambda *_, view=view: view, 128, roi)
        crop = full[:, :, top : top + h, left : left + w]
        expected = torch.nn.functional.interpolate(crop, size=(128, 128), mode="bilinear", antialias=False)
        error = ((ours[:, ::-1] if flip else ours) - expected[0].permute(1, 2, 0).numpy()).astype(float)
        assert 10 * np.log10(255**2 / (error**2).mean()) > 55


def test_the_compiled_decoder_reduces_large_crops_in_the_transform(roi: Decoder) -> None:
    """Much closer to Pillow's antialiased result than two-tap resampling of the full image, which aliases."""
    data = encoded(photo(1024, 768), quality=90)
    full = torch.from_numpy(np.asarray(Image.open(io.BytesIO(data))).copy()).permute(2, 0, 1)[None].float()
    aliased = torch.nn.functional.interpolate(full, size=(64, 64), mode="bilinear")[0].permute(1, 2, 0).numpy()
    smooth = decode(data, side=64)
    assert difference(decode(data, side=64, decoder=roi), smooth) < 0.4 * difference(aliased, smooth)


def test_the_compiled_decoder_copies_what_needs_no_resampling(roi: Decoder) -> None:
    data = encoded(photo(64, 64), quality=90)
    assert (decode(data, side=64, decoder=roi) == np.asarray(Image.open(io.BytesIO(data)))).all()


def test_the_compiled_decoder_shifts_like_the_others(roi: Decoder) -> None:
    data = encoded(photo(32, 32), quality=90)

    def choose(width: int, height: int) -> View:
        return View((0, 0, width, height), shift=(-3, 2), flip=True)

    assert difference(decode(data, choose, 32, roi), decode(data, choose, 32)) < 1


def test_the_compiled_decoder_falls_back_to_pillow(roi: Decoder) -> None:
    for data in (encoded(scene(), "PNG"), encoded(scene().convert("CMYK"), quality=95)):
        assert (decode(data, decoder=roi) == decode(data)).all()
    grey = encoded(scene().convert("L"), quality=95)
    assert difference(decode(grey, decoder=roi), decode(grey)) < 3


def test_the_compiled_decoder_reports_damage_and_never_crashes(roi: Decoder) -> None:
    intact = encoded(photo(), quality=90)
    for data in (intact[: len(intact) // 2], intact[:300], b"\xff\xd8\xff" + b"\0" * 100, b""):
        with pytest.raises((DecodeError, NotAnImageError)):
            decode(data, decoder=roi)
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(intact)
        for index in rng.integers(2, len(broken), 20):
            broken[index] = int(rng.integers(256))
        with contextlib.suppress(DecodeError, NotAnImageError):
            assert decode(bytes(broken), decoder=roi).shape == (32, 32, 3)


@pytest.fixture(scope="module", params=["roi", "simplejpeg", "torchvision"])
def fast(request: pytest.FixtureRequest) -> Decoder:
    try:
        return choose_decoder(request.param)
    except TrainError as error:
        pytest.skip(str(error))


def test_every_decoder_returns_about_the_same_pixels_as_pillow(fast: Decoder) -> None:
    """The same crops, including flips, of a colour and a grey image; two-tap resampling costs some accuracy."""
    least = {"roi": 30, "simplejpeg": 30, "torchvision": 45}[fast.name]
    for image in (photo(), photo().convert("L")):
        data = encoded(image, quality=95)
        for index, row in enumerate(np.random.default_rng(1).random((20, NUMBERS)).tolist()):
            view = View(random_box(320, 240, 0.3, row), flip=bool(index % 2))
            ours, theirs = (decode(data, lambda *_, v=view: v, 160, one) for one in (fast, Pillow()))
            error = ((ours.astype(float) - theirs.astype(float)) ** 2).mean()
            assert 10 * np.log10(255**2 / max(error, 1e-9)) > least


def test_every_decoder_reports_damage_and_falls_back_to_pillow(fast: Decoder) -> None:
    intact = encoded(photo(), quality=90)
    for data in (intact[: len(intact) // 2], intact[:300], b"\xff\xd8\xff" + b"\0" * 100, b"", b"text"):
        with pytest.raises((DecodeError, NotAnImageError)):
            decode(data, decoder=fast)
    for data in (encoded(scene(), "PNG"), encoded(scene().convert("CMYK"), quality=95)):
        assert (decode(data, decoder=fast) == decode(data)).all()


def test_every_decoder_finds_a_rotation_behind_other_segments(fast: Decoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photo(64, 64), quality=95, exif=exif.tobytes())
    profile = b"\xff\xe2" + (2002).to_bytes(2, "big") + b"ICC_PROFILE\0".ljust(2000, b".")
    assert (decode(data[:2] + profile + data[2:], decoder=fast) == decode(data)).all()


def test_every_decoder_refuses_an_image_too_large_for_pillow(fast: Decoder) -> None:
    """A few hundred bytes whose header promises 65,000 x 65,000 pixels."""
    data = bytearray(encoded(scene(16, 16)))
    size = data.index(b"\xff\xc0") + 5
    data[size : size + 4] = (65000).to_bytes(2, "big") * 2
    with pytest.raises(DecodeError, match="exceeds limit"):
        decode(bytes(data), decoder=fast)


def test_a_file_with_an_images_signature_or_zeros_is_damaged(fast: Decoder) -> None:
    """As after a crash of the machine that wrote it; other files are not images."""
    for data in (bytes(5000), b"\xff\xd8\xff" + bytes(5000), b"\x89PNG" + bytes(100), b""):
        with pytest.raises(DecodeError):
            decode(data, decoder=fast)
    with pytest.raises(NotAnImageError):
        decode(b"text", decoder=fast)


def test_every_decoder_resizes_pixels(fast: Decoder) -> None:
    pixels, out, expected = np.asarray(scene()), np.empty((32, 32, 3), np.uint8), np.empty((32, 32, 3), np.uint8)

    def choose(width: int, height: int) -> View:
        return View((8, 8, width - 20, height - 12), flip=True)

    fast.resize(pixels, choose, out)
    Pillow().resize(pixels, choose, expected)
    assert difference(out, expected) < 1.5


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.lists(st.floats(0, 1, exclude_max=True), min_size=41, max_size=41)
)
def test_a_random_box_lies_inside_the_image(width: int, height: int, numbers: list[float]) -> None:
    left, top, w, h = random_box(width, height, 0.08, numbers)
    assert 0 <= left <= left + w <= width
    assert 0 <= top <= top + h <= height
    assert w >= 1
    assert h >= 1


def test_random_boxes_have_the_specified_area_and_ratio() -> None:
    table = np.random.default_rng(0).random((4000, NUMBERS)).tolist()
    boxes = np.array([random_box(500, 400, 0.25, row) for row in table])
    area, ratio = boxes[:, 2] * boxes[:, 3] / 200_000, boxes[:, 2] / boxes[:, 3]
    assert area.min() > 0.24
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35
    assert 0.5 < area.mean() < 0.65


def test_the_validation_view_is_centred() -> None:
    config = Config(data="unused", image_size=224, val_resize=256)
    assert validation_view(config, 512, 256) == View((144, 16, 224, 224))
    assert validation_view(config, 512, 1024).box == (32, 288, 448, 448)


def test_shift_and_flip_move_the_image() -> None:
    pixels = np.asarray(scene(32, 32))
    out = np.empty_like(pixels)
    finish(pixels, View((0, 0, 32, 32), shift=(3, -2), flip=True), out)
    assert (out[:30, 3:] == pixels[2:, ::-1][:, :29]).all()
    assert (out[30:] == 0).all()
    assert (out[:, :3] == 0).all()


def test_shifts_reach_an_eighth_of_the_side_and_no_further() -> None:
    config = Config(data="unused", image_size=32, val_resize=32, augment="shift")
    table = np.random.default_rng(0).random((500, NUMBERS)).tolist()
    shifts = {training_view(config, 32, 32, row, 32).shift for row in table}
    assert {x for x, _ in shifts} == {y for _, y in shifts} == set(range(-4, 5))


def test_another_decoder_is_chosen_without_a_compiler_or_a_writable_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose_decoder("auto").name in ("simplejpeg", "torchvision")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    messages: list[str] = []
    assert choose_decoder("auto", messages.append).name in ("simplejpeg", "torchvision")
    assert messages == [
        "train: the compiled decoder is not available: no C compiler; it needs cc and the libjpeg-turbo headers"
    ]
    with pytest.raises(TrainError, match="no C compiler"):
        choose_decoder("roi")
