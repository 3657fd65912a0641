"""A node's files, by short POSIX shell scripts: over ssh and on this machine alike, whether sshd has sftp or not.

A script answers for many files at once, so the end of a run costs a node two round trips and not three a file.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launcher.errors import LauncherError, NodeUnfit, NodeUnreachable
from launcher.node.follower import Follower
from launcher.node.machine import CommandStream, Done, Machine, shell

_COPY_TIMEOUT = 3600.0  # checkpoints may be large, and a disk slow
_LONGEST_LINE = 1 << 16  # of these scripts' own
_ENDS = "\0\n"  # of an argument, of a line
_FEW = 40  # spans for which the shell starts its three programs each

_PREFACE = "LC_ALL=C; export LC_ALL; umask 077; "  # messages are looked at below
_MAKE_DIR = 'mkdir -p -- "$1"'
# $3: how many bytes must have come. A connection that is lost looks like the end of them.
_RECEIVE = """
mkdir -p -- "${2%/*}" && cat >"$1" && [ "$(wc -c <"$1")" -eq "$3" ] && mv -f -- "$1" "$2" && echo "$4" || rm -f -- "$1"
"""
_SCAN = 'find "$1/" -type f -printf "%s %T@ %P\\0"'
# Nodes that share the folder copy at the same time: the first one to be done gives the copy its name.
_COPY = """
part=$2.$(uname -n).$$
{ mkdir -p -- "$part" && cp -RPp -- "$1/." "$part"; } || { rm -rf -- "$part"; exit 1; }
mv -T -- "$part" "$2" || { rm -rf -- "$part"; [ -n "$(ls -A -- "$2")" ]; }
"""
_READ = 'tail -c "+$2" -- "$1" | head -c "$3"'
# $1: a mark. stdin: lines `<offset> <length> <path>`. Prints the mark, then for each how many bytes follow, the bytes
# and the mark again. It reads all lines first: who asks sends them without reading an answer.
_SPANS = r"""
asked=$(cat)
echo "$1"
printf '%s\n' "$asked" | while read -r offset length path; do
  size=$(wc -c 2>/dev/null <"$path") || size=0
  left=$((size - offset))
  [ $left -le "$length" ] || left=$length
  [ $left -gt 0 ] || left=0
  echo $left
  [ $left -eq 0 ] || tail -c "+$((offset + 1))" -- "$path" 2>/dev/null | head -c $left
  echo "$1"
