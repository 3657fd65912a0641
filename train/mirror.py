"""--mirror URL: a copy of the checkpoints in a store such as S3, by fsspec. --resume URL reads it back.

URL/latest.json names the newest complete checkpoint, URL/NAME/, and its files. It is written last, when all of them are
there, so it never points to a part. A name is used once: a checkpoint in the store is never written to again.

Training does not wait. A thread uploads from hard links, one checkpoint at a time; those saved in the meantime are left
out, except the last one of the run. A store that fails costs a warning.
"""

from __future__ import annotations

import importlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from train.checkpoint import BEST, Loaded, State, link
from train.errors import TrainError
from train.files import amount

T = TypeVar("T")
LATEST, FORMAT = "latest.json", 1
NAME = re.compile(r"epoch-\d+-step-\d+-[0-9a-f]{8}")
FILE = re.compile(r"[\w.-]*\w")  # of a checkpoint
TRIES, PAUSE = 5, 1.0  # of a request; seconds before the second try, twice as many before each further one
PIECE = 8 << 20  # bytes per request
START = 60.0  # seconds that the first request may take
SAID = 30.0  # seconds between two lines while only the upload is left; a silent run may count as hanging
UPLOADING, RESUMED = "uploading.tmp", "resumed.tmp"  # in the checkpoint folder
LIMIT = 300.0  # seconds after which a request that fails is not tried again
OPTIONS = {  # of stores; the time to read counts while a piece is sent, and s3fs tries again itself
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 120, "retries": {"max_attempts": 0}}}
}
OBJECTS = {"s3", "gs", "gcs", "abfs", "az"}  # kinds of stores without folders
FINAL = (PermissionError, FileNotFoundError, ImportError, ValueError, TypeError)  # further tries would fail too


@dataclass(frozen=True)
class Entry:
    """A checkpoint in the store. files: bytes by name. about: its run and position, as in a checkpoint."""

    name: str
    files: Mapping[str, int]
    about: State = field(default_factory=dict)
    previous: str = ""  # the complete checkpoint before this one, which is kept too

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


