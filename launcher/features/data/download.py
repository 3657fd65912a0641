"""Data of a URL: downloaded once, by the first node that reaches the store, or else by this machine.

Then the copy there is a source like any other.
"""

from __future__ import annotations

import math
import os
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from launcher.errors import DataFailed, LauncherError
from launcher.features.data import worker
from launcher.features.data.locations import Copy, DataSource, copies, copy_path
from launcher.features.data.push import SILENCE, Endpoint
from launcher.features.data.worker import Worker, failure
from launcher.job.files import hidden
from launcher.job.settings import read_settings
from launcher.model.home import cache_folder
from launcher.model.progress import Log, OnProgress, StatusLine
from launcher.model.sizes import counted
from launcher.node.engine import Engine
from launcher.node.machine import CommandStream
from launcher.node.parallel import run_all, run_all_catching
from launcher.node.process.engine import ProcessEngine
from launcher.records.masking import Masker

HERE = "this machine"
PATIENCE = 15.0  # seconds without a word of the store before that is said


@dataclass(frozen=True)
class Variables:
    """Environment of a download. secrets: those that its messages must not contain."""

    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def hidden(self) -> list[str]:
        """Return the texts that nothing that is printed may contain; one that contains another one comes before it."""
        return sorted((text for text in hidden(self.secrets, self.env) if len(text) >= 4), key=len, reverse=True)


@dataclass(frozen=True)
class Downloaded:
    """by: the node, "" if nothing was downloaded. received: bytes; the rest of `size` was there.

    unchecked: files of which the store has no checksum.
    """

    by: str = ""
    size: int = 0
    received: int = 0
    unchecked: int = 0


@dataclass(frozen=True)
class _Place:
    """Where a download can run. host: "" for this machine. root: of its copies, `inside` as its process sees it.

    held: its copies of the URL.
    """

    node: str
    host: str
    root: str
    inside: str
    image: str
    start: Callable[[], CommandStream]
    held: Sequence[Copy] = ()

    def whole(self, state: str = "") -> Copy | None:
        return next((copy for copy in self.held if copy.whole and state in ("", copy.signature)), None)


@dataclass(frozen=True)
class _Look:
    """A process that has listed the store, or the final message of one that could not."""

    place: _Place
    process: Worker
    message: Mapping[str, Any]

    @property
    def end(self) -> str:
        return str(self.message.get("end", ""))


def download(
    source: DataSource, nodes: Sequence[Endpoint], variables: Variables, log: Log, on_progress: OnProgress
) -> tuple[DataSource, Downloaded]:
    """Return the source on a machine that has the URL's present state. Raises DataFailed, NodesFailed, ..."""
    places = run_all([partial(_place, node, source.url) for node in nodes])
    places.sort(key=lambda place: (place.whole() is None, not place.held))
    with ExitStack() as opened:
        look = _reach(source, places, variables, log, opened)
        state, single, size = (look.message[key] for key in ("state", "single", "bytes"))
        owner = next((place for place in (look.place, *places) if place.whole(state)), None)
        if owner and owner is not look.place and (copy := owner.whole(state)):
            path = copy_path(owner.root, copy.name, single)
            return replace(source, host=owner.host, path=path, state=state, content=copy.name), Downloaded()
        if not owner and (old := [place.node for place in places if place.whole()]):
            log(f"{source.url} was changed after {', '.join(old)} got it: downloading it again")
        look.process.send({})
        end = _until(look.process, "end", log, on_progress)
        if end["end"] != "whole":
            raise _failed(look, source, end, places)
        received = look.process.counted["received"]
    path = copy_path(look.place.root, end["content"], single)
    found = replace(source, host=look.place.host, path=path, state=state, content=end["content"])
    if not received:
        return found, Downloaded()
    return found, Downloaded(look.place.node, size, received, end.get("unchecked", 0))


def _place(node: Endpoint, url: str) -> _Place:
    held = [copy for copy in copies(node.engine, node.root) if copy.source == url]
    return _Place(node.node, node.engine.host, node.root, node.inside, node.image, node.open, held)


def here() -> tuple[Engine, str]:
    """Return this machine, and the folder of its downloads, which nobody else may enter.

    Raises UsageError if there is no home folder.
    """
    folder = cache_folder(os.environ) / "data"
    with suppress(OSError):  # it is not there yet, or another user's: then `copies` or the download says so
        if folder.stat().st_mode & 0o077:  # of an earlier version
            folder.chmod(0o700)
    return ProcessEngine(HERE), str(folder)


