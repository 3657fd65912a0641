"""Batches keep their images even if the device reads them late, and an abandoned loader leaves nothing running."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from train.config import Config
from train.data import loader as loading
from train.data.batch import Batch, Copy, Request, Transfer
from train.data.decode import Pillow
from train.data.loader import Loader
from train.data.repeat import Repeated
from train.data.source import Pixels
from train.errors import TrainError

CPU = torch.device("cpu")
IMAGES, BATCH, SIDE = 64, 4, 8
CONFIG = Config(data="", image_size=SIDE, val_resize=SIDE, epochs=2, augment="none", flip=0, workers=2)


class Numbered:
    """Image i has the value i everywhere and the label i."""

    labels = np.arange(IMAGES)
    files = ()
    sizes = checksums = None
    reading = 0

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> Pixels:
        self.reading += 1
        time.sleep(0.0005)
        self.reading -= 1
        return np.full((SIDE, SIDE, 3), index, np.uint8)

    def place(self, index: int) -> None:
        pass


@dataclass(eq=False)
class LateEvent:
    """The end of a copy in a queue of copies."""

    source: torch.Tensor
    target: torch.Tensor
    queue: list["LateEvent"]

    def wait(self, stream: object = None) -> None:
        """Computation with the copy is not modelled: the test checks the copy at the end."""

    def synchronize(self) -> None:
        while self in self.queue:
            first = self.queue.pop(0)
            first.target.copy_(first.source)


class LateCopy(Copy):
    def take(self) -> Batch:
        return self.batch


class LaggingDevice(Transfer):
    """Copies are done in order, as on a stream, and no earlier than a stream waits for them."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.queue: list[LateEvent] = []
        self.started = 0

    def start(self, batch: Batch) -> Copy:
        self.started += 1
        copied = replace(batch, images=torch.full_like(batch.images, 255))
        self.queue.append(LateEvent(batch.images, copied.images, self.queue))
        return LateCopy(copied, self.queue[-1])


def requests() -> Iterator[Request]:
    return (Request(np.arange(start, start + BATCH), BATCH) for start in range(0, IMAGES, BATCH))


def test_images_stay_with_their_labels_if_the_device_lags() -> None:
    device = LaggingDevice()
    loader = Loader(CONFIG, Numbered(), Pillow(), BATCH, 1, device)
    batches = [batch for epoch in range(2) for batch in loader.batches(requests(), epoch)]
    loader.close()
    assert device.queue, "the device does not lag"
    device.queue[-1].synchronize()
    wrong = sum(int((batch.images.amax((1, 2, 3)) != batch.labels).sum()) for batch in batches)
    assert wrong == 0, f"{wrong} of {2 * IMAGES} images belong to another batch"


def test_the_next_copy_starts_while_a_batch_is_used() -> None:
    device, ahead = LaggingDevice(), []
    loader = Loader(CONFIG, Numbered(), Pillow(), BATCH, 1, device)
    for number, _ in enumerate(loader.batches(requests(), 0), 1):
        time.sleep(0.01)
        ahead.append(device.started - number)
    loader.close()
    assert set(ahead) <= {0, 1}
    assert 1 in ahead
    assert ahead[-1] == 0


def test_an_abandoned_epoch_does_not_write_into_the_next() -> None:
    source = Numbered()
    loader = Loader(CONFIG, source, Pillow(), BATCH, 1, Transfer(CPU))
    batches = loader.batches(requests(), 0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]  # a generator
    assert source.reading == 0
    images = [(batch.images.amax((1, 2, 3)), batch.labels.clone()) for batch in loader.batches(requests(), 0)]
    loader.close()
    assert all(torch.equal(values, labels) for values, labels in images)


class Lost(Numbered):
    """A lost network file system: from image 6 on, reads block until `back` is set."""

    def __init__(self) -> None:
        self.back = threading.Event()

    def read(self, index: int) -> Pixels:
        if index == 6:
            self.back.wait()
        return super().read(index)


def test_a_read_that_does_not_return_is_reported_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("POLL", "REPORT_AFTER", "GIVE_UP"):
        monkeypatch.setattr(loading, name, 0.02)
    source = Lost()
    loader = Loader(replace(CONFIG, timeout=0.2), source, Pillow(), BATCH, 1, Transfer(CPU))
    batches = loader.batches(requests(), 0)
    next(batches)
    with pytest.raises(TrainError, match=r"^6: not read within 0.2 s \(--timeout\) on "):
        next(batches)
    loader.close()
    assert capsys.readouterr().out.count("train: 6: not read within") == 1
    source.back.set()


def test_a_batch_may_be_empty() -> None:
    loader = Loader(CONFIG, Numbered(), Pillow(), BATCH, 1, Transfer(CPU))
    pieces = [Request(np.arange(size), 3) for size in (2, 0, 1)]
    assert [len(batch.images) for batch in loader.batches(pieces, 0)] == [2, 0, 1]
    loader.close()


def test_a_batch_of_one_has_room_for_the_padding_that_batch_norm_needs() -> None:
    loader = Loader(CONFIG, Numbered(), Pillow(), 1, 1, Transfer(CPU))
    [batch] = loader.batches([Request(np.array([3, 4]), 1, filler=1)], 0)
    assert len(batch.images) == 2
    assert batch.weights.tolist() == [1, 0]
    loader.close()


def test_the_repeated_batch_has_the_side_of_its_phase() -> None:
    config = replace(CONFIG, epochs=4, image_size=16, phases=("8@0", "16@0.5"))
    repeated = Repeated(Loader(config, Numbered(), Pillow(), BATCH, 1, Transfer(CPU)))
    sides = [next(repeated.batches(requests(), epoch)).images.shape[1] for epoch in range(4)]
    repeated.close()
    assert sides == [8, 8, 16, 16]
