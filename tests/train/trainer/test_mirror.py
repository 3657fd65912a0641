"""--mirror and --resume URL, with a server that speaks S3."""

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.s3 import BUCKET, Answer, Store, refused, s3
from tests.train.forks import Forked
from tests.train.runs import ROOT, digit_tree, run
from train import mirror
from train.__main__ import main
from train.checkpoint import State
from train.errors import TrainError
from train.mirror import Entry, Mirror, Place, download, find, new_name

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]
URL = f"s3://{BUCKET}/run"
WORKER = str(ROOT / "tests" / "train" / "programs" / "mirror_worker.py")
OPTIONS = "--arch smallcnn --image-size 16 --batch-size 4 --workers 1 --threads 1 --device cpu"
TINY = [*OPTIONS.split(), "--epochs", "2", "--print-digest"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with s3() as made:
        for name, value in made.variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(mirror, "PAUSE", 0.01)
        monkeypatch.setattr(mirror, "START", 300.0)
        yield made


class Uploads:
    """A Mirror whose checkpoints a test writes."""

    def __init__(self, folder: Path, url: str = URL, *, fresh: bool = True, file: str = "last.pt") -> None:
        self.lines, self.last = list[str](), folder / file
        self.mirror = Mirror(url, folder, file != "last-1.pt", self.lines.append)
        self.mirror.begin(fresh)

    def save(self, epoch: int, *, busy: bool = False, size: int = 1000, name: str = "") -> None:
        self.last.unlink(missing_ok=True)
        self.last.write_bytes(bytes([epoch]) * size)
        self.mirror.offer([self.last], state(epoch), name or new_name(state(epoch)), busy)


def state(epoch: int) -> State:
    return {"run": "", "generation": 0, "progress": {"epoch": epoch, "step": 0, "validated": epoch}}


def content(place: Place, folder: Path) -> bytes:
    """The newest checkpoint, as --resume reads it."""
    download(place, find(place, "last.pt"), ["last.pt"], folder)
    return (folder / "last.pt").read_bytes()


@pytest.mark.parametrize("method", ["", "--parallel fsdp"])
def test_best_weights_come_along_from_the_store(method: str, store: Store, tmp_path: Path) -> None:
    """The second epoch is worse; the run that goes on elsewhere has none that is better."""
    data, ranks = digit_tree(tmp_path / "data", 32, 10), 2 if method else 1
    shared = [*TINY, *method.split(), "--data", data, "--schedule", "linear", "--warmup", 0]
    (whole, *_) = run(
        tmp_path / "whole", ranks, *shared, "--lr", 1e-9, "--mirror", URL, "--checkpoints", tmp_path / "a"
    )
    best = torch.load(tmp_path / "a" / "best.pt", weights_only=True)
    assert best["progress"]["epoch"] == 1
    assert "(best " in whole.text
    more = [*shared, "--epochs", 3, "--resume", URL, "--checkpoints", tmp_path / "b"]
    run(tmp_path / "again", ranks, *more)
    assert (tmp_path / "b" / "best.pt").read_bytes() == (tmp_path / "a" / "best.pt").read_bytes()
    run(
        tmp_path / "path",
        ranks,
        *more[:-3],
        tmp_path / ("b/last.sharded" if method else "b/last.pt"),
        "--epochs",
        4,
        "--checkpoints",
        tmp_path / "c",
    )
    assert (tmp_path / "c" / "best.pt").read_bytes() == (tmp_path / "a" / "best.pt").read_bytes()


def test_a_run_goes_on_from_the_store(store: Store, tmp_path: Path) -> None:
    tiny = [*TINY, "--data", digit_tree(tmp_path / "data", 32, 10)]
    (whole,) = run(tmp_path / "whole", 1, *tiny, "--mirror", URL)
    place = Place(URL)
    newest = find(place, "last.pt")
    assert f"train: {URL} has {newest.name}" in whole.text
    kept = [name for name in store.sizes() if not name.endswith("best.pt")]
    assert sorted(kept) == [f"run/{newest.previous}/last.pt", f"run/{newest.name}/last.pt", "run/latest.json"]
    assert store.content(f"run/{newest.name}/last.pt") == (whole.output / "checkpoints" / "last.pt").read_bytes()

    (done,) = run(tmp_path / "done", 1, *tiny, "--resume", URL)  # another machine: its output folder is empty
    assert f"train: resumed last.pt of {URL}/{newest.name} at epoch 3" in done.text
    assert not [*(done.output / "checkpoints").iterdir()]

    first = Entry(newest.previous, newest.files, state(1))
    place.publish(first)
    (again,) = run(tmp_path / "again", 1, *tiny, "--resume", URL, "--mirror", URL)
    assert f"of {URL}/{first.name} at epoch 2" in again.text
    assert again.digest == whole.digest
    assert find(place, "last.pt").previous == first.name

    place.publish(first)  # a restart finds what the run itself has saved since
    (restarted,) = run(tmp_path / "again", 1, *tiny, "--resume", URL)
    assert f"resumed {again.output / 'checkpoints' / 'last.pt'} at epoch 3" in restarted.text


@pytest.mark.slow
@pytest.mark.parametrize("method", ["", "--parallel fsdp"])
def test_a_checkpoint_may_take_longer_to_download_than_the_timeout(method: str, store: Store, tmp_path: Path) -> None:
    """The other ranks wait for those that download, and would otherwise report a lost process."""
    limit, held = 30, threading.Event()
    data = digit_tree(tmp_path / "data", 32, 10)
    shared = [*TINY, *method.split(), "--data", data, "--timeout", limit]
    run(tmp_path / "whole", 2, *shared, "--mirror", URL, "--checkpoints", tmp_path / "a")
    file = min(find(Place(URL), "run.pt" if method else "last.pt").files)  # of one rank

    def hold(method: str, path: str) -> Answer | None:
        if method == "GET" and path.endswith(f"/{file}") and not held.is_set():
            held.wait(limit + 5)
            held.set()
        return None

    store.fault = hold
    again = run(tmp_path / "again", 2, *shared, "--resume", URL, "--checkpoints", tmp_path / "b")
    assert held.is_set()
    assert f"of {URL}/" in again[0].text


def test_each_rank_uploads_its_shards(store: Store, tmp_path: Path) -> None:
    sharded = [*TINY, "--data", digit_tree(tmp_path / "data", 32, 10), "--parallel", "fsdp"]
    whole = run(tmp_path / "whole", 2, *sharded, "--mirror", URL, "--checkpoints", tmp_path / "a")
    place = Place(URL)
    newest = find(place, "run.pt")
    parts = [*(tmp_path / "a" / "last.sharded").iterdir(), tmp_path / "a" / "best.pt"]
    saved = {path.name: path.stat().st_size for path in parts}
    assert newest.files == saved
    assert len(saved) == 5
    for name, size in saved.items():
        assert store.sizes()[f"run/{newest.name}/{name}"] == size
    place.publish(Entry(newest.previous, newest.files, state(1)))
    again = run(tmp_path / "again", 2, *sharded, "--resume", URL, "--checkpoints", tmp_path / "b")
    assert f"of {URL}/{newest.previous} at epoch 2" in again[0].text
    assert [rank.digest for rank in again] == [rank.digest for rank in whole]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["best.pt", "last.sharded"]
    with pytest.raises(TrainError, match="of another --parallel"):
        find(place, "last.pt")


class Ranks:
    """Gathers a value of each of two ranks, which are threads."""

    def __init__(self) -> None:
        self._values, self._all = [None, None], threading.Barrier(2)
        self.calls = [threading.Semaphore(0), threading.Semaphore(0)]

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self.calls[rank].release()
        self._all.wait()
        values: list[Any] = [*self._values]
        self._all.wait()
        return values


def test_old_checkpoints_are_removed_before_a_rank_uploads_the_next_one(store: Store, tmp_path: Path) -> None:
    ranks, going_on = Ranks(), threading.Event()
    uploads = [Uploads(tmp_path, file=f"last-{rank}.pt") for rank in range(2)]
    for rank, each in enumerate(uploads):
        each.mirror.together = partial(ranks.gather, rank)

    def hold(method: str, path: str) -> Answer | None:
        if (method, path) == ("PUT", f"/{BUCKET}/run/latest.json"):
            going_on.wait()
        return None

    store.fault = hold
    for each in uploads:
        each.save(1, name="epoch-0001-step-1-00000000")
    ranks.calls[1].acquire()  # rank 1 has uploaded its part
    for each in uploads:
        each.save(2, busy=True, name="epoch-0002-step-1-00000000")
    ends = [threading.Thread(target=each.mirror.end) for each in uploads]
    for end in ends:
        end.start()
    ranks.calls[1].acquire()  # and waits for rank 0, before the next upload or after it
    going_on.set()
    for end in ends:
        end.join()
    newest = find(Place(URL), "last-0.pt")
    assert sorted(newest.files) == ["last-0.pt", "last-1.pt"]
    assert {f"run/{newest.name}/{file}" for file in newest.files} <= store.sizes().keys()


def test_a_kill_leaves_latest_json_on_a_whole_checkpoint(store: Store, tmp_path: Path) -> None:
    killed, published = 0, 0
    for request in range(2, 22, 2):
        (folder := tmp_path / str(request)).mkdir()
        url = f"s3://{BUCKET}/{request}"
        store.asked.clear()
        worker = Forked([WORKER, url, str(folder)], ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})

        def kill(_method: str, _path: str, request: int = request, pid: int = worker.pid) -> Answer | None:
            if len(store.asked) == request:
                os.kill(pid, signal.SIGKILL)
            return None

        store.fault = kill
        killed += worker.wait(120) == -signal.SIGKILL
        store.fault = lambda _method, _path: None
        place = Place(url)
        if found := place.latest():
            published += 1
            epoch = found.about["progress"]["epoch"]
            assert content(place, folder / "found") == bytes([epoch]) * 9_000_000
    assert killed == 10
    assert 2 <= published <= 8


