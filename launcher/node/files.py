"""Files of a node, accessed by short POSIX shell scripts: the same over ssh and on this machine, without sftp.

One script handles many files, so collecting a run takes two round trips per node instead of three per file.
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
_LONGEST_LINE = 1 << 16  # bytes; of lines that these scripts print
_TERMINATORS = "\0\n"  # of an argument, of a line
_FEW_SPANS = 40  # up to this number the shell script is used, which starts three programs for each

_PREFACE = "LC_ALL=C; export LC_ALL; umask 077; "  # messages are parsed below
_MAKE_DIR = 'mkdir -p -- "$1"'
# $3: the expected number of bytes. A lost connection looks like the end of the input.
_RECEIVE = """
mkdir -p -- "${2%/*}" && cat >"$1" && [ "$(wc -c <"$1")" -eq "$3" ] && mv -f -- "$1" "$2" && echo "$4" || rm -f -- "$1"
"""
_SCAN = 'find "$1/" -type f -printf "%s %T@ %P\\0"'
# Nodes that share the folder copy at the same time: the first to finish renames its copy to the target.
_COPY = """
part=$2.$(uname -n).$$
{ mkdir -p -- "$part" && cp -RPp -- "$1/." "$part"; } || { rm -rf -- "$part"; exit 1; }
mv -T -- "$part" "$2" || { rm -rf -- "$part"; [ -n "$(ls -A -- "$2")" ]; }
"""
_READ = 'tail -c "+$2" -- "$1" | head -c "$3"'
# $1: a marker. stdin: lines `<offset> <length> <path>`. Prints the marker, then for each line the number of bytes that
# follow, the bytes and the marker. It reads all lines first, as the sender reads nothing before it has sent all.
_SPANS = r"""
requests=$(cat)
echo "$1"
printf '%s\n' "$requests" | while read -r offset length path; do
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
    """A regular file in a folder; `path` is relative to the folder, with forward slashes."""

    path: str
    size: int
    mtime: float


@dataclass(frozen=True)
class Span:
    """A range of a file: at most `length` bytes from `offset` on. `path` is absolute."""

    path: str
    offset: int
    length: int


