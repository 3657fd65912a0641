"""Files of a node, accessed by short POSIX shell scripts: the same over ssh and on this machine, without sftp.

One script handles many files, so collecting a run takes two round trips per node instead of three per file.
What is below an output folder (`below`) is opened as node/opened.py says, also to write or to list it.
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
from launcher.faults import disk
from launcher.node.listing import HELPERS
from launcher.node.machine import CommandStream, Done, Machine, shell
from launcher.node.opened import BELOW, bounded, relative
from launcher.node.tail import Tail

_COPY_TIMEOUT = 3600.0  # checkpoints may be large, and a disk slow
_OPEN_TIMEOUT = 40.0  # seconds to open and read a part of a file
_LONGEST_LINE = 1 << 16  # bytes; of lines that these scripts print
_TERMINATORS = "\0\n"  # of an argument, of a line
_LONGEST_READ = 86400.0  # seconds; ends a script that nobody waits for any more
_FEW_SPANS = 40  # up to this number the shell script is used, which starts three or four programs for each

_PREFACE = "LC_ALL=C; export LC_ALL; umask 077; "  # messages are parsed below
_MAKE_DIR = 'mkdir -p -- "$1"'
# $1: the output folder, $2: a folder in it, "" for none, $3: a file name there, $4: the expected number of bytes, as a
# lost connection looks like the end of the input. Neither the folder nor the new file is reached through a link.
_RECEIVE = f"""{BELOW}
at "$1"; enter make "$2" || exit
part=$3.$5.part
(set -C; cat >"./$part") && [ "$(wc -c <"./$part")" -eq "$4" ] && mv -fT "./$part" "./$3" && echo "$5" ||
  rm -f "./$part"
"""
# $1: the output folder, $2: a folder in it, "" for itself. $3, $4: patterns; of the files whose path matches the first,
# only those whose name matches the second are listed. Prints `<kind> <bytes> <time> <path>`. A working folder cannot be
# exchanged, and find does not follow links. h: a hard link to another user's file (node/opened.py).
_SCAN = f"""{BELOW}{HELPERS}
at "$1"
[ -e "$root/$2" ] || [ -L "$root/$2" ] || {{ ls -d -- "$root/$2" >/dev/null; exit; }}
enter find "$2" || exit
if has_printf; then
  find . -type d -o -path "$3" ! -name "$4" -o \\
    -type f -links +1 ! -user "$(id -u)" -printf "h %s %T@ %P\\0" -o -printf "%y %s %T@ %P\\0"
else
  find . -type d -o -path "$3" ! -name "$4" -o -type f -links +1 ! -user "$(id -u)" \\
    -exec env HARD=h sh -c "$by_stat" sh {{}} + -o -exec sh -c "$by_stat" sh {{}} +
