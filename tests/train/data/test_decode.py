"""Decoded pixels are as an image viewer shows them, whatever the file's format; crops follow the usual definitions."""

import contextlib
import functools
import io
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.train.runs import digit_tree, run
from train.config import Config
from train.data import roi as roi_module
from train.data.augment import NUMBERS, View, random_box, training_view, validation_view
from train.data.decode import (
    Choose,
    DecodeError,
    Decoder,
    NotAnImageError,
    Pillow,
    Roi,
    choose_decoder,
    finish,
    plain_size,
)
from train.data.roi import FLAGS, LIBRARIES, SOURCE, UNSUPPORTED, BuildError, Encoded, Library, file_name, load
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


@pytest.fixture(scope="module", params=["roi", "torchvision"])
def fast(request: pytest.FixtureRequest) -> Decoder:
    try:
        return choose_decoder(request.param)
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
    dark = decode(encoded(Image.fromarray(deep // 257), "PNG"))  # the type sets the scale, not the brightest pixel
    assert dark.max() <= 1
    floats = decode(encoded(Image.fromarray((deep / 65535).astype(np.float32)), "TIFF"))  # from 0 to 1
    assert (floats == out).all()


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


def cropped(data: bytes, view: View, side: int) -> np.ndarray:
    """Pillow's full decode, crop, and antialiased resize: what all decoders are compared with."""
    left, top, width, height = view.box
    image = Image.open(io.BytesIO(data)).convert("RGB").crop((left, top, left + width, top + height))
    pixels = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))
    return pixels[:, ::-1] if view.flip else pixels


def quality(ours: np.ndarray, theirs: np.ndarray) -> float:
    """PSNR in dB."""
    return float(10 * np.log10(255**2 / max(((ours.astype(float) - theirs) ** 2).mean(), 1e-9)))


def views(width: int, height: int, count: int) -> list[View]:
    rows = np.random.default_rng(1).random((count, NUMBERS)).tolist()
    return [View(random_box(width, height, 0.08, row), flip=bool(index % 2)) for index, row in enumerate(rows)]


FORMS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
}


@pytest.mark.parametrize("form", [*FORMS, "grey"])
def test_the_compiled_decoder_copies_what_needs_no_resampling(roi: Decoder, form: str) -> None:
    """Exactly, also at the crop's edges, where chroma is upsampled; neither side of the image is a multiple of 8."""
    image = photo(164, 124).resize((163, 121)).convert("L" if form == "grey" else "RGB")
    data = encoded(image, quality=90, **FORMS.get(form, {}))
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    rng = np.random.default_rng(0)
    for side in (1, 2, 3, 7, 8, 17, 40, 64, 120, 121):
        for left, top in [(0, 0), (163 - side, 121 - side), *rng.integers((164 - side, 122 - side), size=(25, 2))]:
            view = View((int(left), int(top), side, side), flip=bool(left % 2))
            expected = pixels[top : top + side, left : left + side]
            ours = decode(data, lambda *_, view=view: view, side, roi)
            assert (ours == (expected[:, ::-1] if view.flip else expected)).all(), view


@pytest.mark.parametrize("form", [*FORMS, "grey"])
def test_every_decoder_is_antialiased_at_every_scale(fast: Decoder, form: str) -> None:
    """From enlarged to 1/20, with crops at the image's edges."""
    data = encoded(photo().convert("L" if form == "grey" else "RGB"), quality=90, **FORMS.get(form, {}))
    edges = [View((0, 0, 320, 240)), View((0, 0, 9, 11)), View((311, 229, 9, 11)), View((0, 100, 320, 40))]
    for side in (16, 61, 112, 224):
        for view in [*views(320, 240, 6), *edges]:
            assert quality(decode(data, lambda *_, v=view: v, side, fast), cropped(data, view, side)) > 53, (side, view)


@functools.cache
def large() -> tuple[bytes, View, np.ndarray]:
    """A photo of 12 megapixels, a part of it, and the pixels that this should give."""
    data, view = encoded(photo(4000, 3000), quality=90), View((300, 200, 2900, 2700), flip=True)
    return data, view, cropped(data, view, 112)


