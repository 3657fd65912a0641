"""Checkpoint files: written atomically in the background, verified by a digest. `train.store` says which ranks do.

A file is either complete or absent: temporary name, fsync, rename. It contains the SHA-256 of its content; if it is
damaged, `previous.pt` is used instead. Every file is a plain `torch.load` file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train.data.batch import Event
from train.errors import TrainError
from train.files import check_regular

CPU = torch.device("cpu")
State = dict[str, Any]
FORMAT = 1
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)  # link(2), by file system


def run_id() -> str:
    """Return the name of the launcher's run; "" without the launcher."""
    return os.environ.get("LAUNCHER_RUN", "")


def restarted() -> bool:
    """Whether torchrun has started this process again, with the same options (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def digest(state: Any) -> str:
    """Return the SHA-256 of the type, shape and bytes of every tensor, and of every other value, in order."""
    total = hashlib.sha256()
    for path, value in _leaves(state, ""):
        total.update(path.encode())
        if isinstance(value, Tensor):
            whole: Tensor = getattr(
                value, "full_tensor", lambda value=value: value
            )()  # gathers the shards of a DTensor
            flat = whole.detach().cpu().contiguous().reshape(-1)
            total.update(f"{value.dtype}{tuple(value.shape)}".encode())
            total.update(flat.view(torch.uint8).numpy().data)
        else:
            total.update(repr(value).encode())
    return total.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of the parameters, without buffers, which may differ between ranks."""
    return digest(dict(model.named_parameters()))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


def map_tensors(value: Any, change: Any) -> Any:
    """Return `value` with `change` applied to every tensor in its dictionaries, lists and tuples."""
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def snapshot(state: State) -> State:
    """Return a copy on the CPU, unaffected by later steps."""
    copied: State = map_tensors(state, lambda tensor: tensor.detach().to("cpu", copy=True))
    return copied


class HostCopy:
    """Host memory for one copy of a state, made while the device continues.

    From a GPU it is copied to pinned memory on a separate stream. Later work on the device waits for the copy, this
    process does not. The memory is reused for the next copy, so that there is at most one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, list[Tensor]()
        self._done: Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub

    @torch.no_grad()
    def take(self, state: Any) -> Any:
        """Return the state with tensors in host memory, complete after `wait`; overwrites the previous copy."""
        if self._stream is None:
            return self._copied(state)
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            copied = self._copied(state)
        self._done = self._stream.record_event()
        self._done.wait(now)  # the next step changes the weights
        return copied

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()

    def _copied(self, state: Any) -> Any:
        before, self._memory = self._memory, []

        def copy(tensor: Tensor) -> Tensor:
            index = len(self._memory)
            kept = before[index] if index < len(before) else None
            if kept is None or (kept.dtype, kept.shape, kept.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
                kept = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
            self._memory.append(kept)
            return kept.copy_(tensor, non_blocking=self._stream is not None)

        return map_tensors(state, copy)


class Background:
    """Runs tasks one after another on a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[None] | None = None

    def start(self, task: Callable[[], None]) -> None:
        self._last = self._pool.submit(task)

    def wait(self) -> None:
        """Wait for the last task. Raises its exception."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait for the last task and stop the thread."""
        self.wait()
        self._pool.shutdown()