class Files:
    """The node's files, accessed as the ssh user. Paths are absolute. Thread-safe.

    home: the folder for the runs' output folders; "" is the user's home.
    """

    def __init__(self, machine: Machine, home: str = "") -> None:
        self._machine = machine
        self.home = home

    def make_dir(self, path: str) -> None:
        """Make a folder and its parents; new ones get mode 0700. Raises NodeUnfit, NodeUnreachable."""
        self.run(_MAKE_DIR, _absolute(path), doing=f"make the folder {path}")

    def write(self, path: str, pieces: Iterable[bytes], size: int) -> None:
        """Write all `size` bytes or nothing: to a temporary file that is then renamed, mode 0600. Make its folder.

        Raises NodeUnfit, NodeUnreachable.
        """
        marker = secrets.token_hex(16)
        temporary = f"{_absolute(path)}.{secrets.token_hex(4)}.part"
        out, err, deadline = b"", b"", time.monotonic() + _COPY_TIMEOUT
        with contextlib.closing(self._machine.open(_sh(_RECEIVE, temporary, path, str(size), marker))) as stream:
            for piece in pieces:
                stream.send(piece)
            stream.end_input()
            while time.monotonic() < deadline and (found := stream.receive(1.0)) is not None:
                out, err = out + found[0], err + found[1]
        if marker.encode() not in out:
            reason = err.decode(errors="replace").strip()[-300:] or f"only part of the {size:,} bytes arrived"
            fix = "check the free disk space on the node; to free some: launcher clean"
            raise NodeUnfit(self._machine.node, f"could not write {path}: {reason}", fix)

    def scan(self, root: str, skip: Callable[[LauncherError], None] | None = None) -> Sequence[FileEntry]:
        """Return every regular file below `root`, without following links; empty if `root` does not exist.

        skip: called for each folder in it that is not readable; without it such a folder raises NodeUnfit. Raises
        NodeUnreachable.
        """
        done = self.run(_SCAN, _absolute(root), doing=f"list {root}", accept=lambda done: bool(_tool_errors(done.err)))
        for line in _unreadable(done.err):
            if skip is None or not done.out:
                raise self._failed(f"list {root}", done)
            skip(NodeUnfit(self._machine.node, f"in {root}: {line}"))
        return parse_scan(done.out)

    def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes:
        """Return at most `limit` bytes from `offset`; b"" at the end of the file.

        Raises FileNotFoundError; NodeUnfit for a file that is not readable; NodeUnreachable.
        """
        arguments = (_absolute(path), str(offset + 1), str(limit))
        done = self.run(_READ, *arguments, doing=f"read {path}")
        if _unreadable(done.err):
            raise self._failed(f"read {path}", done)
        if _tool_errors(done.err):
            raise FileNotFoundError(path)
        return done.out

    def read_spans(self, spans: Sequence[Span]) -> Generator[tuple[Span, bytes], None, None]:
        """Yield the bytes of all spans, in order and in pieces, with one request. Close the generator to stop early.

        A span is short if its file has become shorter, is missing, or is not readable. Raises NodeUnreachable, and
        NodeUnfit if a file was truncated while it was read.
        """
        marker, script = secrets.token_hex(16), _SPANS if len(spans) <= _FEW_SPANS else _many_spans()
        lines = [f"{span.offset} {span.length} {_absolute(span.path, forbidden=_TERMINATORS)}\n" for span in spans]
        if not lines:
            return
        with contextlib.closing(self._machine.open(_sh(script, marker))) as stream:
            stream.send("".join(lines).encode("utf-8", "surrogateescape"))
            stream.end_input()
            output = _Output(stream, self._machine)
            while output.line() != marker.encode():
                pass  # other output of a login shell
            for span in spans:
                for piece in output.exactly(output.number(span.length)):
                    yield span, piece
                if output.line() != marker.encode():
                    raise NodeUnfit(self._machine.node, f"{span.path} was truncated while it was read", "try again")

    def follow(self, path: str, offset: int, lines: Mapping[str, int]) -> Follower:
        """Return a Follower of these files. Raises NodeUnreachable."""
        return Follower(self._machine, path, offset, lines)

    def copy_tree(self, source: str, target: str) -> None:
        """Copy a folder and its contents to `target`; a target that already has files is left unchanged.

        Raises NodeUnfit, also if the disk is full; NodeUnreachable.
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
        """Run a shell script; user input must only be in `arguments`. Raises NodeUnfit, NodeUnreachable.

        doing: completes "could not ...". accept: whether an exit code other than 0 counts as success.
        """
        done = self._machine.run(_sh(script, *arguments), stdin, timeout)
        if done.code == 0 or accept(done):
            return done
        raise self._failed(doing, done)

    def _failed(self, doing: str, done: Done) -> NodeUnfit:
        message = done.message
        fix = ""
        if "No space left" in message or "Disk quota" in message:
            fix = "free disk space on the node: launcher clean"
        elif "Permission denied" in message or "Operation not permitted" in message:
            fix = f"user {self._machine.user} must own it and have access to it; check on the node with: ls -l"
        return NodeUnfit(self._machine.node, f"could not {doing}: {message or f'exit code {done.code}'}", fix)


class _Output:
    """Output of a script, read as lines and as exact numbers of bytes."""

    def __init__(self, stream: CommandStream, machine: Machine) -> None:
        self._stream = stream
        self._node = machine.node
        self._silence = machine.limits.seconds  # without data, after which the node counts as unreachable
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

    def _unexpected(self, output: bytes) -> NodeUnfit:
        what = f"unexpected output of its login shell: {output[:60]!r}"
        return NodeUnfit(self._node, what, "check the login shell's startup files, such as ~/.bashrc")

    def _more(self) -> bytes:
        deadline = time.monotonic() + self._silence
        while (left := deadline - time.monotonic()) > 0:
            found = self._stream.receive(left)
            if found is None:
                fix = "check the login shell's startup files, such as ~/.bashrc"
                raise NodeUnfit(self._node, "its login shell exited while files were read", fix)
            if found[0]:
                return found[0]
        what = f"sent no file data for {self._silence:g} s"
        raise NodeUnreachable(self._node, what, "check whether its disk is overloaded")


def parse_scan(listing: bytes) -> list[FileEntry]:
    """Parse entries `<bytes> <epoch seconds> <path>`, each terminated by a NUL; other text is ignored."""
    found = []
    for entry in listing.split(b"\0"):
        match = _ENTRY.fullmatch(entry)
        if match:
            size, mtime, path = match.groups()
            found.append(FileEntry(path.decode("utf-8", "surrogateescape"), int(size), float(mtime)))
    return found


@cache
def _many_spans() -> str:
    """Return _SPANS as a Python program if the node has Python: a cluster may have the files of 10,000 nodes."""
    program = Path(__file__).with_name("print_spans.py").read_text(encoding="utf-8")
    return f'python3 -ISc "" 2>/dev/null && exec python3 -ISc {shlex.quote(program)} "$1"\n{_SPANS}'


def _sh(script: str, *arguments: str) -> list[str]:
    return shell(_PREFACE + script, *arguments)


def _absolute(path: str, forbidden: str = "\0") -> str:
    if not path.startswith("/") or set(path) & set(forbidden):
        raise ValueError(f"{path!r} is not an absolute path, or has a character that cannot be sent")
    return path


def _tool_errors(err: bytes) -> list[str]:
    """Return the lines that find and tail wrote to stderr; other lines are a login shell's own."""
    lines = err.decode(errors="replace").splitlines()
    return [line[:300] for line in lines if line.startswith(("find:", "tail:"))]


def _unreadable(err: bytes) -> list[str]:
    """Return the errors about existing files that are not readable; files that were removed cause none."""
    return [line for line in _tool_errors(err) if "No such file or directory" not in line]