def test_every_decoder_is_antialiased_with_twelve_megapixels(fast: Decoder) -> None:
    data, view, expected = large()
    assert quality(decode(data, lambda *_: view, 112, fast), expected) > 53


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (2, 3), (9, 400)])
def test_every_decoder_reads_tiny_and_narrow_images(fast: Decoder, size: tuple[int, int]) -> None:
    data = encoded(photo().resize(size), quality=90)
    for side in (1, 8, 33):
        ours = decode(data, side=side, decoder=fast)
        assert quality(ours, cropped(data, whole(*size), side)) > 50, side


def test_the_compiled_decoder_computes_the_same_bits_without_vector_instructions(roi: Decoder, tmp_path: Path) -> None:
    """As on another processor."""
    library = tmp_path / "portable.so"
    subprocess.run(["cc", *FLAGS, "-U__SSE2__", "-o", library, SOURCE, *LIBRARIES], check=True)
    portable, data = Roi(Library(library)), encoded(photo(), quality=90)
    pixels = np.asarray(photo())
    for side in (1, 5, 32, 112, 224):
        for view in [
            *views(320, 240, 5),
            View((0, 0, 320, 240), inside=False),
            View((3.5, 7.25, 100, 80), inside=False),
        ]:
            one, other = (decode(data, lambda *_, v=view: v, side, decoder) for decoder in (roi, portable))
            assert (one == other).all()
            for decoder, out in ((roi, one), (portable, other)):
                decoder.resize(pixels, lambda *_, v=view: v, out)
            assert (one == other).all()


def test_the_compiled_decoder_shifts_like_the_others(roi: Decoder) -> None:
    data = encoded(photo(32, 32), quality=90)

    def choose(width: int, height: int) -> View:
        return View((0, 0, width, height), shift=(-3, 2), flip=True)

    assert (decode(data, choose, 32, roi) == decode(data, choose, 32)).all()


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


def test_every_decoder_resizes_pixels_like_a_lossless_file(fast: Decoder) -> None:
    """Raw pixels of a packed file, antialiased like JPEGs."""
    pixels, data = np.asarray(photo()), encoded(photo(), "PNG")
    for side in (32, 112, 224):
        for view in views(320, 240, 5):
            out = np.empty((side, side, 3), np.uint8)
            fast.resize(pixels, lambda *_, v=view: v, out)
            assert quality(out, cropped(data, view, side)) > 50, (side, view)


def test_every_decoder_shifts_pixels(fast: Decoder) -> None:
    out, expected = np.empty((32, 32, 3), np.uint8), np.empty((32, 32, 3), np.uint8)

    def choose(width: int, height: int) -> View:
        return View((8, 8, width - 20, height - 12), shift=(3, -2), flip=True)

    fast.resize(np.asarray(scene()), choose, out)
    Pillow().resize(np.asarray(scene()), choose, expected)
    assert difference(out, expected) < 0.1


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
    assert validation_view(config, 512, 256) == View((144, 16, 224, 224), inside=False)
    assert validation_view(config, 512, 1024).box == (32, 288, 448, 448)


@pytest.mark.parametrize("kind", ["pil", "roi", "torchvision"])
@pytest.mark.parametrize("size", [(500, 375), (375, 500), (333, 500), (224, 224), (100, 401), (1024, 769), (256, 257)])
def test_validation_is_torchvisions_resize_and_centre_crop(kind: str, size: tuple[int, int]) -> None:
    """Also for training images with `--augment none` and `shift`, which the other decoders read."""
    from torchvision import transforms  # imported here: it takes two seconds

    decoder, data = choose_decoder(kind), encoded(photo(320, 240).resize(size), quality=90)
    config = Config(data="unused", image_size=224, val_resize=256)
    image = Image.open(io.BytesIO(data))
    expected = np.asarray(transforms.CenterCrop(224)(transforms.Resize(256)(image)))
    ours = decode(data, lambda w, h: validation_view(config, w, h), 224, decoder)
    assert quality(ours, expected) > 53
    assert np.abs(ours.astype(int) - expected).max() <= 1


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


def segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + (2 + len(content)).to_bytes(2, "big") + content


def test_the_size_in_a_header_is_that_of_the_image() -> None:
    for size in ((80, 60), (1, 500)):
        assert plain_size(encoded(scene(*size))) == size
        assert plain_size(encoded(scene(*size), progressive=True)) == size
        assert plain_size(encoded(scene(*size).convert("L"))) == size
    assert plain_size(encoded(scene().convert("CMYK"))) is None
    assert plain_size(encoded(scene(), "PNG")) is None
    assert plain_size(encoded(scene())[:100]) is None