fi
"""
_READ = f"""{BELOW}
slice() {{ tail -c "+$1" | head -c "$2"; }}
at "$1"; below "$2" slice "$3" "$4"
"""
# Prints the number of bytes before the last $3 lines of a file, which may be growing; at most its last $4 bytes count.
_BEFORE_LAST_LINES = f"""{BELOW}
count() {{
  size=$(stat -L -c %s /proc/self/fd/0)
  from=$((size > $2 ? size - $2 : 0))
  last=$(tail -c "+$((from + 1))" | head -c $((size - from)) | tail -n "$1" | wc -c)
  echo " $((size - last))"
}}
at "$1"; below "$2" count "$3" "$4"
"""
_APPEND = f'{BELOW}\nat "$1"; below "$2" append "$3"'
# $1: the output folder, $2: a marker. stdin: lines `<offset> <length> ./<path>/`, as `read` drops spaces at the ends; a
# negative offset counts from the end.
# Prints the marker, then for each line the number of bytes that follow, the bytes and the marker. It reads all lines
# first, as the sender reads nothing before it has sent all.
_SPANS = f"""{BELOW}
print_span() {{
  size=$(stat -L -c %s /proc/self/fd/0)
  from=$(($1 < 0 ? size + $1 : $1))
  from=$((from > 0 ? from : 0))
  left=$((size - from < $2 ? size - from : $2))
  echo $((left > 0 ? left : 0))
  if [ $left -le 0 ]; then return; fi
  if [ $from -eq 0 ]; then head -c $left; else tail -c "+$((from + 1))" | head -c $left; fi
  return 0
}}
requests=$(cat)
at "$1"
echo "$2"
printf '%s\\n' "$requests" | while read -r offset length path; do
  path=${{path#./}}
  below "${{path%/}}" print_span "$offset" "$length" 2>/dev/null || echo 0
  echo "$2"
done
"""

_ENTRY = re.compile(rb"([a-zA-Z?]) (\d{1,18}) (-?\d{1,12}(?:\.\d{1,12})?) (.+)", re.DOTALL)

_IGNORED = {
    b"f": "",
    b"l": "is a link",
    b"p": "is a named pipe",
    b"s": "is a socket",
    b"b": "is a device",
    b"c": "is a device",
    b"h": "is a hard link to another user's file",
}


@dataclass(frozen=True)
class FileEntry:
    """A file in a folder; `path` is relative to the folder, with forward slashes.

    ignored: why it is not read, `is a link`; "" for a regular file.
    """

    path: str
    size: int
    mtime: float
    ignored: str = ""


@dataclass(frozen=True)
class Span:
    """A range of a file: at most `length` bytes from `offset` on; a negative offset counts from the end.

    `path` is absolute.
    """

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

    def write(self, path: str, pieces: Iterable[bytes], size: int, *, below: str) -> None:
        """Write all `size` bytes or nothing: to a temporary file that is then renamed, mode 0600. Make its folder.

        below: the output folder that contains it, and exists. Raises NodeUnfit, also if a folder in it is a link;
        NodeUnreachable.
        """
        marker = secrets.token_hex(16)
        folder, _, name = relative(path, below).rpartition("/")
        script = shell(_PREFACE + _RECEIVE, below, folder, name, str(size), marker)
        out, err, deadline = b"", b"", time.monotonic() + _COPY_TIMEOUT
        with contextlib.closing(self._machine.open(script)) as stream:
            for piece in pieces:
                stream.send(piece)
            stream.end_input()
            while time.monotonic() < deadline and (found := stream.receive(1.0)) is not None:
                out, err = out + found[0], err + found[1]
        if marker.encode() not in out:
            reason = err.decode(errors="replace").strip()[-300:] or f"only part of the {size:,} bytes arrived"
            raise self._error(f"write {path}", reason, disk.OUTPUT)

    def scan(
        self,
        folder: str,
        skip: Callable[[LauncherError], None] | None = None,
        *,
        below: str | None = None,
        few: tuple[str, str] = ("", ""),
        ignored: Callable[[FileEntry], None] | None = None,
    ) -> Sequence[FileEntry]:
        """Return every regular file in `folder`, without following links; empty if it does not exist.

        below: the output folder that contains it; default: itself. few: a folder in it, of which only files with names
        of this pattern are returned, as it may have millions. skip: called for each folder in it that is not readable;
        without it such a folder raises NodeUnfit. ignored: called for each link, FIFO, device, socket, and hard link to
        another user's file. Raises NodeUnreachable; NodeUnfit also if the folder is a link.
        """
        root = below or folder
        inner = relative(folder, root) if folder != root else ""
        arguments = (_absolute(root), inner, f"./{few[0]}/*" if few[0] else "", few[1])
        done = self.run(_SCAN, *arguments, doing=f"list {folder}", accept=lambda done: bool(_tool_errors(done.err)))
        for line in _unreadable(done.err):
            if skip is None or not done.out:
                raise self._failed(f"list {folder}", done)
            skip(NodeUnfit(self._machine.node, f"in {folder}: {line}"))
        found = parse_scan(done.out)
        for entry in found:
            if entry.ignored and ignored is not None:
                ignored(entry)
        return [entry for entry in found if not entry.ignored]

    def read(self, path: str, offset: int = 0, limit: int = 1 << 20, *, below: str) -> bytes:
        """Return at most `limit` bytes from `offset`; b"" at the end of the file.

        below: the output folder that contains it. Raises FileNotFoundError; NodeUnfit for a file that is not readable,
        or is a link or another thing than a regular file; NodeUnreachable.
        """
        return self._opened(_READ, path, below, str(offset + 1), str(limit))

    def before_last_lines(self, path: str, count: int, most: int, *, below: str) -> int:
        """Return the number of bytes before the last `count` lines, of which the last `most` bytes are searched.

        Raises the errors of read().
        """
        found = re.search(rb" (\d{1,18})\s*$", self._opened(_BEFORE_LAST_LINES, path, below, str(count), str(most)))
        return int(found[1]) if found else 0

    def _opened(self, script: str, path: str, below: str, *arguments: str) -> bytes:
        argv = bounded(_OPEN_TIMEOUT, _PREFACE + script, below, relative(path, below), *arguments)
        done = self._machine.run(argv)
        if _unreadable(done.err) or (done.code and not _tool_errors(done.err)):
            raise self._failed(f"read {path}", done)
        if done.code:
            raise FileNotFoundError(path)
        return done.out

    def read_spans(self, spans: Sequence[Span], *, below: str) -> Generator[tuple[Span, bytes], None, None]:
        """Yield the bytes of all spans, in order and in pieces, with one request. Close the generator to stop early.

        below: the output folder that contains all files. A span is short if its file has become shorter, is missing, is
        not readable, or is not a regular file. Raises NodeUnreachable, and NodeUnfit if a file was truncated while it
        was read.
        """
        marker, script = secrets.token_hex(16), _SPANS if len(spans) <= _FEW_SPANS else _many_spans()
        names = [relative(span.path, below, forbidden=_TERMINATORS) for span in spans]
        lines = [f"{span.offset} {span.length} ./{name}/\n" for span, name in zip(spans, names, strict=True)]
        if not lines:
            return
        with contextlib.closing(self._machine.open(bounded(_LONGEST_READ, _PREFACE + script, below, marker))) as stream:
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

    def append(self, path: str, line: str, *, below: str) -> None:
        """Append a line to a file, if it exists and is a regular file. below: the output folder that contains it.

        Raises NodeUnfit if it could not be written, NodeUnreachable.
        """
        argv = bounded(_OPEN_TIMEOUT, _PREFACE + _APPEND, below, relative(path, below), line)
        done = self._machine.run(argv)
        if done.code and b"No such file" not in done.err:
            raise self._failed(f"append to {path}", done)

    def tail(self, path: str, offset: int, lines: Mapping[str, int], *, below: str) -> Tail:
        """Return a Tail of these files. below: the output folder that contains them. Raises NodeUnreachable."""
        return Tail(self._machine, path, offset, lines, below=below)

    def run(
        self,
        script: str,
        *arguments: str,
        doing: str,
        stdin: bytes = b"",
        timeout: float | None = None,
        accept: Callable[[Done], bool] = lambda _: False,
        which: str = disk.OUTPUT,
    ) -> Done:
        """Run a shell script that must succeed, as Machine.script. Raises NodeUnfit, NodeUnreachable.

        doing: completes "could not ...". accept: whether an exit code other than 0 counts as success. which: the disk
        that it writes to.
        """
        done = self._machine.script(_PREFACE + script, *arguments, stdin=stdin, timeout=timeout)
        if done.code == 0 or accept(done):
            return done
        raise self._failed(doing, done, which)

    def _failed(self, doing: str, done: Done, which: str = disk.OUTPUT) -> NodeUnfit:
        return self._error(doing, done.message.removeprefix("below: ") or f"exit code {done.code}", which)

    def _error(self, doing: str, reason: str, which: str) -> NodeUnfit:
        if disk.is_full(reason):
            found = disk.full(which, reason)
            return NodeUnfit(self._machine.node, f"{found.what}: could not {doing}", found.fix)
        fix = ""
        if "Permission denied" in reason or "Operation not permitted" in reason:
            fix = f"user {self._machine.user} must own it and have access to it; check on the node with: ls -l"
        return NodeUnfit(self._machine.node, f"could not {doing}: {reason}", fix)


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
    """Parse entries `<kind> <bytes> <epoch seconds> <path>`, each terminated by a NUL; other text is ignored."""
    found = []
    for entry in listing.split(b"\0"):
        match = _ENTRY.fullmatch(entry)
        if match:
            kind, size, mtime, path = match.groups()
            name = path.decode("utf-8", "surrogateescape")
            found.append(FileEntry(name, int(size), float(mtime), _IGNORED.get(kind, "is not a regular file")))
    return found


@cache
def _many_spans() -> str:
    """Return _SPANS as a Python program if the node has Python: a cluster may have the files of 10,000 nodes."""
    program = Path(__file__).with_name("print_spans.py").read_text(encoding="utf-8")
    return f'python3 -ISc "" 2>/dev/null && exec python3 -ISc {shlex.quote(program)} "$1" "$2"\n{_SPANS}'


def _absolute(path: str, forbidden: str = "\0") -> str:
    if not path.startswith("/") or set(path) & set(forbidden):
        raise ValueError(f"{path!r} is not an absolute path, or has a character that cannot be sent")
    return path


def _tool_errors(err: bytes) -> list[str]:
    """Return the lines that find, ls and `below` wrote to stderr; other lines are a login shell's own."""
    lines = err.decode(errors="replace").splitlines()
    return [line[:300] for line in lines if line.startswith(("below:", "find:", "ls:"))]


def _unreadable(err: bytes) -> list[str]:
    """Return the errors about existing files that are not readable; files that were removed cause none."""
    return [line for line in _tool_errors(err) if "No such file or directory" not in line]