def _here() -> _Place:
    engine, root = here()
    return _Place(HERE, "", root, root, "", partial(engine.machine.open, worker.local_argv()))


def _reach(source: DataSource, places: Sequence[_Place], variables: Variables, log: Log, opened: ExitStack) -> _Look:
    """Return the first look that reached the store: of one node, of the others, of this machine. Raises its error."""
    first = _look(places[0], source, variables, log)
    opened.callback(first.process.close)
    looks = [first]
    if first.end == "unreachable" and len(places) > 1:
        log(f"{first.place.node} does not reach {source.url} ({first.message['why']}); trying the other nodes")
        others = run_all_catching([partial(_look, place, source, variables, log) for place in places[1:]])
        looks += [each for each in others if not isinstance(each, LauncherError)]
        for look in looks[1:]:
            opened.callback(look.process.close)
    best = min(looks, key=lambda look: (look.end != "", look.end in ("unreachable", "package")))
    if best.end in ("unreachable", "package"):
        lacks = "no node reaches it" if best.end == "unreachable" else f"the image on {best.place.node} cannot"
        log(f"{HERE} downloads {source.url}, as {lacks}: {best.message['why']}")
        best = _look(_here(), source, variables, log)
        opened.callback(best.process.close)
    if best.end:
        raise _failed(best, source, best.message, places)
    return best


def _look(place: _Place, source: DataSource, variables: Variables, log: Log) -> _Look:
    """Raises DataFailed, NodeUnreachable, NodeUnfit."""
    about = {"source": source.url, "name": source.name, "image": place.image}
    order: dict[str, Any] = {"role": "fetch", "url": source.url, "root": place.inside, "about": about}
    order["most_files"] = read_settings(os.environ).limits.data_files
    order |= {"env": {**variables.env}, "secrets": {**variables.secrets}, "hidden": variables.hidden()}
    process = Worker(place.node, place.start(), order, Masker(variables.hidden()))
    try:
        return _Look(place, process, _until(process, "state", log))
    except BaseException:
        process.close()
        raise


def _until(process: Worker, key: str, log: Log, on_progress: OnProgress | None = None) -> Mapping[str, Any]:
    """Return the first message with this key, or the last one."""
    say_at = time.monotonic() + PATIENCE if key == "state" else math.inf
    while True:
        message = process.report(1.0) or {}
        if "listed" in message:
            say_at = math.inf
            log(StatusLine(process.node, f"{counted(message['listed'], 'file')} listed"))
        elif time.monotonic() > say_at and not message.keys() & {key, "end"}:
            log(f"{process.node}: the store has not answered yet")
            say_at = math.inf
        if "note" in message:
            log(f"{process.node}: {message['note']}")
        if key in message or "end" in message:
            return message
        if on_progress and message.get("total"):
            on_progress(process.node, message["done"], message["total"])
        if time.monotonic() - process.heard > SILENCE:
            raise DataFailed(process.node, f"did not respond for {SILENCE:.0f} s", "check the load of the node")


def _failed(look: _Look, source: DataSource, message: Mapping[str, Any], places: Sequence[_Place]) -> DataFailed:
    error = failure(look.place.node, {**message, "why": f"{source.url}: {message.get('why', 'it exited early')}"})
    if message.get("end") not in ("room", "replaced") and (instead := _instead(source, places)):
        return DataFailed(error.where, error.what, "; or ".join(filter(None, (error.next_step, instead))))
    if look.place.host or message.get("end") != "room":
        return error
    fix = f"free some space: launcher data rm; or choose another disk for {look.place.root}: export XDG_CACHE_HOME"
    return DataFailed(error.where, error.what, fix)


def _instead(source: DataSource, places: Sequence[_Place]) -> str:
    """Return how to use a whole copy without asking the store; "" if there is none, or its file's name is unknown."""
    held = [(place, copy) for place in places if (copy := place.whole())]
    kind, _, rest = source.url.partition("://")
    if not held or (kind == "hf" and held[0][1].files == 1):
        return ""
    place, copy = held[0]
    path = unquote(urlsplit(source.url).path) if kind.startswith("http") else rest
    single = posixpath.basename(path) if copy.files == 1 else ""  # "" too for a folder, whose URL ends with /
    at = f"{place.host}:{copy_path(place.root, copy.name, single)}"
    return f"give the whole copy of {place.node} instead of the URL: {at}"
