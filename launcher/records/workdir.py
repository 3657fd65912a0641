"""The working directories of a run's nodes, `workdir/NODE` in the output folder: the code and what the program wrote.

The program may change everything in them, also into links: nothing below is read or removed through a link.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from launcher.model.container import WORKDIR
from launcher.node.files import Files
from launcher.node.listing import HELPERS
from launcher.node.opened import BELOW

_TIMEOUT = 600.0  # seconds; a program may have unpacked a data set there
_ENTRY = re.compile(rb"([fl]) (\d{1,18}) (-?\d{1,12}(?:\.\d{1,12})?) (.+)", re.DOTALL)
_CACHE = re.compile(r"((?:.*/)?)__pycache__/([^/]+)\.[^/.]+(?:\.opt-\d)?\.pyc")
# $1: the output folder, $2: the node. Prints `<type> <bytes> <epoch seconds> <path>`, each terminated by a NUL.
_LIST = f"""{BELOW}{HELPERS}
at "$1"; enter find {WORKDIR}/$2 2>/dev/null || exit 0
if has_printf; then find . -type f -printf 'f %s %T@ %P\\0' -o -type l -printf 'l %s %T@ %P\\0'
else find . '(' -type f -o -type l ')' -exec sh -c "$by_stat" sh {{}} +
fi
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
enter find "$node" && {{ find . -depth -mindepth 1 -type d -empty -delete 2>/dev/null ||
  find . -depth -mindepth 1 -type d -exec rmdir {{}} + 2>/dev/null; }} # BusyBox may lack -delete
enter find {WORKDIR} && rmdir -- "./${{node#*/}}" && cd -P .. && rmdir -- ./{WORKDIR}
exit 0
"""


@dataclass(frozen=True)
class SentFile:
    """A file of the sent code. kind: "f" for a regular file, "l" for a link. mtime: that on the nodes."""

    kind: str
    size: int
    mtime: float


SENT = 946_684_800  # 2000-01-01 UTC, the time of all sent files: a constant, and one that ZIP can store (since 1980)
_SENT_BEFORE = 0  # by earlier launchers

SentCode = Mapping[str, SentFile]  # by the path in the working directory


def sent_files(archive: bytes) -> SentCode:
    """Return the files of a snapshot's archive. Raises tarfile.TarError, OSError, EOFError if it is damaged."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        return {member.name: SentFile("l" if member.issym() else "f", member.size, member.mtime) for member in tar}


def contents(archive: bytes, names: Collection[str]) -> Mapping[str, str]:
    """Return what identifies the content of these files of a snapshot's archive, those that it has; as `sent_files`."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar:
            if member.name in names:
                file = tar.extractfile(member) if member.isreg() else None
                found[member.name] = hashlib.sha256(file.read()).hexdigest() if file else f"-> {member.linkname}"
    return found


def list_sent(files: Files, output: str, node: str, code: SentCode) -> list[str]:
    """Return the paths of the files in a node's working directory that the program did not change, and Python's caches
    of the code. Paths are relative to it.

    code: the run's (Record.sent_code). Raises NodeUnfit, also if there are too many files to list; NodeUnreachable.
    """
    done = files.run(_LIST, output, node, doing=f"list {output}/{WORKDIR}/{node}", timeout=_TIMEOUT)
    sent = []
    for entry in done.out.split(b"\0"):
        if match := _ENTRY.fullmatch(entry):  # else it is other output of a login shell
            path = match[4].decode("utf-8", "surrogateescape")
            if is_sent(code, path, int(match[2]), float(match[3]), match[1].decode()):
                sent.append(path)
    return sent


def in_workdir(path: str, nodes: Collection[str]) -> tuple[str, str]:
    """Return the node in whose working directory a file of an output folder is, and its path there; else "", ""."""
    top, _, rest = path.partition("/")
    node, _, inside = rest.partition("/")
    return (node, inside) if top == WORKDIR and inside and node in nodes else ("", "")


def is_sent(code: SentCode | None, path: str, size: int, mtime: float, kind: str = "f") -> bool:
    """Return whether a file in a working directory is one of the sent code, unchanged, or Python's cache of one.

    code: None if it is not known here; then all files of its time count. An empty file of the time 0 is the mount point
    of a file (node.output_folder).
    """
    if code is None:
        return mtime in (SENT, _SENT_BEFORE) or _CACHE.fullmatch(path) is not None
    known = code.get(path)
    if known is not None:
        return (kind, mtime) == (known.kind, known.mtime) and (kind == "l" or size == known.size)
    cache = _CACHE.fullmatch(path)
    return (cache is not None and f"{cache[1]}{cache[2]}.py" in code) or (kind, size, mtime) == ("f", 0, 0)


def remove_sent(files: Files, output: str, node: str, sent: Iterable[str]) -> None:
    """Remove these files from a node's working directory, then empty folders; everything else stays.

    Raises NodeUnfit, NodeUnreachable.
    """
    lines = []
    names = sorted(path.rpartition("/")[::2] for path in sent if "\n" not in path)
    for folder, group in groupby(names, key=lambda pair: pair[0]):
        lines += [f"/{folder}", *(name for _, name in group)]
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    doing = f"remove the code from {output}/{WORKDIR}/{node}"
    files.run(_REMOVE, output, node, doing=doing, stdin=text, timeout=_TIMEOUT)