def test_the_compiled_decoder_leaves_headers_that_it_does_not_understand_to_pillow(roi: Decoder) -> None:
    intact = encoded(scene(), quality=95)
    frame = intact.index(b"\xff\xc0")
    # a size of 0, which a later segment may define; another size than the decoder finds, behind stray bytes
    nameless = intact[: frame + 5] + bytes(2) + intact[frame + 7 :]
    hidden = segment(0xC1, b"\x08" + (30).to_bytes(2, "big") + (40).to_bytes(2, "big") + b"\x03")
    for data in (nameless, intact[:2] + segment(0xFE, b"\xff\xff") + intact[2:]):
        try:
            expected = decode(data)
        except DecodeError:
            with pytest.raises(DecodeError):
                decode(data, decoder=roi)
        else:
            assert difference(decode(data, decoder=roi), expected) < 3
    assert plain_size(intact[:frame] + hidden + intact[frame:]) == (80, 60)
    assert isinstance(roi, Roi)
    out = np.empty((32, 32, 3), np.uint8)
    [(code, _)] = roi.library.decode([Encoded(intact, (81, 60), whole(81, 60), out)])
    assert code == UNSUPPORTED


def test_a_decoder_that_was_built_before_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the image, or in the cache; whichever compiler built it."""
    image, cache = tmp_path / "image", tmp_path / "cache"
    monkeypatch.setattr(roi_module, "IN_IMAGE", image)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    try:
        load()
    except BuildError as error:
        pytest.skip(str(error))
    built = cache / "launcher-train" / file_name()
    assert [path.name for path in built.parent.iterdir()] == [file_name()]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load().path == built
    shutil.copytree(built.parent, image)
    assert load().path == image / file_name()


def test_a_decoder_of_another_machine_is_replaced(
    roi: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = tmp_path / "launcher-train" / file_name()
    built.parent.mkdir()
    built.write_bytes(b"of another machine")
    load()
    assert built.read_bytes().startswith(b"\x7fELF")
    assert load().path == built


def test_the_decoder_is_compiled_without_a_writable_cache(
    roi: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose_decoder("auto").name == "roi"


def test_another_decoder_is_chosen_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    messages: list[str] = []
    assert choose_decoder("auto", messages.append).name == "torchvision"
    assert messages == [
        "train: the compiled decoder, about 1.8 times as fast as torchvision's, is not available: no C compiler; "
        "it needs a C compiler and libjpeg-turbo's headers (Debian, Ubuntu: gcc libc6-dev libjpeg-dev)"
    ]
    with pytest.raises(TrainError, match="no C compiler"):
        choose_decoder("roi")


def test_a_decoder_that_cannot_be_loaded_is_not_called_a_lack_of_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo of another libjpeg >"$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(compiler))
    messages: list[str] = []
    assert choose_decoder("auto", messages.append).name == "torchvision"
    assert "cannot load" in messages[0]
    assert "libjpeg-dev" not in messages[0]


WITH_ANOTHER_LIBJPEG = """
import ctypes, os, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "torchvision":
            ctypes.CDLL(os.environ["LIBJPEG"])

sys.meta_path.insert(0, Finder())
from train.__main__ import exit_code, leave
leave(exit_code())
"""


@pytest.mark.slow
def test_the_compiled_decoder_is_used_where_torchvision_has_another_libjpeg(roi: Decoder, tmp_path: Path) -> None:
    """Some of its wheels have an older one of the same soname, in which functions are missing."""
    assert isinstance(roi, Roi)
    needed = subprocess.run(["readelf", "-d", roi.library.path], check=True, capture_output=True, text=True).stdout
    soname, other = re.findall(r"\[(libjpeg\S+)\]", needed)[0], tmp_path / "libjpeg.so"
    subprocess.run(["cc", "-shared", f"-Wl,-soname,{soname}", "-o", other, "-x", "c", "/dev/null"], check=True)
    options = ["--data", digit_tree(tmp_path / "data", 8, 1), "--arch", "resnet18", "--image-size", 32]
    options += ["--batch-size", 8, "--epochs", 1, "--workers", 1, "--device", "cpu"]
    program = ("-c", WITH_ANOTHER_LIBJPEG)
    [rank] = run(tmp_path / "out", 1, *options, program=program, env={"LIBJPEG": str(other)})
    assert "decoder roi" in rank.text
