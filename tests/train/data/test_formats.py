"""The same images from every format: packed files, archives, CIFAR's files; synthetic data and the repeated batch."""

import io
import json
import os
import pickle
import statistics
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train.runs import digit_tree
from train.__main__ import main
from train.config import parse
from train.data.batch import Request, Transfer
from train.data.decode import Pillow
from train.data.folder import open_folder
from train.data.loader import Loader
from train.data.open import open_dataset
from train.data.packed import HEADER
from train.data.source import Dataset, Source
from train.errors import TrainError

QUICK = [
    "--arch",
    "smallcnn",
    "--image-size",
    "16",
    "--epochs",
    "1",
    "--batch-size",
    "8",
    "--workers",
    "2",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--seed",
    "3",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 45, 20)


def digest(data: object, output: Path, *options: str) -> str:
    assert main(["--data", str(data), "--output", str(output), *QUICK, *options]) == 0
    lines = (output / "metrics.jsonl").read_text().splitlines()
    end = json.loads(lines[-1])
    assert end["kind"] == "end"
    return str(end["digest"])


def items(source: Source) -> list[tuple[int, bytes]]:
    return [(int(label), bytes(source.read(index))) for index, label in enumerate(source.labels)]


def test_training_on_a_packed_file_equals_training_on_the_folder(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "digits.pack"
    assert main(["pack", str(folder), str(packed)]) == 0
    assert "65 images" in capfd.readouterr().out
    ours, theirs = open_dataset(str(packed)), open_folder(folder)
    assert list(ours.classes) == list(theirs.classes)
    assert items(ours.train) == items(theirs.train)  # small JPEGs are kept byte for byte
    assert items(ours.val) == items(theirs.val)
    assert digest(packed, tmp_path / "a") == digest(folder, tmp_path / "b")
    assert "digits.pack:" in ours.val.name(3)


def test_large_images_are_shrunk_when_packed(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            Image.linear_gradient("L").resize((900, 600)).save(tmp_path / "data" / split / label / "x.png")
    assert main(["pack", str(tmp_path / "data"), str(tmp_path / "jpeg"), "--max-side", "300"]) == 0
    assert main(["pack", str(tmp_path / "data"), str(tmp_path / "raw"), "--raw", "64"]) == 0
    jpeg, raw = (open_dataset(str(tmp_path / name)).train for name in ("jpeg", "raw"))
    data = jpeg.read(0)
    assert isinstance(data, bytes)
    assert Image.open(io.BytesIO(data)).size == (300, 200)
    pixels = raw.read(1)
    assert isinstance(pixels, np.ndarray)
    assert pixels.shape == (64, 96, 3)
    assert pixels[0].mean() < 5
    assert pixels[-1].mean() > 250
    assert len(digest(tmp_path / "raw", tmp_path / "out", "--batch-size", "2")) == 64


def test_a_damaged_packed_file_is_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "digits.pack"
    assert main(["pack", str(folder), str(packed)]) == 0
    packed.write_bytes(packed.read_bytes()[:-10])
    assert main(["--data", str(packed), "--output", str(tmp_path / "o"), *QUICK]) == 2
    assert "damaged or incomplete" in capfd.readouterr().err


@pytest.mark.parametrize("options", [("--raw", "16"), ()])
def test_a_damaged_record_of_a_packed_file_is_detected(
    options: tuple[str, ...], folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Pixels have no structure that a decoder could check."""
    packed = tmp_path / "digits.pack"
    assert main(["pack", str(folder), str(packed), *options]) == 0
    whole = open_dataset(str(packed)).train
    before = [bytes(whole.read(index)) for index in range(len(whole.labels))]
    content, end = bytearray(packed.read_bytes()), int.from_bytes(packed.read_bytes()[8:16], "little")
    content[2000:end:97] = bytes(byte ^ 1 for byte in content[2000:end:97])
    packed.write_bytes(content)
    source = open_dataset(str(packed)).train
    for index, record in enumerate(before):
        try:
            assert bytes(source.read(index)) == record
        except OSError as error:
            assert "its checksum does not match" in str(error)  # noqa: PT017 - some records are whole
    assert main(["--data", str(packed), "--output", str(tmp_path / "o"), *QUICK]) == 2
    assert "its checksum does not match: the packed file is damaged; repair" in capfd.readouterr().err


def test_a_packed_file_that_is_truncated_while_it_is_read_is_detected(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "digits.pack"
    assert main(["pack", str(folder), str(packed)]) == 0
    source = open_dataset(str(packed)).train
    source.read(0)
    os.truncate(packed, HEADER.size + 1)
    with pytest.raises(OSError, match="checksum"):
        source.read(len(source.labels) - 1)


def test_a_packed_file_of_another_version_is_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "digits.pack"
    assert main(["pack", str(folder), str(packed)]) == 0
    with packed.open("r+b") as file:
        file.write(b"TRNPACK1")
    assert main(["--data", str(packed), "--output", str(tmp_path / "o"), *QUICK]) == 2
    assert "packed by another version (TRNPACK1, not TRNPACK2); pack it again" in capfd.readouterr().err


def test_packing_stops_at_an_unreadable_image_and_leaves_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = digit_tree(tmp_path / "data", 20, 10)
    next((data / "val" / "4").iterdir()).write_text("text")
    assert main(["pack", str(data), str(tmp_path / "out.pack")]) == 2
    assert "not an image" in capfd.readouterr().err
    assert not list(tmp_path.glob("out.pack*"))


def cifar(folder: Path, form: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Writes random images in one of the published formats; returns the training images (n, 32, 32, 3) and labels."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    ten, python = classes == 10, form == "python"
    names = [f"data_batch_{n}" for n in range(1, 6)] if ten else ["train"]
    images, labels = [], []
    for name in [*names, "test_batch" if ten else "test"]:
        data = rng.integers(0, 256, (30, 3072), np.uint8)
        fine = rng.permutation(30) % classes
        if python:
            content = {b"data": data, (b"labels" if ten else b"fine_labels"): fine.tolist(), b"coarse_labels": [0] * 30}
            protocol = 2 if name.endswith("1") else 5  # that of the published files, that of files written today
            (folder / name).write_bytes(pickle.dumps(content, protocol))
        else:
            head = fine[:, None] if ten else np.stack([np.zeros_like(fine), fine], axis=1)
            (folder / f"{name}.bin").write_bytes(np.concatenate([head.astype(np.uint8), data], axis=1).tobytes())
        if not name.startswith("test"):
            images.append(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(fine)
    named = [f"class{n}" for n in range(classes)]
    if python:
        key = b"label_names" if ten else b"fine_label_names"
        meta = folder / ("batches.meta" if ten else "meta")
        meta.write_bytes(pickle.dumps({key: [name.encode() for name in named]}))
    else:
        (folder / ("batches.meta.txt" if ten else "fine_label_names.txt")).write_text("\n".join(named) + "\n")
    return np.concatenate(images), np.concatenate(labels)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("form", ["python", "binary"])
def test_cifar_as_published(classes: int, form: str, tmp_path: Path) -> None:
    images, labels = cifar(tmp_path / "cifar", form, classes)
    dataset: Dataset = open_dataset(str(tmp_path / "cifar"))
    assert len(dataset.classes) == classes
    assert (dataset.train.labels == labels).all()
    assert all((dataset.train.read(index) == images[index]).all() for index in range(len(labels)))
    assert len(dataset.val.labels) == 30
    options = ("--image-size", "32", "--val-resize", "32", "--augment", "shift")
    assert len(digest(tmp_path / "cifar", tmp_path / "out", *options)) == 64


@pytest.mark.parametrize("kind", ["cifar", "folder", "shards"])
def test_the_folder_above_a_data_set_is_told_where_that_is(kind: str, tmp_path: Path) -> None:
    found = tmp_path / "below"
    if kind == "cifar":
        cifar(found, "python", 10)
    elif kind == "folder":
        digit_tree(found, 20, 10)
    else:
        found.mkdir()
        for split in ("train", "val"):
            (found / f"{split}-0.tar").touch()
    with pytest.raises(TrainError, match=f"the data set is in its folder below; use --data {found}"):
        open_dataset(str(tmp_path))


def test_hidden_folders_in_a_class_have_no_images(tmp_path: Path) -> None:
    """Jupyter keeps copies in .ipynb_checkpoints, macOS more in ._NAME."""
    data = digit_tree(tmp_path / "data", 20, 10)
    names = open_dataset(str(data)).train.files
    for split in ("train", "val"):
        image = next((data / split / "0").iterdir())
        (image.parent / ".ipynb_checkpoints").mkdir()
        for copy in (image.parent / ".ipynb_checkpoints" / image.name, image.with_name(f"._{image.name}")):
            copy.write_bytes(image.read_bytes())
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(data, ".")
    shards = tmp_path / "shards"
    shards.mkdir()
    for split in ("train", "val"):
        with tarfile.open(shards / f"{split}-0.tar", "w") as tar:
            tar.add(data / split, ".")
    for path in (data, tmp_path / "data.tar"):
        assert open_dataset(str(path)).train.files == names
    assert len(open_dataset(str(shards)).train.labels) == len(names)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch /tmp/was-here",)


def test_a_pickle_with_code_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cifar(tmp_path / "cifar", "python", 10)
    (tmp_path / "cifar" / "data_batch_3").write_bytes(pickle.dumps({b"data": Evil()}))
    assert main(["--data", str(tmp_path / "cifar"), "--output", str(tmp_path / "o"), *QUICK]) == 2
    assert "is not allowed in a CIFAR file" in capfd.readouterr().err


def shard(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("style", ["folders", "webdataset"])
def test_shards_have_the_same_images_as_the_folder(style: str, folder: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        parts: list[dict[str, bytes]] = [{}, {}, {}]
        for index, path in enumerate(sorted((folder / split).rglob("*.jpg"))):
            label = path.parent.name
            if style == "folders":
                parts[index % 3][f"{label}/{path.name}"] = path.read_bytes()
            else:
                parts[index % 3] |= {f"{index:05d}.jpg": path.read_bytes(), f"{index:05d}.cls": label.encode()}
        for index, files in enumerate(parts):
            shard(tmp_path / "shards" / f"{split}-{index:03d}.tar", files)
    ours, theirs = open_dataset(str(tmp_path / "shards")), open_folder(folder)
    assert list(ours.classes) == list(theirs.classes)
    assert sorted(items(ours.train)) == sorted(items(theirs.train))
    assert sorted(items(ours.val)) == sorted(items(theirs.val))
    assert ours.train.name(0).startswith(str(tmp_path / "shards") + ":train-000.tar:")
    assert len(digest(tmp_path / "shards", tmp_path / "out")) == 64


def test_an_archive_is_indexed_once_and_again_when_it_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, files = tmp_path / "data.tar", sorted(folder.rglob("*.jpg"))
    with tarfile.open(path, "w") as tar:
        for file in files[:-1]:
            tar.add(file, file.relative_to(folder))
    first = open_dataset(str(path))
    (kept,) = (tmp_path / "cache").rglob("*.json")
    before = kept.stat().st_mtime_ns
    again = open_dataset(str(path))
    assert items(again.train) == items(first.train)
    assert items(again.val) == items(first.val)
    assert kept.stat().st_mtime_ns == before
    kept.write_text(kept.read_text()[:-20])  # truncated, as by a full disk
    assert items(open_dataset(str(path)).val) == items(first.val)
    with tarfile.open(path, "a") as tar:
        tar.add(files[-1], files[-1].relative_to(folder))
    more = open_dataset(str(path))
    assert len(more.train.labels) + len(more.val.labels) == len(files)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2


def test_an_archive_opens_without_a_writable_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(folder, "data")
    assert items(open_dataset(str(tmp_path / "data.tar")).train) == items(open_folder(folder).train)


def test_an_image_without_a_class_in_a_shard_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        shard(tmp_path / "shards" / f"{split}-0.tar", {"a/1.jpg": b"", "b/1.jpg": b"", "stray.jpg": b""})
    assert main(["--data", str(tmp_path / "shards"), "--output", str(tmp_path / "o"), *QUICK]) == 2
    assert "stray.jpg has no class" in capfd.readouterr().err


def test_phases_train_at_their_size_and_validate_at_full_size(folder: Path, tmp_path: Path) -> None:
    config = parse(["--data", str(folder), *QUICK, "--epochs", "10", "--phases", "8@0", "12@0.35", "16@0.8"])
    assert [config.side(epoch) for epoch in range(10)] == [8] * 4 + [12] * 4 + [16] * 2
    seen: list[tuple[int, ...]] = []
    loader = Loader(config, open_folder(folder).train, Pillow(), 8, 1, Transfer(torch.device("cpu")))
    for epoch in (0, 5, 9):
        batches = loader.batches([Request(np.arange(8), 8), Request(np.arange(3), 3)], epoch)
        seen += [tuple(batch.images.shape) for batch in batches]
    loader.close()
    assert seen == [(n, side, side, 3) for side in (8, 12, 16) for n in (8, 3)]
    assert len(digest(folder, tmp_path, "--epochs", "2", "--phases", "8@0", "16@0.5")) == 64


def test_synthetic_data_trains_without_files(tmp_path: Path) -> None:
    assert len(digest("synthetic:40", tmp_path)) == 64


def test_fillers_of_synthetic_data_do_not_count(tmp_path: Path) -> None:
    """Batch norm needs two images, so the last batch of one is padded."""
    digest("synthetic:65", tmp_path, "--arch", "cifar_resnet20", "--log-every", "100")
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train"]["images"] for line in steps if line["kind"] == "epoch"] == [65]


def test_headspace_repeats_one_batch_without_waiting_for_data(folder: Path, tmp_path: Path) -> None:
    options = (
        "--headspace",
        "--log-every",
        "1",
        "--epochs",
        "20",
        "--batch-size",
        "9",
        "--lr",
        "1",
        "--augment",
        "none",
    )
    digest(folder, tmp_path, *options)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert statistics.median(line["data_wait"] for line in steps) < 0.1
    assert steps[-1]["top1"] == 100  # nine images can be memorised
