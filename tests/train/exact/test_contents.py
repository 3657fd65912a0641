"""Data sets that differ between ranks, or from a checkpoint's, are detected without reading their images."""

import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import PIL
import pytest
import torch
import torchvision
from torch import nn

from tests.train.runs import digit_tree, finish, start
from train.__main__ import main
from train.checkpoint import Saver, digest, read
from train.data.contents import Contents, Listed
from train.data.open import open_dataset
from train.distributed.agreement import agree_on_weights, mixed_software, versions
from train.distributed.world import World
from train.errors import TrainError
from train.trainer import changes

T = TypeVar("T")
OPTIONS = "--arch smallcnn --image-size 8 --val-resize 8 --epochs 1 --batch-size 4 --workers 1 --device cpu --threads 1"
FILES = ["train/a/1.jpg", "train/a/2.jpg", "train/b/1.jpg"]
VAL = Listed(["val/a/1.jpg"], np.array([0]), np.array([40]))
SUMS = np.array([5, 6, 7])  # of all, of which those that are read are all, too
TRAIN = Listed(FILES, np.array([0, 0, 1]), np.array([10, 20, 30]), SUMS, SUMS)
BASE = Contents(("a", "b"), {"train": TRAIN, "val": replace(VAL, checksums=SUMS[:1], read=SUMS[:1])})


def changed(**fields: object) -> Contents:
    return replace(BASE, splits=BASE.splits | {"train": replace(BASE.splits["train"], **fields)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(BASE, classes=("b", "c")), "no class a"),
        (replace(BASE, classes=("a", "b", "c")), "an additional class, c"),
        (changed(files=["train/a/1.jpg", "train/b/1.jpg"], labels=np.array([0, 1])), "no image train/a/2.jpg"),
        (changed(files=[*FILES, "train/b/2.jpg"], labels=np.array([0, 0, 1, 1])), "an additional image, train/b/2.jpg"),
        (changed(files=FILES[::-1]), "the image train/b/1.jpg instead of train/a/1.jpg"),
        (changed(labels=np.array([0, 1, 1])), "train/a/2.jpg of class 1, not 0"),
        (changed(sizes=np.array([10, 20, 31])), "train/b/1.jpg of 31 bytes, not 30"),
        (changed(files=(), sizes=None, labels=np.arange(4)), "no image train/a/1.jpg"),
        (changed(checksums=np.array([5, 6, 0])), "train/b/1.jpg with other content"),
        (changed(checksums=None, read=np.array([0, 6, 7])), "train/a/1.jpg with other content"),
    ],
)
def test_a_difference_is_named(other: Contents, says: str) -> None:
    assert not other.digest("train", "val").same(BASE.digest("train", "val"))
    assert other.difference(BASE) == says


def test_sizes_count_only_where_both_have_them() -> None:
    other = changed(sizes=None)
    assert other.digest("train").same(BASE.digest("train"))
    assert other.difference(BASE) is None
    assert BASE.difference(BASE) is None


def test_a_folder_an_archive_and_a_packed_file_of_the_same_images_are_the_same(tmp_path: Path) -> None:
    folder = digit_tree(tmp_path / "data", 24, 12)
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(folder, "data")
    assert main(["pack", str(folder), str(tmp_path / "data.pack")]) == 0
    found = [Contents.of(open_dataset(str(tmp_path / name))) for name in ("data", "data.tar", "data.pack")]
    assert len({contents.digest("train", "val").names for contents in found}) == 1
    assert found[1].digest("train").sizes == found[2].digest("train").sizes != ""


def other_pixels(folder: Path) -> Path:
    """Change the last training image to another of the same size, in place."""
    file = sorted((folder / "train").rglob("*.jpg"))[-1]
    data = bytearray(file.read_bytes())
    data[-30] ^= 1
    file.write_bytes(data)
    return folder


