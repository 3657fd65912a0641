"""The working directories of a run's nodes, `workdir/NODE` in the output folder: the code and what the program wrote.

The program may change everything in them, also into links: nothing below is read or removed through a link.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from launcher.model.container import WORKDIR
from launcher.model.sizes import size_text
from launcher.node.files import FileEntry, Files
from launcher.node.opened import BELOW

_TIMEOUT = 600.0  # seconds; a program may have unpacked a data set there
_NAMED = 3  # files that a message names, the largest
_ENTRY = re.compile(rb"([fl]) (\d{1,18}) (-?\d{1,12}(?:\.\d{1,12})?) (.+)", re.DOTALL)
_CACHE = re.compile(r"((?:.*/)?)__pycache__/([^/]+)\.[^/.]+(?:\.opt-\d)?\.pyc")
# $1: the output folder. Prints `<type> <bytes> <epoch seconds> <path>`, each terminated by a NUL.
_LIST = f"""{BELOW}
at "$1"; enter find {WORKDIR} 2>/dev/null || exit 0
find . -type f -printf 'f %s %T@ %P\\0' -o -type l -printf 'l %s %T@ %P\\0'
exit 0 # a folder may be unreadable, or removed meanwhile
"""
# $1: the output folder, $2: the node. stdin: for each folder a line with a slash and its path, then the names of files
# in it, one per line. Each folder is entered (node/opened.py), so that no link leads elsewhere, whatever a program of
# the run still does.
_REMOVE = f"""{BELOW}
at "$1"
node={WORKDIR}/$2 inside=''
set --
while IFS= read -r line; do
  case $line in
    /*)
      [ $# -eq 0 ] || rm -f -- "$@"
      set --
      line=$node$line
      if enter find "${{line%/}}"; then inside=yes; else inside=''; fi ;;
    *)
      [ -z "$inside" ] || set -- "$@" "./$line"
      [ $# -lt 500 ] || {{ rm -f -- "$@"; set --; }} ;;
  esac
done
[ $# -eq 0 ] || rm -f -- "$@"
enter find "$node" && find . -depth -mindepth 1 -type d -empty -delete
enter find {WORKDIR} && rmdir -- "./${{node#*/}}" && cd -P .. && rmdir -- ./{WORKDIR}
exit 0
"""


@dataclass(frozen=True)
class SentFile:
    """A file of the sent code. kind: "f" for a regular file, "l" for a link. mtime: that on the nodes."""

    kind: str
    size: int
    mtime: float


SentCode = Mapping[str, SentFile]  # by the path in the working directory


@dataclass(frozen=True)
class Workdir:
    """A node's working directory. Paths are relative to it, and were chosen by the program.

    written: regular files that the program wrote or changed. sent: files of the code that it did not change, and
    Python's caches of the code.
    """

    node: str
    written: Sequence[FileEntry] = ()
    sent: Sequence[str] = ()


@dataclass(frozen=True)
class Written:
    """What the program wrote to its working directories. size: bytes.

    names: of the files, the largest first; a program may write files of the same name on each node. unlisted: why a
    node's files are not included. run: its ID, unless it is the latest run.
    """

    files: int
    size: int
    names: tuple[str, ...]
    unlisted: str = ""
    run: str = ""

    def __str__(self) -> str:
        if self.unlisted:
            return f"what the program wrote to its working directory could not be listed: {self.unlisted}"
        count, them = ("1 file", "it") if self.files == 1 else (f"{self.files:,} files", "them")
        names = ", ".join([*self.names[:_NAMED], *(["..."] if len(self.names) > _NAMED else [])])
        wrote = f"the program wrote {count} to its working directory ({size_text(self.size)}): {names}"
        return f"{wrote}; launcher fetch {self.run and f'{self.run} '}--checkpoints brings {them}"


def sent_files(archive: bytes) -> SentCode:
    """Return the files of a snapshot's archive. Raises tarfile.TarError, OSError, EOFError if it is damaged."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        return {member.name: SentFile("l" if member.issym() else "f", member.size, member.mtime) for member in tar}


def workdirs(
    files: Files, output: str, nodes: Iterable[str], code: SentCode, timeout: float | None = _TIMEOUT
) -> list[Workdir]:
    """List the working directories of these nodes of a run in one of its output folders, with one request.

    code: the run's (Record.sent_code). timeout: seconds; None: that of any command. Raises NodeUnfit, also if there
    are too many files to list; NodeUnreachable.
    """
    done = files.run(_LIST, output, doing=f"list {output}/{WORKDIR}", timeout=timeout)
    written: dict[str, list[FileEntry]] = {node: [] for node in nodes}
    sent: dict[str, list[str]] = {node: [] for node in written}
    for entry in done.out.split(b"\0"):
        match = _ENTRY.fullmatch(entry)
        if match is None:  # other output of a login shell
            continue
        kind, size, mtime = match[1].decode(), int(match[2]), float(match[3])
        node, _, path = match[4].decode("utf-8", "surrogateescape").partition("/")
        if node not in written or not path:
            continue
        if is_sent(code, path, size, mtime, kind):
            sent[node].append(path)
        elif kind == "f":
            written[node].append(FileEntry(path, size, mtime))
    return [Workdir(node, written[node], sent[node]) for node in written]


def is_sent(code: SentCode, path: str, size: int, mtime: float, kind: str = "f") -> bool:
    """Return whether a file in a working directory is one of the sent code, unchanged, or Python's cache of one.

    An empty file of the time 0 is the mount point of a file (node.output_folder).
    """
    known = code.get(path)
    if known is not None:
        return (kind, mtime) == (known.kind, known.mtime) and (kind == "l" or size == known.size)
    cache = _CACHE.fullmatch(path)
    return (cache is not None and f"{cache[1]}{cache[2]}.py" in code) or (kind, size, mtime) == ("f", 0, 0)


def remove_sent(files: Files, output: str, found: Workdir) -> None:
    """Remove the unchanged code from a working directory, then empty folders; everything else stays.

    Raises NodeUnfit, NodeUnreachable.
    """
    lines = []
    names = sorted(path.rpartition("/")[::2] for path in found.sent if "\n" not in path)
    for folder, group in groupby(names, key=lambda pair: pair[0]):
        lines += [f"/{folder}", *(name for _, name in group)]
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    doing = f"remove the code from {output}/{WORKDIR}/{found.node}"
    files.run(_REMOVE, output, found.node, doing=doing, stdin=text, timeout=_TIMEOUT)


def summary(found: Iterable[Workdir]) -> Written:
    files = sorted((file for each in found for file in each.written), key=lambda file: file.size, reverse=True)
    names = dict.fromkeys(file.path for file in files if file.path.isprintable())
    return Written(len(files), sum(file.size for file in files), tuple(names)[: _NAMED + 1])