class Saver:
    """Writes the checkpoints of a folder on a thread, so that training waits only for the copy in memory.

    A save starts after the previous one is written, so that there is at most one copy.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        device: torch.device = CPU,
        written: Callable[[Path, State], None] = lambda *_: None,
    ) -> None:
        """`device`: the device of the state. `written`: called on the thread with a checkpoint that is on disk."""
        self._folder, self._keep, self._copy, self._written = folder, keep, HostCopy(device), written
        self._background = Background()

    def save(self, state: State, best: bool = False, epoch: int | None = None) -> None:
        """Start writing last.pt (the old one becomes previous.pt), best.pt if `best`, and the epoch's file if `keep`.

        Raises:
            OSError: the previous checkpoint could not be written.
        """
        self.wait()
        copied = self._copy.take(state)
        self._background.start(lambda: self._write(copied, best, epoch))

    def wait(self) -> None:
        """Wait until the checkpoint is on disk.

        Raises:
            OSError: the checkpoint could not be written.
        """
        self._background.wait()

    def close(self) -> None:
        """Wait for the last save and stop the thread."""
        self._background.close()

    def _write(self, state: State, best: bool, epoch: int | None) -> None:
        self._copy.wait()
        self._folder.mkdir(parents=True, exist_ok=True)
        last, fresh = self._folder / LAST, self._folder / f"{LAST}.tmp"
        _dump(fresh, state)
        if best:  # first, so that last.pt never names a best score whose file is not there
            link(fresh, self._folder / BEST)
        if last.exists():
            last.replace(self._folder / PREVIOUS)
        fresh.replace(last)
        if self._keep and epoch is not None:
            link(last, self._folder / f"epoch-{epoch:04d}.pt")
            for old in sorted(self._folder.glob("epoch-*.pt"))[: -self._keep]:
                old.unlink()
        _sync_folder(self._folder)
        self._written(last, state)


def check_replaceable(folder: Path) -> None:
    """Raise TrainError if a checkpoint of this folder could not be replaced because its name is a folder's."""
    for name in (LAST, PREVIOUS, BEST):
        if (path := folder / name).is_dir():
            raise TrainError(f"{path} is a folder, not a checkpoint; remove it, or use another --output")


def link(file: Path, other: Path) -> None:
    """Make `other` the same file, which takes no space; a copy where the file system has no hard links.

    No file is changed after it has got its name.
    """
    fresh = other.with_name(f"{other.name}.tmp")
    fresh.unlink(missing_ok=True)
    try:
        fresh.hardlink_to(file)
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        shutil.copyfile(file, fresh)
        with fresh.open("rb") as copied:
            os.fsync(copied.fileno())
    fresh.replace(other)


def best_score(state: State) -> float:
    """Return the best top-1 of the run that saved the state, percent; -1 if there was no validation."""
    return float((state.get("progress") or state["dual_batch"])["best"])


def take_best(path: Path, folder: Path, best: float) -> bool:
    """Return whether `folder` has the best.pt of `best` percent that belongs to the checkpoint at `path`.

    If it lies beside `path` in another folder, it is linked to `folder`.
    """
    own, beside = folder / BEST, path.parent / BEST
    if path.parent == folder and path.stem in ("last", "previous"):
        return own.exists()
    try:
        if best_score(read(beside)) != best:
            return False
    except TrainError:
        return False
    if beside.parent != folder:
        folder.mkdir(parents=True, exist_ok=True)
        link(beside, own)
    return True


def write(path: Path, state: State) -> None:
    """Write one file atomically, with its digest."""
    fresh = path.with_name(path.name + ".tmp")
    _dump(fresh, state)
    fresh.replace(path)


