"""--data MODULE:FUNCTION: a data set of the user's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train.runs import digit_tree, finish, run, start
from train.__main__ import main
from train.data.open import open_dataset
from train.data.own import pixels
from train.data.source import Dataset
from train.errors import TrainError

QUICK = "--arch smallcnn --image-size 8 --epochs 1 --batch-size 4 --workers 1 --threads 1 --device cpu"
MODULE = """
from pathlib import Path

import numpy as np
from PIL import Image

from train.data.folder import FileSource


class Rows:
    def __init__(self, item, labels):
        self.item, self.labels = item, labels

    def __getitem__(self, index):
        return self.item(index)

    def __len__(self):
        return 6


def noise(index):
    return Image.fromarray(np.random.default_rng(index).integers(0, 256, (12, 9, 3), np.uint8))


LABELS = [0, 1, 2, 0, 1, 2]


def data(train=Rows(noise, LABELS), classes=("a", "b", "c")):
    return classes, train, Rows(lambda index: {"image": noise(index), "label": 1}, np.array(LABELS))


def broken(index):
    if index in (0, 4):
        raise KeyError("no image here")
    return noise(index), LABELS[index]


class Bare:
    def __getitem__(self, index):
        return noise(index), 0


def case(name):
    match name:
        case "damaged":
            return data(Rows(broken, LABELS))
        case "two":
            return data()[:2]
        case "one class":
            return data(classes=["a"])
        case "a word":
            return data(classes="abc")
        case "bare":
            return data(Bare())
        case "empty":
            return data(Rows(noise, []))
        case "range":
            return data(Rows(noise, [0, 1, 3, 0, 1, 2]))
        case "negative":
            return data(Rows(noise, [0, 1, 2, -1, 1, 2]))
        case "floats":
            return data(Rows(noise, [0.0, 1, 2, 0, 1, 2]))
        case "short":
            return data(Rows(noise, LABELS[:5]))
        case "random":
            return data(Rows(lambda index: noise(None), LABELS))
        case "normalised":
            return data(Rows(lambda index: (np.zeros((3, 9, 9), np.float32), 0), LABELS))
        case "path":
            return data(Rows(lambda index: "a.jpg", LABELS))
        case "list source":
            return data(FileSource(Path("/"), ["x.jpg"], [0]))
        case "raises":
            return open("/no/such.csv")


def __getattr__(name):
    return lambda: case(name.replace("_", " "))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a user module, different in every test because modules are imported once."""
    name = f"data_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_the_images_and_labels_of_a_map_style_object(module: str) -> None:
    found: Dataset = open_dataset(f"{module}:data")
    assert (found.classes, found.train.labels.tolist(), found.val.labels.dtype) == (
        ("a", "b", "c"),
        [0, 1, 2, 0, 1, 2],
        np.int64,
    )
    first = np.random.default_rng(3).integers(0, 256, (12, 9, 3), np.uint8)
    for source in (found.train, found.val):
        assert np.array_equal(np.asarray(source.read(3)), first)


GREY, COLOUR = np.arange(12, dtype=np.uint8).reshape(3, 4), np.arange(36, dtype=np.uint8).reshape(3, 4, 3)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.fromarray(COLOUR), COLOUR),
        (Image.fromarray(GREY), GREY[..., None]),
        (COLOUR, COLOUR),
        (GREY, GREY[..., None]),
        (GREY[..., None], GREY[..., None]),
        (torch.from_numpy(COLOUR).permute(2, 0, 1), COLOUR),
        (torch.from_numpy(GREY), GREY[..., None]),
        (torch.from_numpy(GREY)[None], GREY[..., None]),
        (COLOUR.astype(np.float32), None),
        (torch.rand(3, 4, 4), None),
        (np.zeros((3, 4, 4), np.uint8), None),
        (np.zeros((0, 4, 3), np.uint8), None),
        ("file.jpg", None),
    ],
)
def test_what_is_an_image(image: Any, expected: Any) -> None:
    found = pixels(image)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.shape == (3, 4, 3)
        assert np.array_equal(found, np.broadcast_to(expected, (3, 4, 3)))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("two", "it returned a tuple; it is called as f(), and must return (classes, train, val)"),
        ("one_class", "it returned ['a'] as the names of the classes"),
        ("a_word", "it returned 'abc' as the names of the classes"),
        ("bare", "it returned train as a Bare without `targets` or `labels`: set one of them"),
        ("empty", "it returned train with labels of shape (0,)"),
        ("range", "it returned train with label 3 of image 2: the 3 classes are 0 to 2"),
        ("negative", "it returned train with label -1 of image 3"),
        ("floats", "it returned train with labels of shape (6,) and type float64, not integers"),
        ("short", "it returned train as a Rows of length 6 with 5 labels"),
        ("random", "train[0]: another image each time; leave random transforms out of the data set"),
        ("normalised", "whose item 0 of train is a ndarray of float32, shape (3, 9, 9)"),
        ("path", "whose item 0 of train is a str"),
        ("list_source", "it returned train with labels that are not a NumPy array of int64"),
        ("raises", "FileNotFoundError: [Errno 2] No such file or directory: '/no/such.csv'"),
    ],
)
def test_what_is_no_data_set_is_refused(name: str, says: str, module: str, tmp_path: Path) -> None:
    with pytest.raises(TrainError) as found:
        open_dataset(f"{module}:{name}")
    assert says in str(found.value)
    assert str(found.value).startswith(f"{'' if name == 'random' else '--data '}{module}:{name}")
    if name != "random":
        assert f"{tmp_path}/{module}.py:" in str(found.value)


def test_an_item_that_raises_is_a_damaged_image(module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = [*QUICK.split(), "--data", f"{module}:damaged", "--output", str(tmp_path / "out")]
    assert main([*options, "--max-damaged", "1"]) == 2
    assert "2 images cannot be read" in capfd.readouterr().err
    assert main(options) == 0
    text = capfd.readouterr().out
    for index in (0, 4):
        assert f"skipped {module}:damaged train[{index}]: {tmp_path}/{module}.py:" in text
    assert "KeyError: 'no image here'" in text
    assert "2 unreadable images skipped" in text


def test_no_such_function_is_refused_when_options_are_read(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty_of_mine.py").touch()
    for text, says in (("nowhere:data", "cannot import nowhere"), ("empty_of_mine:data", "has no function data")):
        assert main([*QUICK.split(), "--data", text, "--output", str(tmp_path / "out")]) == 2
        assert says in capfd.readouterr().err


TWO = """
import csv
from pathlib import Path