def cifar(folder: Path, last: int) -> Path:
    """CIFAR-10 in its binary format, with two images a file; `last`: the last pixel of the test images."""
    folder.mkdir()
    (folder / "batches.meta.txt").write_text("a\nb\n")
    for name in (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"):
        image = bytes([1]) + bytes(3071) + bytes([last if name.startswith("test") else 0])
        (folder / name).write_bytes(bytes(3073) + image)
    return folder


def test_other_pixels_under_the_same_names_are_a_difference(tmp_path: Path) -> None:
    """In a folder, an archive, a packed file, packed pixels and CIFAR."""
    pairs: dict[str, list[Path]] = {"cifar": [cifar(tmp_path / f"cifar{last}", last) for last in (0, 9)]}
    for version in ("0", "1"):
        folder = digit_tree(tmp_path / version, 40, 12)
        if version == "1":
            other_pixels(folder)
        with tarfile.open(tmp_path / f"{version}.tar", "w") as tar:
            tar.add(folder, "data")
        for name, options in (("pack", []), ("raw", ["--raw", "8"])):
            assert main(["pack", str(folder), str(tmp_path / f"{version}.{name}"), *options]) == 0
        for kind, made in (("folder", folder), *((k, tmp_path / f"{version}.{k}") for k in ("tar", "pack", "raw"))):
            pairs.setdefault(kind, []).append(made)
    for kind, (one, two) in pairs.items():
        mine, theirs = (Contents.of(open_dataset(str(path)), read_within=60.0) for path in (one, two))
        assert not mine.digest("train", "val").same(theirs.digest("train", "val")), kind
        assert (mine.difference(theirs) or "").endswith(" with other content"), kind
        assert mine.difference(Contents.of(open_dataset(str(one)), read_within=60.0)) is None
    folder, packed = (Contents.of(open_dataset(str(pairs[kind][0])), read_within=60.0) for kind in ("folder", "pack"))
    assert folder.digest("train", "val").same(packed.digest("train", "val")), "unchanged images, in another format"


def test_a_checkpoint_of_an_older_version_lacks_some_keys() -> None:
    now = {"seed": 0, "images": 5, "data": "x", "sizes": "y"}
    assert changes({"seed": 0, "images": 4}, now) == ["images 4 -> 5"]
    assert changes(now | {"sizes": ""}, now) == []
    assert changes(now | {"sizes": "z"}, now) == ["images of other sizes"]
    assert changes(now | {"data": "z"}, now) == ["other images (names, order or classes)"]


def test_other_data_with_as_many_images_is_detected_on_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between epochs it is reported; within an epoch the order of images would change, so it is refused."""
    data = digit_tree(tmp_path / "data", 24, 12)
    options = ["--data", str(data), "--output", str(tmp_path / "out"), *OPTIONS.split()]
    assert main(options) == 0
    file = next((data / "train" / "3").iterdir())
    file.rename(file.with_name("other.jpg"))
    inside = read(tmp_path / "out" / "checkpoints" / "last.pt")
    inside["progress"] |= {"step": 1}
    saver = Saver(tmp_path / "inside" / "checkpoints", keep=0)
    saver.save(inside)
    saver.close()
    assert main([*options, "--epochs", "2", "--output", str(tmp_path / "inside")]) == 2
    assert "the order of images has changed since: other images (names," in capfd.readouterr().err
    assert main([*options, "--epochs", "2"]) == 0
    assert "saved: other images (names, order or classes)\n" in capfd.readouterr().out


class Second(World):
    """Rank 1 of two, without the other rank, whose messages are given here."""

    def __init__(self, sent: object, object_sent: object = None) -> None:
        super().__init__(1, 2, 0, 1, torch.device("cpu"), "none")
        vars(self).update(sent=sent, object_sent=object_sent)

    def gather(self, value: T) -> list[T]:
        return [vars(self)["sent"], value]

    def broadcast_object(self, value: T, source: int = 0) -> T:
        found: T = vars(self)["object_sent"]
        return found

    def all_ranks_or_exit(self, what: Callable[[], T]) -> T:
        return what()


def test_ranks_with_other_weights_are_refused() -> None:
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    theirs.weight = ours.weight
    tensors = {name: digest(value) for name, value in theirs.state_dict().items()}
    with pytest.raises(TrainError, match=r"^x.pt differs from rank 0 \(a\): has other values of bias; copy"):
        agree_on_weights("x.pt", ours, Second(digest(tensors), (tensors, "a")))
    agree_on_weights("x.pt", theirs, Second(digest(tensors)))


def test_other_decoders_and_versions_are_one_warning() -> None:
    own = f"decoder pil, {versions()}"
    for package in (torch, torchvision, np, PIL):
        assert package.__version__.partition("+")[0] in own
    assert mixed_software("pil", Second((own, "a"))) is None
    warning = mixed_software("pil", Second(("decoder roi, torch 2.4.0", "a")))
    assert warning is not None
    assert f"{own} (rank 1 on " in warning
    assert "; decoder roi, torch 2.4.0 (rank 0 on a)" in warning


def test_ranks_with_other_data_are_refused(tmp_path: Path) -> None:
    """The same number of images and classes, but rank 1 lacks a class and has another."""
    for rank in ("0", "1"):
        digit_tree(tmp_path / rank, 24, 12)
    for split in ("train", "val"):
        (tmp_path / "1" / split / "0").rename(tmp_path / "1" / split / "ten")
    ranks = start(tmp_path / "out", 2, tmp_path, *OPTIONS.split(), program=("tests/train/programs/by_rank.py",))
    assert finish(ranks) == [2, 2]
    assert "error" not in ranks[0].text
    assert "differs from rank 0 (" in ranks[1].text
    assert "has no class 0; copy it from there (rank 1 on " in ranks[1].text


def test_a_worker_with_other_data_than_the_parameter_server_is_refused(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        digit_tree(tmp_path / rank, 24, 12)
    file = tmp_path / "1" / "val" / "3" / next((tmp_path / "1" / "val" / "3").iterdir()).name
    file.rename(file.with_name("a.jpg"))
    options = [*OPTIONS.split(), "--parallel", "dual_batch", "--schedule", "multistep"]
    ranks = start(tmp_path / "out", 2, tmp_path, *options, program=("tests/train/programs/by_rank.py",))
    assert finish(ranks[1:]) == [2], ranks[1].text  # torchrun would end the server with it
    assert f"has no image val/3/{file.name}; copy it from there (rank 1 on " in ranks[1].text
    ranks[0].process.kill()


def member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def test_a_repeated_member_of_an_archive_counts_once_and_none_leaves_its_class(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        for split in ("train", "val"):
            for label in ("a", "b"):
                member(tar, f"{split}/{label}/1.jpg", b"old")
        for name in ("train/../../a/z.jpg", "train/a/../../b/z.jpg", "train/.b/z.jpg"):
            member(tar, name, b"z")
        member(tar, "train/a/1.jpg", b"newer")
    dataset = open_dataset(str(tmp_path / "data.tar"))
    assert list(dataset.classes) == ["a", "b"]
    assert [dataset.train.read(index) for index in range(len(dataset.train.labels))] == [b"newer", b"old"]


def test_a_member_of_a_shard_does_not_leave_its_class(tmp_path: Path) -> None:
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            for name in ("a/1.jpg", "b/1.jpg", "a/../z.jpg", "../z.jpg"):
                member(tar, name, b"x")
    dataset = open_dataset(str(tmp_path))
    assert list(dataset.classes) == ["a", "b"]
    assert len(dataset.train.labels) == 2