def _dump(path: Path, state: State) -> None:
    try:
        with path.open("wb") as file:
            torch.save({**state, "sha256": digest(state)}, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        path.unlink(missing_ok=True)  # a full disk needs its space
        why = error if isinstance(error, OSError) else error.__context__  # torch raises a RuntimeError after an OSError
        if not isinstance(why, OSError):
            raise
        raise OSError(why.errno, why.strerror, str(path)) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint and its path; `damaged`: the newer file that could not be used."""

    state: State
    path: Path
    damaged: str | None = None
    origin: str = ""  # the rank that read it, "" for rank 0

    @property
    def own(self) -> bool:
        """Whether this run wrote it. Without the launcher, no run has a name."""
        return str(self.state.get("run", "")) == run_id()

    @property
    def age(self) -> tuple[int, ...]:
        """Sort key of checkpoints. Any checkpoint of a newer generation supersedes those of older ones.

        Generations are counted per run: with `--resume RUN`, those of the earlier run sort before all of this run.
        """
        position = self.state.get("progress", {})
        steps = (position.get(name, 0) for name in ("epoch", "step", "validated"))
        return (int(self.own), self.state.get("generation", 0), *steps)

    def load_model(self, arch: str, classes: Sequence[str], model: nn.Module, position: str = "progress") -> None:
        """Check that the checkpoint is of the same model and load its weights, unless they are sharded.

        `position`: the key of the run's position, which differs in a dual-batch run.

        Raises:
            TrainError: the checkpoint is of another model, or of another kind of run.
        """
        state, dual = self.state, position == "dual_batch"
        if position not in state:
            which, method = ("not from", "another --parallel") if dual else ("from", "--parallel dual_batch")
            raise TrainError(f"{self.path} is {which} a dual-batch run; use another --output, or {method}")
        for what, here in (("arch", arch), ("classes", list(classes))):
            if state[what] != here:
                raise TrainError(
                    f"{self.path} has {what} {short(state[what])}, this run {short(here)}; "
                    f"use another --output, or the same model and data"
                )
        if not dual and "optimizer" not in state:
            raise TrainError(f"{self.path} contains weights only; to start from them, use --pretrained")
        try:
            if "model" in state:  # a sharded checkpoint is read later, when the model is sharded
                model.load_state_dict(state["model"])
        except RuntimeError as error:
            why = str(error).splitlines()[-1].strip()
            raise TrainError(f"{self.path} does not match the model: {why}") from error


def short(value: Any) -> str:
    """Shorten a value for a message."""
    return f"({len(value)}) {', '.join(value[:3])}, ..." if isinstance(value, list) else str(value)


def read(path: Path) -> State:
    """Read a checkpoint file into CPU memory.

    Raises:
        TrainError: the file is missing, damaged, or not a checkpoint of this trainer.
    """
    try:
        check_regular(path)
    except FileNotFoundError:
        raise TrainError(f"{path}: no such checkpoint") from None
    except OSError as error:
        raise TrainError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged zip or pickle can raise any exception
        raise TrainError(f"{path}: damaged ({type(error).__name__}: {_first_line(error)})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise TrainError(f"{path}: not a checkpoint of this trainer (format {FORMAT})")
    if state.pop("sha256", None) != digest(state):
        raise TrainError(f"{path}: damaged (its content does not match its SHA-256)")
    return state


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def select(
    resume: str, folder: Path, names: tuple[str, ...], read_one: Callable[[Path], State] = read
) -> Loaded | None:
    """Return the checkpoint that `--resume` selects, None to start from scratch. `names`: last and previous file.

    A run that the launcher or torchrun restarts goes on from its own checkpoint, wherever it began.

    Raises:
        TrainError: the given checkpoint or all in the folder are unusable, or `none` would overwrite existing ones.
    """
    candidates = [path for name in names if (path := folder / name).exists()]
    if resume == "auto" or run_id() or restarted():
        newest, failures = _newest(candidates, read_one)
        if resume == "auto" and failures and not newest:
            raise TrainError(f"no usable checkpoint: {'; '.join(failures)}; start over with another --output")
        if resume == "auto" or (newest and _of_this_run(newest, resume)):
            return newest
    if resume == "none":
        if candidates:
            raise TrainError(
                f"--resume none: {candidates[0]} would be overwritten; use another --output, or remove the file"
            )
        return None
    path = Path(resume)
    if path.is_dir() and path.suffix != Path(names[0]).suffix:
        path = path / names[0]
    return Loaded(read_one(path), path)


def names_before(found: Loaded, resume: str, names: tuple[str, str]) -> tuple[str, ...]:
    """Return which of the run's own checkpoints `names`, last and previous, may be used instead of `found`."""
    if "://" in found.origin:  # of a store
        return names
    own = resume == "auto" or run_id() or restarted() or "://" in resume
    return names[1:] if own and found.path.name == names[0] else ()


def _of_this_run(found: Loaded, resume: str) -> bool:
    """Whether this run, which was restarted, wrote the checkpoint, not an earlier one with the same folder.

    Without the launcher no run has a name, but an earlier one began with another --resume.
    """
    return found.own if run_id() else bool(found.state["config"].get("resume") == resume)


def _newest(candidates: Sequence[Path], read_one: Callable[[Path], State]) -> tuple[Loaded | None, list[str]]:
    """Return the first that can be read, and why those before it cannot."""
    failures: list[str] = []
    for path in candidates:
        try:
            return Loaded(read_one(path), path, failures[0] if failures else None), failures
        except TrainError as error:
            failures.append(str(error))
    return None, failures
