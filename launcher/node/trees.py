"""Folders of files: listed with their links, copied on a node, or read from one node and written to many at once."""

from __future__ import annotations

import math
import os
import queue
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from launcher.errors import LauncherError, NodesFailed, NodeUnfit
from launcher.model.facts import CLOCK_SLACK, MountedAs
from launcher.node.facts import free_inodes, free_space, mounted_as
from launcher.node.files import Files, Span
from launcher.node.listing import HELPERS
from launcher.node.machine import Done, Machine, shell
from launcher.node.opened import BELOW, relative
from launcher.node.parallel import Future, in_background

_TIMEOUT = 3600.0  # seconds; checkpoints may be large, and a disk slow
_QUEUED = 16  # pieces of at most 64 KiB that wait for a slow node; reading pauses while its queue is full

_NOW = 'echo "@@time $(date +%s.%N)"'
# $1: a folder, which need not exist. Links are listed, not followed. Prints the node's time first.
_LIST = f"""{HELPERS}
{_NOW}
[ -e "$1" ] || exit 0
cd -- "$1" || exit
if has_printf; then find . -type f -printf 'f %s %T@ %P\\0\\0' -o -type l -printf 'l %s %T@ %P\\0%l\\0'
else TARGETS=yes find . '(' -type f -o -type l ')' -exec sh -c "$by_stat" sh {{}} +
fi
"""
_TIME = re.compile(rb"@@time (\d{1,12})(\.\d{1,9})?")  # busybox prints no fraction, or "%N"
_TICK = 0.01  # seconds; the resolution of a file's time is that of the kernel's ticks
_LISTED = re.compile(rb"([fl]) (\d{1,18}) (-?\d{1,12}(?:\.\d{1,12})?) ([^\0]+)\0([^\0]*)\0")
# $1: a folder, which need not exist
_ROOM = """
folder=$1
while [ -n "$folder" ] && [ ! -e "$folder" ]; do folder=${folder%/*}; done
df -Pk -- "${folder:-/}"
echo @@
df -Pi -- "${folder:-/}"
echo @@
point=$(df -Pk -- "${folder:-/}" | sed -n '$s/^.*% *//p')
grep -F " $point " /proc/mounts | tail -n 1
true
"""
# $1: an output folder, $2: the source in it with a slash, "" for itself, $3: the target, $4: a unique name. stdin:
# paths, one a line. Nodes that share the target may copy the same file at the same time: each renames its own copy.
_COPY = f"""{BELOW}
umask 022
part=$3/.$4.part
at "$1"
copy() {{
  if [ -L "$root/$1" ]; then
    name=${{1##*/}} && folder=${{1%"$name"}} && (enter find "${{folder%/}}" && cp -Pp -- "./$name" "$part")
  else below "$1" cp -p /proc/self/fd/0 "$part"
  fi
}}
while IFS= read -r path; do
  target=$3/$path
  mkdir -p -- "${{target%/*}}" && copy "$2$path" && mv -fT -- "$part" "$target" || {{ rm -f -- "$part"; exit 1; }}
done
"""
# $1: the target, $2: a unique name. stdin, for each file: a line `f|l <bytes> <epoch seconds>`, a line with its path,
# the content (of a link: its target). Prints the number of files: a lost connection looks like the end of the input.
_RECEIVE = """
umask 022
part=./.$2.part count=0
mkdir -p -- "$1" && cd -- "$1" || exit
while read -r kind size mtime && IFS= read -r path; do
  mkdir -p -- "$(dirname -- "./$path")" && head -c "$size" >"$part" && [ "$(wc -c <"$part")" -eq "$size" ] || break
  if [ "$kind" = l ]; then
    target=$(cat -- "$part") && ln -sfT -- "$target" "$part" || break
  else
    touch -d "@$mtime" -- "$part" || break
  fi
  mv -fT -- "$part" "./$path" || break
  count=$((count + 1))
done
rm -f -- "$part"
echo "@@received $count"
"""