class Place:
    """A folder of a store."""

    def __init__(self, url: str) -> None:
        """Raises TrainError if a package for this kind of store is missing, or there is none."""
        self.url = url.rstrip("/")
        kind = url.partition(":")[0]
        options: Any = OPTIONS.get(kind, {})
        try:  # torch needs fsspec too; but it takes a tenth of a second
            fsspec = importlib.import_module("fsspec")
            self.files, self.root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True, **options
            )
        except (ImportError, ValueError) as error:
            fix = "; in a job: `image: {packages: [NAME]}`" if isinstance(error, ImportError) else ""
            raise TrainError(f"{self.url}: {error}{fix}") from error
        if loop := getattr(self.files, "loop", None):  # else: a traceback for each request that nobody waits for
            loop.set_exception_handler(self._say_on_the_side)

    def _say_on_the_side(self, _: object, context: Mapping[str, Any]) -> None:
        """Print an error that no call raises: of a request beside one that failed, or of closing a connection."""
        error = context.get("exception")
        print(f"train: warning: {self.url}: {_text(error) if error else context['message']}", flush=True)

    def latest(self) -> Entry | None:
        """Return what latest.json names. Raises the errors of the store, ValueError if it is not ours."""
        try:
            found = json.loads(self.files.cat_file(f"{self.root}/{LATEST}"))
        except FileNotFoundError:
            return None
        try:
            entry = Entry(found["name"], found["files"], found["about"], found["previous"])
            folders = [entry.name, *([] if entry.previous == "" else [entry.previous])]
            names = all(map(NAME.fullmatch, folders)) and all(map(FILE.fullmatch, entry.files))
            counts = [*entry.files.values(), *Loaded(entry.about, Path()).age]
            texts = entry.about.get("run", ""), entry.about.get("best", "")
            known = found["format"] == FORMAT and names and all(map(_is_count, counts))
            known = known and all(isinstance(text, str) for text in texts)
        except (KeyError, TypeError, AttributeError):
            known = False
        if not known:
            raise ValueError(f"{LATEST} is not of this trainer (format {FORMAT})")
        return entry

    def make(self, folder: str) -> None:
        """Make a folder, where there are any: in an object store this would make a bucket."""
        if not OBJECTS.intersection(_kinds(self.files)):
            self.files.makedirs(folder, exist_ok=True)

    def publish(self, entry: Entry) -> None:
        """Write latest.json: as one request, or on file systems under another name."""
        content = json.dumps({"format": FORMAT, **vars(entry)}).encode()
        path = f"{self.root}/{LATEST}"
        if "file" in _kinds(self.files):
            self.files.pipe_file(f"{path}.tmp", content)
            self.files.mv(f"{path}.tmp", path)
        else:
            self.files.pipe_file(path, content)

    def send(self, source: Path, target: str, sent: Callable[[int], None]) -> None:
        """Upload a file in pieces."""
        path = f"{self.root}/{target}"
        self.make(path.rpartition("/")[0])
        with source.open("rb") as content, self.files.open(path, "wb", block_size=PIECE) as there:
            while piece := content.read(1 << 20):
                there.write(piece)
                sent(len(piece))
        if (size := self.files.size(path)) != source.stat().st_size:
            raise OSError(f"{path} has {size} bytes, not {source.stat().st_size}")

    def receive(self, name: str, size: int, target: Path) -> None:
        """Download a file in pieces, each tried again. Raises the errors of the store."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for start in range(0, size, PIECE):
                end = min(start + PIECE, size)
                piece = retried(partial(self.files.cat_file, f"{self.root}/{name}", start=start, end=end))
                if len(piece) != end - start:
                    raise OSError(f"{name} is shorter than {LATEST} says")
                file.write(piece)


class Mirror:
    """The checkpoints of this rank on their way to the store."""

    def __init__(self, url: str, folder: Path, first: bool, say: Callable[[str], None]) -> None:
        """folder: of the checkpoints. first: rank 0, which writes latest.json. say: prints a line."""
        self._place, self._folder, self._first, self._say = Place(url), folder, first, say
        self._thread = ThreadPoolExecutor(1, "mirror")
        self._upload: Future[None] | None = None
        self._left: tuple[str, State, list[Path]] | None = None  # the newest checkpoint, if it was left out
        self._seen: Entry | None = None  # latest.json as this run knows it
        self._checked = self._ended = False
        self._sent = self._size = 0
        self.together: Callable[[Any], list[Any]] = lambda value: [value]  # gathers a value of all ranks

    def begin(self, fresh: bool) -> None:
        """Check on rank 0 that the store can be written. fresh: this run has resumed nothing.

        Raises:
            TrainError: it refuses, or has the checkpoints of another run, which are not to be replaced.
        """
        shutil.rmtree(self._folder / UPLOADING, ignore_errors=True)
        url = self._place.url
        self._fresh = fresh
        try:
            found = self._thread.submit(self._check).result(START)
        except Exception as error:
            if _is_final(error):
                raise TrainError(f"--mirror {url}: {_text(error)}; check the URL and its credentials") from error
            self._say(f"train: warning: --mirror {url} does not respond ({_text(error)}); training goes on")
            return
        if found:
            raise TrainError(f"--mirror {url} {found}")

    def _check(self) -> str:
        """Find what the store has; write a file and remove it. Return why it must not be written to, or ""."""
        files, mark = self._place.files, f"{self._place.root}/write-test"
        self._seen = self._place.latest()
        if self._seen and self._fresh:
            run = f" of run {self._seen.about['run']}" if self._seen.about.get("run") else ""
            return f"has checkpoints{run}; to continue them, --resume {self._place.url}; else use another URL"
        self._place.make(self._place.root)
        files.pipe_file(mark, b"")
        with suppress(Exception):
            files.rm_file(mark)
        self._checked = True
        return ""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being uploaded."""
        return self._upload is not None and not self._upload.done()

    def offer(self, paths: Iterable[Path], state: State, name: str, busy: bool, best: Path | None = None) -> None:
        """Start uploading a checkpoint that is complete on disk, or leave it out while one is uploaded.

        name, busy: the same on all ranks. best: best.pt, on the rank that uploads it; it may be the checkpoint itself.
        """
        self._left = None
        about: State = {key: state[key] for key in ("run", "generation", "progress") if key in state}
        about["progress"] = {key: about["progress"][key] for key in ("epoch", "step", "validated")}
        if best and best.exists():
            paths = [*paths]
            same = next((path for path in paths if path.samefile(best)), None)
            about["best"] = (same or best).name
            paths += [] if same else [best]
        if self._ended:
            return
        if busy:
            self._left = (name, about, list(paths))
            self._warn(f"{self._place.url} is slower than the checkpoints: {name} is not uploaded")
        else:
            self._start(name, about, paths)

    def _start(self, name: str, about: State, paths: Iterable[Path]) -> None:
        linked, problem = dict[Path, str](), ""
        try:
            for path in paths:  # their names are given to later checkpoints
                target = self._folder / UPLOADING / f"{name}-{path.name}"
                target.parent.mkdir(parents=True, exist_ok=True)
                link(path, target)
                linked[target] = path.name
            self._sent, self._size = 0, sum(path.stat().st_size for path in linked)
        except OSError as error:
            problem = _text(error)
        self._upload = self._thread.submit(self._work, name, about, linked, problem)

    def _work(self, name: str, about: State, files: Mapping[Path, str], problem: str) -> None:
        """Upload this rank's files; then, on rank 0, write latest.json if all ranks have done so."""
        sizes: dict[str, int] = {}
        try:
            for path, file in files.items() if not problem else ():
                retried(partial(self._place.send, path, f"{name}/{file}", self._count))
                sizes[file] = path.stat().st_size
        except Exception as error:  # noqa: BLE001 - stores raise any error
            problem = _text(error)
        finally:
            for path in files:
                path.unlink(missing_ok=True)
        everyone = self.together((sizes, problem))
        problem = next((f"{text} (rank {rank})" for rank, (_, text) in enumerate(everyone) if text), "")
        if self._first and not problem:
            complete = {file: size for part, _ in everyone for file, size in part.items()}
            try:
                retried(partial(self._publish, name, about, complete))
            except Exception as error:  # noqa: BLE001
                problem = _text(error)
        if problem:
            self._warn(f"{name} is not in {self._place.url}: {problem}; the next checkpoint will be tried")
        self.together(None)  # rank 0 removes old checkpoints by what it finds: files of the next one must not be there

    def _publish(self, name: str, about: State, files: Mapping[str, int]) -> None:
        place = self._place
        problem = "" if self._checked else self._check()
        now = place.latest()
        if not problem and now and now.name not in (name, self._seen.name if self._seen else ""):
            problem = f"another run has written {now.name} there"
        if problem:
            self._ended = True
            self._warn(f"--mirror {place.url} ends: {problem}")
            return
        entry = Entry(name, files, about, self._seen.name if self._seen else "")
        place.publish(entry)
        self._seen = entry
        self._say(f"train: {place.url} has {name} ({amount(entry.bytes)})")
        for each in place.files.ls(place.root, detail=False):
            old = each.rstrip("/").rpartition("/")[2]
            if NAME.fullmatch(old) and old not in (name, entry.previous):
                place.files.rm(each, recursive=True)

    def _count(self, size: int) -> None:
        self._sent += size

    def _warn(self, text: str) -> None:
        self._say(f"train: warning: {text}")

    def end(self) -> None:
        """Upload the last checkpoint too and wait for it, telling how far it is. The run has ended."""
        if self._left:
            name, about, paths = self._left
            self._left = None
            self._start(name, about, paths)
        while self._upload and not wait([self._upload], SAID).done:
            self._say(f"train: uploading to {self._place.url}: {amount(self._sent)} of {amount(self._size)}")
        self._thread.shutdown(wait=False)
        with suppress(OSError):  # other ranks may need it still
            (self._folder / UPLOADING).rmdir()