def test_two_checkpoints_are_kept_and_those_in_between_left_out(store: Store, tmp_path: Path) -> None:
    uploads, held = Uploads(tmp_path), threading.Event()

    def hold(method: str, path: str) -> Answer | None:
        if method == "PUT" and path.endswith("last.pt"):
            held.wait(60)
        return None

    store.fault = hold
    uploads.save(1)
    assert uploads.mirror.busy
    uploads.save(2, busy=True)
    uploads.save(3, busy=True)  # the last one of the run is uploaded at its end
    held.set()
    uploads.mirror.end()
    assert content(Place(URL), tmp_path / "found") == b"\3" * 1000
    assert len(store.sizes()) == 3
    assert sum("is slower than the checkpoints" in line for line in uploads.lines) == 2
    assert not (tmp_path / mirror.UPLOADING).exists()

    later = Uploads(tmp_path, fresh=False)
    later.save(4)
    later.mirror.end()
    assert content(Place(URL), tmp_path / "found") == b"\4" * 1000
    assert len(store.sizes()) == 3


def test_a_store_that_is_busy_is_asked_again(store: Store, tmp_path: Path) -> None:
    uploads, refusals = Uploads(tmp_path), [3]

    def busy(method: str, path: str) -> Answer | None:
        if method == "PUT" and refusals[0]:
            refusals[0] -= 1
            return refused("429 Too Many Requests", "SlowDown", ("Retry-After", "0"))
        return None

    store.fault = busy
    uploads.save(1)
    uploads.mirror.end()
    assert refusals == [0]
    assert content(Place(URL), tmp_path / "found") == b"\1" * 1000