@dataclass(frozen=True)
class Entry:
    """A regular file or a symbolic link. path: relative, with forward slashes. link: the target of a link."""

    path: str
    size: int
    mtime: float
    link: str = ""

    def same(self, other: Entry, shift: float = 0.0, error: float = 0.001) -> bool:
        """Whether the other one is a copy of it, which keeps the time (`fetch` to a microsecond), moved by `shift`."""
        same_content = (self.size, self.link) == (other.size, other.link)
        return same_content and (bool(self.link) or abs(self.mtime + shift - other.mtime) < error)


@dataclass(frozen=True)
class NodeClock:
    """A node's clock. offset: its time minus this machine's, in seconds, give or take `error`. read: when it was read,
    by this machine's clock; inf: it was not.
    """

    offset: float = 0.0
    error: float = 0.0
    read: float = math.inf

    def shift(self, other: NodeClock) -> float:
        """Return what is added to a file's time on a node with the other clock; 0.0 if the clocks hardly differ, as a
        copy is recognised by its time.
        """
        found = other.offset - self.offset
        return found if abs(found) > CLOCK_SLACK else 0.0


@dataclass(frozen=True)
class Place:
    """A folder on a machine, which files are written to. shift: seconds that are added to their times."""

    machine: Machine
    folder: str
    shift: float = 0.0


def entries(files: Files, root: str) -> tuple[Sequence[Entry], NodeClock]:
    """Return the files and links below `root`, which need not exist, and the node's clock.

    Raises NodeUnfit, NodeUnreachable.
    """

    def only_removed(done: Done) -> bool:  # by a program that still runs
        lines = done.err.splitlines()
        return bool(lines) and all(line.endswith(b"No such file or directory") for line in lines)

    done = files.run(_LIST, root, doing=f"list {root}", timeout=_TIMEOUT, accept=only_removed)
    found = []
    for kind, size, mtime, path, link in _LISTED.findall(done.out):
        target = link.decode("utf-8", "surrogateescape") if kind == b"l" else ""
        found.append(Entry(path.decode("utf-8", "surrogateescape"), int(size), float(mtime), target))
    return found, _clock(done)


def clock(machine: Machine) -> NodeClock:
    """Read the clock of a node. Raises NodeUnreachable."""
    return _clock(machine.script(_NOW))


def _clock(done: Done) -> NodeClock:
    read, there = (done.started + done.first) / 2, _TIME.search(done.out)
    if there is None:
        return NodeClock()
    whole, fraction = there.groups(b"")
    error = (done.first - done.started) / 2 + (_TICK if fraction else 1.0)
    return NodeClock(float(whole + fraction) - read, error, read)


@dataclass(frozen=True)
class Room:
    """What a folder's file system has for new files. free: bytes; inodes; -1 if unknown."""

    free: int
    inodes: int
    mounted: MountedAs


def room(files: Files, folder: str) -> Room:
    """Return the room for a new folder. Raises NodeUnfit, NodeUnreachable."""
    printed = files.run(_ROOM, folder, doing=f"read the free space for {folder}").out
    space, inodes, mount = (printed.decode("utf-8", "replace").split("@@\n") + [""] * 2)[:3]
    return Room(free_space(space), free_inodes(inodes), mounted_as(mount))


def copy(files: Files, source: str, target: str, paths: Sequence[str], *, below: str) -> None:
    """Copy files from one folder of a node to another, with their times.

    below: the output folder that contains the source, or is it. Raises NodeUnfit, NodeUnreachable.
    """
    stdin = "".join(f"{path}\n" for path in paths).encode()
    doing = f"copy files of {source} to {target}"
    inner = "" if source == below else f"{relative(source, below)}/"
    arguments = (below, inner, target, secrets.token_hex(8))
    files.run(_COPY, *arguments, doing=doing, stdin=stdin, timeout=_TIMEOUT)