import numpy as np
from torchvision.datasets import ImageFolder

from train.data.folder import FileSource

HERE = Path(__file__).parent


def table():
    classes = [str(digit) for digit in range(10)]
    with (HERE / "images.csv").open() as file:
        rows = list(csv.reader(file))
    train, val = (
        FileSource(
            HERE, [path for path, _ in part], np.array([classes.index(label) for _, label in part])
        )
        for part in ([row for row in rows if row[0].startswith(f"data/{split}/")] for split in ("train", "val"))
    )
    return classes, train, val


def folders():
    train, val = (ImageFolder(HERE / "data" / split) for split in ("train", "val"))
    return train.classes, train, val
"""


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "two.py").write_text(TWO)
    files = sorted(digit_tree(tmp_path / "data", 43, 20).rglob("*.jpg"))
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name}" for file in files]
    (tmp_path / "images.csv").write_text("\n".join(rows))
    monkeypatch.syspath_prepend(tmp_path)  # of the ranks, too, which are forked
    return tmp_path


def test_a_table_and_a_torchvision_data_set_train_like_the_folder(digits: Path) -> None:
    """On two ranks."""

    def digest(data: object) -> str:
        options = [*QUICK.split(), "--decoder", "pil", "--print-digest", "--data", data]
        return run(digits / "out" / str(data).rpartition("/")[2], 2, *options)[0].digest

    folder = digest(digits / "data")
    assert digest("two:table") == folder
    assert digest("two:folders") == folder


def test_other_images_on_another_rank_are_refused(digits: Path) -> None:
    (digits / "other.py").write_text(TWO + "\n\ndef fewer():\n    return *folders()[:2], table()[1]\n")
    ranks = start(digits / "out", 2, *QUICK.split(), own=("--data other:folders", "--data other:fewer"))
    assert finish(ranks) == [2, 2], ranks[0].text
    (error,) = [line for rank in ranks for line in rank.lines if "error" in line]
    assert "--data other:fewer differs from rank 0 (" in error
    assert "; no randomness in it, and the same packages" in error


def test_dual_batch_takes_none(module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = [*QUICK.split(), "--parallel", "dual_batch", "--schedule", "multistep", "--data", f"{module}:data"]
    assert main([*options, "--output", str(tmp_path / "out")]) == 2
    assert f"--parallel dual_batch does not support --data {module}:data; remove" in capfd.readouterr().err
