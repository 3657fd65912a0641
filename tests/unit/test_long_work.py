"""Progress of pulls, builds and the first import: bytes up to the image's size, a line every 30 s in a pipe."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from launcher.cli import long_work
from launcher.cli.long_work import LongWork
from launcher.errors import InUse, NodesFailed, NodeUnfit
from launcher.image.builder import BuildSteps
from launcher.image.distribution import _pull_shown
from launcher.image.image_locations import ImageLocations
from launcher.model.progress import StatusLine
from launcher.node.docker.pulling import PullProgress
from launcher.node.parallel import periodically
from launcher.run.begin import gpus

MB = 1_000_000


def event(layer: str, status: str, current: int = 0, total: int = 0) -> dict[str, object]:
    """Event of an engine during a pull: docs.docker.com/reference/api/engine, POST /images/create."""
    detail = {"current": current, "total": total} if total else {}
    return {"status": status, "progressDetail": detail, "id": layer}


PULL = [
    {"status": "Pulling from test/x", "id": "1"},
    event("aaa", "Already exists"),
    event("bbb", "Pulling fs layer"),
    event("ccc", "Pulling fs layer"),
    event("ddd", "Pulling fs layer"),
    event("ddd", "Waiting"),
    event("bbb", "Downloading", 2 * MB, 6 * MB),
    event("ccc", "Downloading", 1 * MB, 2 * MB),
    event("ccc", "Download complete"),
    event("ddd", "Downloading", 1 * MB, 8 * MB),
    event("bbb", "Verifying Checksum"),
    event("bbb", "Download complete"),
    event("bbb", "Extracting", 3 * MB, 6 * MB),
    event("ddd", "Download complete"),
    event("bbb", "Pull complete"),
    event("ccc", "Pull complete"),
    event("ddd", "Pull complete"),
    {"status": "Digest: sha256:0"},
]


def test_the_bytes_of_a_pull_grow_and_end_at_the_size_of_its_layers() -> None:
    progress, seen, unpacking = PullProgress(), list[tuple[int, int]](), list[str]()
    for each in PULL:
        progress.take(each)
        seen.append((progress.received, progress.total))
        unpacking.append(progress.unpacking)
    received = [bytes_ for bytes_, _ in seen]
    assert received == sorted(received)
    assert seen[-1] == (16 * MB, 16 * MB)
    assert seen[7] == (3 * MB, 12 * MB)  # the third layer's size is not known yet
    assert all(bytes_ <= total for bytes_, total in seen if total)
    assert [text for text in dict.fromkeys(unpacking) if text] == [
        f"unpacking, {done} of 3 layers done" for done in range(3)
    ]


@pytest.mark.parametrize(
    "strange",
    [
        {},
        {"id": 7, "status": "Downloading"},
        {"id": "a", "status": "Downloading", "progressDetail": {"current": -1, "total": "many"}},
        {"id": "a", "status": "Extracting", "progressDetail": {"current": 3, "units": "s"}},  # containerd's store
        {"id": "a", "status": "Downloading", "progressDetail": [1]},
    ],
)
def test_unknown_events_are_ignored(strange: dict[str, object]) -> None:
    progress = PullProgress()
    progress.take(strange)
    assert (progress.received, progress.total) == (0, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_in_a_pipe_there_is_a_line_every_30_s_and_one_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with LongWork(clock) as work:
        for second in range(101):
            clock.now = second
            work.progress("gpu-a", second * 200 * MB, 20_000 * MB)
            work.log(StatusLine("gpu-b", f"building: Step 2/7 : RUN x | line {second}"))
    assert capfd.readouterr().err.splitlines() == [
        "launcher: gpu-a: 6.0 GB of 20.0 GB, 200.0 MB/s, 70 s left",
        "launcher: gpu-b: building: Step 2/7 : RUN x | line 30",
        "launcher: gpu-a: 12.0 GB of 20.0 GB, 200.0 MB/s, 40 s left",
        "launcher: gpu-b: building: Step 2/7 : RUN x | line 60",
        "launcher: gpu-a: 18.0 GB of 20.0 GB, 200.0 MB/s, 10 s left",
        "launcher: gpu-b: building: Step 2/7 : RUN x | line 90",
        "launcher: gpu-a: 20.0 GB in 2 min",
    ]


def test_in_a_pipe_the_end_of_a_pull_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    """While it unpacks a layer of many GB, the engine reports for minutes, and the bytes do not change."""
    clock, progress = Clock(), PullProgress()
    log: list[StatusLine] = []

    def pull(reference: str, login: object, report: Callable[[PullProgress], object]) -> None:
        for second in range(200):
            clock.now = second
            size = 20_000 * MB
            done = min(second * 200 * MB, size)
            progress.take(event("aaa", "Downloading" if done < size else "Extracting", done, size))
            report(progress)

    class Engine:
        node = "gpu-a"
        images = type("Store", (), {"pull": staticmethod(pull)})

    with LongWork(clock) as work, pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.image.distribution.time.monotonic", clock)

        def both(text: str) -> None:
            log.append(text)  # type: ignore[arg-type]
            work.log(text)

        places = ImageLocations((), None, both, work.progress)
        _pull_shown(Engine(), "x:1", None, places)  # type: ignore[arg-type]
    assert capfd.readouterr().err.splitlines()[3:] == [
        "launcher: gpu-a: 20.0 GB in 2 min",
        "launcher: gpu-a: unpacking, 0 of 1 layers done",
        "launcher: gpu-a: unpacking, 0 of 1 layers done",
        "launcher: gpu-a: unpacking, 0 of 1 layers done",
    ]
    assert len(log) == 20  # every 5 s


def test_in_a_pipe_short_work_is_not_reported(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with LongWork(clock) as work:
        for second in range(6):
            clock.now = second
            work.progress("gpu-a", second * MB, 5 * MB)
            work.log(StatusLine("gpu-a", "unpacking"))
        work.log("a message")
    clock.now = 1000
    work.progress("gpu-a", 6 * MB, 7 * MB)
    work.log(StatusLine("gpu-a", "unpacking"))
    work.log("a later message")
    assert capfd.readouterr().err == "launcher: a message\nlauncher: a later message\n"


def test_the_awaited_gpus_are_reported_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "PAUSE", -1.0)
    monkeypatch.setattr(gpus.random, "random", lambda: 1.0)
    with LongWork() as work:
        waiting = gpus.Waiting(work.log, wait=True)
        for what in ("GPU 0 is in use", "GPU 0 is in use", "GPU 1 is in use"):
            waiting.after(NodesFailed([InUse("node gpu-a", what, "wait for it: --wait")]))
    assert capfd.readouterr().err.splitlines() == [
        "launcher: waiting: node gpu-a: GPU 0 is in use",
        "launcher: waiting: node gpu-a: GPU 1 is in use",
    ]
    for error, wait in ((InUse("a", "in use"), False), (NodeUnfit("a", "has no GPU"), True)):
        with pytest.raises(NodesFailed):
            gpus.Waiting(work.log, wait=wait).after(NodesFailed([error]))


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return a terminal of 80 columns, and the text written to it."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, legacy_windows=False, soft_wrap=True)
    monkeypatch.setattr(LongWork, "err", console)
    monkeypatch.setattr(long_work, "interactive", lambda: True)
    return written.getvalue


def test_on_a_terminal_there_is_a_bar_with_bytes_rate_and_time_left(screen: Callable[[], str]) -> None:
    with LongWork() as work:
        work.log(StatusLine("gpu-b", "building: Step 2/7 : RUN pip install " + "x" * 100))
        deadline, sent = time.monotonic() + 30, 0
        while not re.search(r"gpu-a .*/20\.0 MB.*B/s.*0:00", screen()):  # drawn by a thread
            assert time.monotonic() < deadline, screen()
            sent = min(sent + MB, 19 * MB)
            work.progress("gpu-a", sent, 20 * MB)
            time.sleep(0.02)
        shown = screen()
        work.log("a message")
    assert re.search(r"gpu-b: building: Step 2/7 : RUN pip install x+…", shown)
    assert "a message" in screen()


def test_a_build_shows_its_step_and_the_last_line_of_it() -> None:
    log: list[str] = []
    classic = BuildSteps("gpu-a", log.append)
    for line in ("Step 2/7 : RUN pip install x", " ---> Running in 0a", "Collecting x"):
        classic(line)
    assert log[0] == "gpu-a: building: Step 2/7 : RUN pip install x"
    assert log[-1] == "gpu-a: building: Step 2/7 : RUN pip install x | Collecting x"
    buildkit = BuildSteps("local", log.append)
    for line in ("#7 [3/5] RUN pip install x", "#7 12.31 Collecting x"):
        buildkit(line)
    assert log[-1] == "local: building: [3/5] RUN pip install x | Collecting x"
    assert all(isinstance(line, StatusLine) for line in log)


def test_long_work_reports_progress_periodically() -> None:
    times: list[float] = []
    with periodically(times.append, every=0.01):
        while len(times) < 3:
            pass
    assert times == sorted(times)