def new_name(state: State) -> str:
    """Return a name for a checkpoint that no other one has."""
    progress = state["progress"]
    return f"epoch-{progress['epoch']:04d}-step-{progress['step']}-{secrets.token_hex(4)}"


def is_url(text: str) -> bool:
    """Whether an option names a store and no path."""
    return "://" in text


def find(place: Place, needed: str) -> Entry:
    """Return the newest complete checkpoint of a store. Raises TrainError. needed: a file that this kind of one has."""
    try:
        found = retried(place.latest)
    except Exception as error:
        raise TrainError(f"--resume {place.url}: {_text(error)}; check the URL and its credentials") from error
    if found is None:
        raise TrainError(f"--resume {place.url}: no checkpoint there: it has no {LATEST}")
    if needed not in found.files:
        raise TrainError(f"--resume {place.url}: the checkpoint there is of another --parallel (fsdp and hsdp: shards)")
    return found


def download(place: Place, entry: Entry, names: Iterable[str], folder: Path) -> None:
    """Write files of a checkpoint into a folder. Raises TrainError."""
    try:
        for name in names:
            place.receive(f"{entry.name}/{name}", entry.files[name], folder / name)
    except Exception as error:
        raise TrainError(f"--resume {place.url}: {entry.name}: {_text(error)}") from error


def download_best(place: Place, name: str, folder: Path) -> bool:
    """Write best.pt of the checkpoint `name` into a folder; return False if the store has none. Raises TrainError."""
    try:
        entry = retried(place.latest)
    except Exception as error:
        raise TrainError(f"{place.url}: {_text(error)}") from error
    best = entry.about.get("best", "") if entry and entry.name == name else ""
    if not (entry and best in entry.files):
        return False
    fresh = folder / RESUMED
    try:
        download(place, entry, [best], fresh)
        (fresh / best).replace(folder / BEST)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def retried(what: Callable[[], T]) -> T:
    """Call a function, again if it fails. Raises the error of the last time."""
    begun = time.monotonic()
    for pause in (PAUSE * 2**number for number in range(TRIES - 1)):
        try:
            return what()
        except Exception as error:
            if _is_final(error) or time.monotonic() - begun > LIMIT:
                raise
        time.sleep(pause)
    return what()


def _is_final(error: Exception) -> bool:
    return isinstance(error, FINAL) or "Credentials" in type(error).__name__


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _kinds(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _text(error: BaseException) -> str:
    """Return one line about an error."""
    return f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