def fan_out(node: str, source: Files, folder: str, wanted: Mapping[Entry, Sequence[Place]], *, below: str) -> None:
    """Read files of a node once, and write each of them to all of its places at the same time.

    below: the output folder that contains `folder`. No file is held in memory: the slowest place determines the speed.
    The first failure ends all. Raises NodesFailed.
    """
    counts: dict[Place, int] = {}
    for places in wanted.values():
        for place in places:
            counts[place] = counts.get(place, 0) + 1
    writers = {place: _Writer(place, count) for place, count in counts.items()}
    failures: list[LauncherError] = []
    try:
        for entry, piece in _stream(node, source, folder, list(wanted), below):
            for place in wanted[entry]:
                writers[place].put(_head(entry, place) if piece is None else piece)
        for writer in writers.values():
            writer.put(b"")
    except BaseException as error:
        for writer in writers.values():
            writer.give_up()
        if not isinstance(error, LauncherError):
            raise
        failures.append(error)
    found = [writer.failure() for writer in writers.values()]
    failures += [error for error in found if error is not None and error not in failures]
    if failures:
        raise NodesFailed(failures)


def _head(entry: Entry, place: Place) -> bytes:
    """Return what `_RECEIVE` reads of a file before its content; of a link all."""
    content = os.fsencode(entry.link)
    kind, size = ("l", len(content)) if entry.link else ("f", entry.size)
    return f"{kind} {size} {entry.mtime + place.shift:.9f}\n{entry.path}\n".encode() + content


def _stream(
    node: str, source: Files, folder: str, wanted: Sequence[Entry], below: str
) -> Iterator[tuple[Entry, bytes | None]]:
    """Yield each file with the pieces of its content, before them None for its head."""
    regular = [Span(f"{folder}/{entry.path}", 0, entry.size) for entry in wanted if not entry.link]
    with closing(source.read_spans(regular, below=below)) as pieces:
        for entry in wanted:
            yield entry, None
            left = 0 if entry.link else entry.size
            while left:
                span, piece = next(pieces, (None, b""))
                if span is None or span.path != f"{folder}/{entry.path}":
                    what = f"{folder}/{entry.path} could not be read, or was changed while it was read"
                    raise NodeUnfit(node, what, "check that no other run uses it, then try again")
                left -= len(piece)
                yield entry, piece


class _Writer:
    """Writes a stream of files to a place, on a thread."""

    def __init__(self, place: Place, count: int) -> None:
        self._place = place
        self._count = count
        self._queue: queue.Queue[bytes] = queue.Queue(_QUEUED)
        self._given_up = False
        self._done: Future[None] = in_background(self._write)

    def put(self, piece: bytes) -> None:
        """Queue a piece; b"" ends the stream. Raises the error of the thread."""
        while True:
            if self._done.wait(0):
                self._done()
            try:
                return self._queue.put(piece, timeout=0.5)
            except queue.Full:
                continue

    def give_up(self) -> None:
        """End the stream, as another place or the source has failed."""
        self._given_up = True

    def failure(self) -> LauncherError | None:
        """Wait for the thread; return its error."""
        try:
            self._done()
        except LauncherError as error:
            return error
        return None

    def _next(self) -> bytes:
        while not self._given_up:
            try:
                return self._queue.get(timeout=0.5)
            except queue.Empty:
                continue
        return b""

    def _write(self) -> None:
        out, err, deadline = b"", b"", time.monotonic() + _TIMEOUT
        folder = self._place.folder
        with closing(self._place.machine.open(shell(_RECEIVE, folder, secrets.token_hex(8)))) as stream:
            found: tuple[bytes, bytes] | None = (b"", b"")
            while found is not None and (piece := self._next()):
                stream.send(piece)
                found = stream.receive(0.0)  # None: it could not write a file
                out, err = out + (found or (b"",))[0], err + (found or (b"", b""))[1]
            stream.end_input()
            while time.monotonic() < deadline and (found := stream.receive(1.0)) is not None:
                out, err = out + found[0], err + found[1]
        if f"@@received {self._count}\n".encode() not in out and (err or not self._given_up):
            reason = err.decode(errors="replace").strip()[-300:] or "only part of the files arrived"
            fix = "check the free disk space on the node; to free some: launcher clean"
            raise NodeUnfit(self._place.machine.node, f"could not write to {folder}: {reason}", fix)