def test_a_store_that_fails_costs_a_warning(store: Store, tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    store.fault = lambda method, path: refused("403 Forbidden", "AccessDenied") if method == "PUT" else None
    uploads.save(1)
    while uploads.mirror.busy:
        threading.Event().wait(0.01)
    (line,) = uploads.lines
    assert line.startswith("train: warning: epoch-0001-step-0-")
    assert "PermissionError" in line
    assert Place(URL).latest() is None
    store.fault = lambda _method, _path: None
    uploads.save(2)
    uploads.mirror.end()
    assert content(Place(URL), tmp_path / "found") == b"\2" * 1000


def test_a_store_that_hangs_does_not_hold_the_start(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(method: str, path: str) -> Answer | None:
        answers.wait(120)
        return None

    store.fault = hang
    monkeypatch.setattr(mirror, "START", 0.2)
    uploads = Uploads(tmp_path)
    assert "does not respond" in uploads.lines[0]
    answers.set()
    uploads.save(1)
    uploads.mirror.end()
    assert content(Place(URL), tmp_path / "found") == b"\1" * 1000


def test_a_store_that_refuses_ends_the_start(store: Store, tmp_path: Path) -> None:
    store.fault = lambda _method, _path: refused("403 Forbidden", "InvalidAccessKeyId")
    with pytest.raises(TrainError, match=r"--mirror s3://bucket/run: PermissionError.*check the URL and its cred"):
        Uploads(tmp_path)
    with pytest.raises(TrainError, match=r"--resume s3://bucket/run: PermissionError.*check the URL and its cred"):
        find(Place(URL), "last.pt")
    store.fault = lambda _method, _path: None
    with pytest.raises(TrainError, match="bucket does not exist"):
        Uploads(tmp_path, "s3://nobody/run")


def test_checkpoints_of_another_run_are_not_replaced(store: Store, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    ours, theirs = Uploads(tmp_path), Uploads(tmp_path / "b")  # both found an empty store
    ours.save(1)
    ours.mirror.end()
    theirs.save(2)
    theirs.mirror.end()
    assert any("another run has written epoch-0001" in line for line in theirs.lines)
    assert content(Place(URL), tmp_path / "found") == b"\1" * 1000
    with pytest.raises(TrainError, match=f"has checkpoints; to continue them, --resume {URL}"):
        Uploads(tmp_path)


def test_a_latest_json_that_is_not_ours_is_refused(store: Store) -> None:
    good = {
        "format": 1,
        "name": "epoch-0001-step-0-01234567",
        "files": {"last.pt": 1},
        "about": state(1),
        "previous": "",
    }
    about = {"run": "", "generation": 0}
    bad = [
        {"name": "../x"},
        *({"files": files} for files in ({"last.pt": -5}, {"last.pt": "1"}, {"last.pt": 1.5}, {"a/b": 1}, ["last.pt"])),
        *({"about": about | {"progress": each}} for each in ({"epoch": "1"}, {"step": -1}, {"validated": True}, [])),
        *({"about": each} for each in (state(1) | {"generation": "2"}, state(1) | {"best": ["x"]}, [])),
        *({"previous": each} for each in (None, "..", "run")),
        {"format": 2},
    ]
    store.client().put_object(Bucket=BUCKET, Key="run/latest.json", Body=json.dumps(good).encode())
    assert find(Place(URL), "last.pt").files == {"last.pt": 1}
    for text in ("[]", "{", *(json.dumps(good | each) for each in bad)):
        store.client().put_object(Bucket=BUCKET, Key="run/latest.json", Body=text.encode())
        with pytest.raises(TrainError, match="--resume"):
            find(Place(URL), "last.pt")


def test_an_error_of_a_request_that_nobody_waits_for_is_one_line(
    store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    """aiohttp's, without a handler: "Task exception was never retrieved" and a traceback."""
    place = Place(URL)

    async def fail() -> None:
        raise OSError("Connection lost")

    async def forget() -> None:
        task = asyncio.ensure_future(fail())
        await asyncio.wait([task])

    asyncio.run_coroutine_threadsafe(forget(), place.files.loop).result()
    gc.collect()
    said = capfd.readouterr()
    assert (said.out, said.err) == (f"train: warning: {URL}: OSError: Connection lost\n", "")


def test_a_folder_by_its_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    uploads = Uploads(tmp_path, url)
    for epoch in (1, 2, 3):
        uploads.save(epoch)
    uploads.mirror.end()
    assert content(Place(url), tmp_path / "found") == b"\3" * 1000
    assert len([*(tmp_path / "there").iterdir()]) == 3


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--mirror=bucket/run", "not a URL"),
        ("--mirror=s3://key:secret@bucket/run", "would appear in logs"),
        ("--resume=https://me:secret@host/run", "would appear in logs"),
        ("--resume=xx://bucket/run", "Protocol not known"),
    ],
)
def test_urls_that_are_refused(option: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--data", "synthetic", "--output", str(tmp_path), option]) == 2
    said = capfd.readouterr().err
    assert words in said
    assert "secret" not in said