done
"""

_ENTRY = re.compile(rb"(\d{1,18}) (-?\d{1,12}(?:\.\d{1,12})?) (.+)", re.DOTALL)


@dataclass(frozen=True)
class FileEntry:
    """A regular file below a folder; `path` is relative to it, with forward slashes."""

    path: str
    size: int
    mtime: float


@dataclass(frozen=True)
class Span:
    """Bytes of a file: at most `length` from `offset` on. `path` is absolute."""

    path: str
    offset: int
    length: int


class Files:
    """The node's files, as the ssh user. Paths are absolute. Safe for several threads.

    home: where runs have their output folders; "" is the user's home.
    """

    def __init__(self, machine: Machine, home: str = "") -> None:
        self._machine = machine
        self.home = home

    def make_dir(self, path: str) -> None:
        """Make a folder and its parents, mode 0700 for what is new. Raises NodeUnfit, NodeUnreachable."""
        self.run(_MAKE_DIR, _absolute(path), doing=f"make the folder {path}")

    def write(self, path: str, pieces: Iterable[bytes], size: int) -> None:
        """All `size` bytes or nothing: a temporary file beside it takes its name, mode 0600; its folder is made.

        Raises NodeUnfit, NodeUnreachable.
        """
        mark = secrets.token_hex(16)
        temporary = f"{_absolute(path)}.{secrets.token_hex(4)}.part"
        said, words, deadline = b"", b"", time.monotonic() + _COPY_TIMEOUT
        with contextlib.closing(self._machine.open(_sh(_RECEIVE, temporary, path, str(size), mark))) as stream:
            for piece in pieces:
                stream.send(piece)
            stream.end_input()
            while time.monotonic() < deadline and (found := stream.receive(1.0)) is not None:
                said, words = said + found[0], words + found[1]
        if mark.encode() not in said:
            reason = words.decode(errors="replace").strip()[-300:] or f"not all of its {size:,} bytes came"
            raise NodeUnfit(self._machine.node, f"could not write {path}: {reason}", "is there room? launcher clean")

    def scan(self, root: str, skip: Callable[[LauncherError], None] | None = None) -> Sequence[FileEntry]:
        """Every regular file below `root`, links not followed; empty where `root` is missing.

        skip: called for each folder in it that may not be read; without it such a folder raises NodeUnfit. Raises
        NodeUnreachable.
        """
        done = self.run(_SCAN, _absolute(root), doing=f"list {root}", accept=lambda done: bool(_complaints(done.err)))
        for line in _unread(done.err):
            if skip is None or not done.out:
                raise self._failed(f"list {root}", done)
            skip(NodeUnfit(self._machine.node, f"in {root}: {line}"))
        return parse_scan(done.out)

    def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes:
        """At most `limit` bytes from `offset`; b"" at the end of the file.

        Raises FileNotFoundError; NodeUnfit for a file that may not be read, NodeUnreachable.
        """
        arguments = (_absolute(path), str(offset + 1), str(limit))
        done = self.run(_READ, *arguments, doing=f"read {path}")
        if _unread(done.err):
            raise self._failed(f"read {path}", done)
        if _complaints(done.err):
            raise FileNotFoundError(path)
        return done.out

    def read_spans(self, spans: Sequence[Span]) -> Generator[tuple[Span, bytes], None, None]:
        """The bytes of all spans, in their order, in pieces; one request for all of them. Close it to end it early.

        A span ends early where its file has become shorter, is missing, or may not be read. Raises NodeUnreachable,
        NodeUnfit when a file was cut off while it was read.
        """
        mark, script = secrets.token_hex(16), _SPANS if len(spans) <= _FEW else _many_spans()
        asked = "".join(f"{span.offset} {span.length} {_absolute(span.path, never=_ENDS)}\n" for span in spans)
        if not asked:
            return
        with contextlib.closing(self._machine.open(_sh(script, mark))) as stream:
            stream.send(asked.encode("utf-8", "surrogateescape"))
            stream.end_input()
            output = _Output(stream, self._machine)
            while output.line() != mark.encode():
                pass  # a login shell's own output
            for span in spans:
                for piece in output.exactly(output.number(span.length)):
                    yield span, piece
                if output.line() != mark.encode():
                    raise NodeUnfit(self._machine.node, f"{span.path} was cut off while it was read", "try again")

    def follow(self, path: str, offset: int, lines: Mapping[str, int]) -> Follower:
        """See Follower. Raises NodeUnreachable."""
        return Follower(self._machine, path, offset, lines)

    def copy_tree(self, source: str, target: str) -> None:
        """Copy a folder with all in it to `target`; one that has files already stays as it is.

        Raises NodeUnfit, also where there is no room for it; NodeUnreachable.
        """
        self.run(_COPY, _absolute(source), _absolute(target), doing=f"copy {source}", timeout=_COPY_TIMEOUT)

    def run(
        self,
        script: str,
        *arguments: str,
        doing: str,
        stdin: bytes = b"",
        timeout: float | None = None,
        accept: Callable[[Done], bool] = lambda _: False,
    ) -> Done:
        """A script of ours; what comes from a user goes into `arguments`. Raises NodeUnfit, NodeUnreachable.

        doing: completes "could not ...". accept: whether an exit code other than 0 is no failure.
        """
        done = self._machine.run(_sh(script, *arguments), stdin, timeout)
        if done.code == 0 or accept(done):
            return done
        raise self._failed(doing, done)

    def _failed(self, doing: str, done: Done) -> NodeUnfit:
        words = done.complaint
        fix = ""
        if "No space left" in words or "Disk quota" in words:
            fix = "make room there: launcher clean"
        elif "Permission denied" in words or "Operation not permitted" in words:
            fix = f"user {self._machine.user} must own it and have access to it: look with ls -l there"
        return NodeUnfit(self._machine.node, f"could not {doing}: {words or f'exit code {done.code}'}", fix)


class _Output:
    """What a script prints, read as lines and as exact numbers of bytes."""

    def __init__(self, stream: CommandStream, machine: Machine) -> None:
        self._stream = stream
        self._node = machine.node
        self._silence = machine.limits.seconds  # in which a node that sends files may send nothing
        self._rest = b""

    def line(self) -> bytes:
        while b"\n" not in self._rest:
            if len(self._rest) > _LONGEST_LINE:
                raise self._unexpected(self._rest)
            self._rest += self._more()
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def number(self, most: int) -> int:
        line = self.line()
        if not re.fullmatch(rb"\d{1,18}", line) or int(line) > most:
            raise self._unexpected(line)
        return int(line)

    def exactly(self, size: int) -> Iterator[bytes]:
        while size:
            self._rest = self._rest or self._more()
            piece, self._rest = self._rest[:size], self._rest[size:]
            size -= len(piece)
            yield piece

    def _unexpected(self, words: bytes) -> NodeUnfit:
        return NodeUnfit(self._node, f"unexpected answer of its shell: {words[:60]!r}", "look at its login shell")

    def _more(self) -> bytes:
        deadline = time.monotonic() + self._silence
        while (left := deadline - time.monotonic()) > 0:
            found = self._stream.receive(left)
            if found is None:
                raise NodeUnfit(self._node, "its shell ended while files were read", "look at its login shell")
            if found[0]:
                return found[0]
        what = f"sent nothing of its files for {self._silence:g} s"
        raise NodeUnreachable(self._node, what, "is its disk overloaded?")


def parse_scan(listing: bytes) -> list[FileEntry]:
    """From entries `<bytes> <epoch seconds> <path>`, each ended by a NUL; other text is ignored."""
    found = []
    for entry in listing.split(b"\0"):
        match = _ENTRY.fullmatch(entry)
        if match:
            size, mtime, path = match.groups()
            found.append(FileEntry(path.decode("utf-8", "surrogateescape"), int(size), float(mtime)))
    return found


@cache
def _many_spans() -> str:
    """_SPANS by one Python, where the node has one: a cluster's output folder may have the files of 10,000 nodes."""
    program = Path(__file__).with_name("print_spans.py").read_text(encoding="utf-8")
    return f'python3 -ISc "" 2>/dev/null && exec python3 -ISc {shlex.quote(program)} "$1"\n{_SPANS}'


def _sh(script: str, *arguments: str) -> list[str]:
    return shell(_PREFACE + script, *arguments)


def _absolute(path: str, never: str = "\0") -> str:
    if not path.startswith("/") or set(path) & set(never):
        raise ValueError(f"{path!r} is no absolute path, or has a character that cannot be sent")
    return path


def _complaints(err: bytes) -> list[str]:
    """What find and tail wrote to stderr; other lines are a login shell's own."""
    lines = err.decode(errors="replace").splitlines()
    return [line[:300] for line in lines if line.startswith(("find:", "tail:"))]


def _unread(err: bytes) -> list[str]:
    """Complaints of what is there and cannot be read; a file may go away meanwhile."""
    return [line for line in _complaints(err) if "No such file or directory" not in line]
