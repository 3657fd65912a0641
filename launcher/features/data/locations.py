"""Locations of data: its source, and the folder of copies on each node."""

from __future__ import annotations

import json
import os
import posixpath
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from launcher.errors import DataFailed, NodeUnfit, UsageError
from launcher.faults import disk
from launcher.job.problems import BadValueError
from launcher.job.scalars import LONGEST_URL, is_url, require_data_url
from launcher.job.settings import Settings
from launcher.model import checked
from launcher.model.checked import OUTPUT_ROOT
from launcher.naming import first_of
from launcher.node.engine import Engine
from launcher.node.parallel import run_all

FOLDER = f"{OUTPUT_ROOT}/data"
SHORTEST = 4  # characters of a hash that select data
REMOVE_TIMEOUT = 600.0
LIST_TIMEOUT = 120.0
# As `stat -f -c %T` prints them. fuseblk: any FUSE, including sshfs
_NETWORK = re.compile(r"nfs.*|cifs|smb.*|afs|ceph|lustre|gpfs|panfs|fhgfs|v9fs|gfs.*|ocfs2|fuseblk")
# $1: data_root, or empty; $2: `make` to create the folder. @@ marks our lines: a login shell may print others.
_ROOT = f"""
umask 077
if [ -n "$1" ]; then root="$1/launcher-$(id -u)"; else root="$HOME/{FOLDER}"; fi
[ "$2" != make ] || mkdir -p -- "$root" || exit
[ -d "$root" ] || {{ printf '@@root none %s\\n' "$root"; exit; }}
[ -O "$root" ] && [ "$(stat -c %u -- "$root")" = "$(id -u)" ] || {{ echo "$root belongs to another user" >&2; exit 1; }}
printf '@@root %s %s\\n' "$(stat -f -c %T -- "$root" | tr -d ' ')" "$(cd -P -- "$root" && pwd)"
"""
# Nodes that see each other's marks share the folder. $1: the folder, $2: prefix of all marks, $3: suffix of this node
_MARK = 'touch -- "$1/$2-$3"'
_MARKS = 'cd -- "$1" && for mark in "$2"-*; do printf "@@mark %s\\n" "$mark"; done'
_UNMARK = 'rm -f -- "$1/$2"-*'
# $1: the source. Prints its real path, and whether it is a folder
_SOURCE = """
case $1 in "~/"*) path=$HOME/${1#"~/"} ;; *) path=$1 ;; esac
[ -e "$path" ] || { echo "$1: no such file or folder" >&2; exit 1; }
[ -d "$path" ] && kind=folder || kind=file
real=$(readlink -f -- "$path" && echo .) # the dot keeps newlines at the end of the name
printf '@@source %s %s@@\\n' "$kind" "${real%??}"
"""
_LIST = """
cd -- "$1" 2>/dev/null || exit 0
for about in copies/*/about.json partial/*/about.json; do
  [ -f "$about" ] || continue
  folder=${about%/about.json}
  used=$(stat -c %Y -- "$folder/used" 2>/dev/null || stat -c %Y -- "$folder")
  [ -s "$folder/journal" ] || [ "${folder%%/*}" = copies ] && some=1 || some=0
  printf '@@data %s %s %s %s ' "$folder" "$used" "$(du -sk -- "$folder/files" | cut -f1)" "$some"
  head -c 131072 -- "$about" | tr -d '\\n'
  echo
done
"""
# $1: the folder of the copies, $2: `copies/...` or `partial/...`. Stopped containers count: they may be started again.
_REMOVE = """
cd -- "$1" || exit
users() { ! command -v docker >/dev/null || docker ps -a --filter "volume=$1" --format '{{.Names}}'; }
for single in "$2"/files/* "$2"/files/.[!.]*; do [ ! -f "$single" ] || break; done
found=$(users "$1/$2/files" && if [ -f "$single" ]; then users "$1/$single"; fi) || exit
[ -z "$found" ] || { echo "is mounted in container" $found >&2; exit 3; }
gone=".removed-$$"
mv -- "$2" "$gone" 2>/dev/null || [ ! -e "$2" ] || exit
[ ! -e "$gone" ] || { find "$gone" -type d ! -perm -700 -exec chmod u+rwx {} \\; ; rm -rf -- "$gone"; }
"""


@dataclass(frozen=True)
class DataSource:
    """The source of data. host: "" for this machine; path: absolute, or starting with ~ on another machine.

    name: in the job's `data`; "" without a job. url: from which it is downloaded; host and path are then those of the
    copy, whose name is `content`, of the URL's state `state`.
    """

    host: str
    path: str
    name: str = ""
    url: str = ""
    state: str = ""
    content: str = ""

    @property
    def label(self) -> str:
        return self.url or f"{self.host or os.uname().nodename}:{self.path}"


@dataclass(frozen=True)
class Copy:
    """A copy on a node, whole or partial."""

    node: str
    folder: str  # copies/<content> or partial/<signature>
    source: str
    size: int  # bytes of the data; 0 if not known yet
    files: int
    present: int  # bytes on the disk
    used: int  # seconds since the epoch, on the node's clock
    image: str
    called: str = ""  # its name in the `data` of the job that brought it
    signature: str = ""  # of the state of its source
    empty: bool = False  # nothing of the data has come yet

    @property
    def whole(self) -> bool:
        return self.folder.startswith("copies/")

    @property
    def name(self) -> str:
        return self.folder.partition("/")[2]


def parse_source(text: str, cwd: Path) -> DataSource:
    """`host:/path`, a URL, or a path of this machine. Raises UsageError."""
    if not text:
        raise UsageError("the data's source", "is empty", "give a file or a folder: PATH, HOST:/PATH or a URL")
    if is_url(text):
        try:
            return DataSource("", "", url=require_data_url(text))
        except BadValueError as error:
            raise UsageError("the data's URL", str(error)) from None
    host, colon, path = text.partition(":")
    if colon and host and "/" not in host:
        if not path.startswith(("/", "~/")):
            raise UsageError(text, "expected an absolute path after the host", f"for example {host}:/data/NAME")
        return DataSource(host, path)
    local = Path(os.path.normpath(cwd / Path(text).expanduser()))
    if not local.exists():
        raise UsageError(text, f"no such file or folder: {local}", "for data on another machine: HOST:/PATH")
    return DataSource("", str(local.resolve()))


def source_named(text: str, cwd: Path) -> str:
    """Return the source that a path of this machine stands for, whether it still exists or not; other names as is."""
    if "/" not in text or ":" in text.partition("/")[0]:
        return text
    return DataSource("", str(Path(os.path.normpath(cwd / Path(text).expanduser())).resolve())).label


def root_of(engine: Engine, settings: Settings, *, copies: bool = True, make: bool = True) -> str:
    """Return the folder of this user's copies on a node. copies: require a local disk. make: create it.

    Raises NodeUnfit, NodeUnreachable.
    """
    chosen = settings.data_root_of(engine.host)
    done = engine.files.run(_ROOT, chosen, "make" if make else "", doing="create the data folder", which=disk.DATA)
    found = re.search(r"^@@root (\S+) (/.*)$", done.out.decode(errors="replace"), re.MULTILINE)
    if found is None:
        raise NodeUnfit(engine.node, "could not create the data folder: unexpected output", "check its login shell")
    if copies and not chosen and is_network(found[1]):
        fix = "set a folder on a local disk in your settings file: data_root: /scratch, or data_root: {HOST: /scratch}"
        raise NodeUnfit(engine.node, f"its home folder is on a network file system ({found[1]})", fix)
    return found[2]


def is_network(kind: str) -> bool:
    """kind: type of a file system, as printed by coreutils' stat."""
    return _NETWORK.fullmatch(kind) is not None


def shared(engines: Sequence[Engine], roots: Sequence[str]) -> list[int]:
    """Return for each node the first node with the same folder: itself, unless they share a file system."""
    if len(engines) == 1:
        return [0]
    token = f".same-{secrets.token_hex(8)}"
    numbered = list(enumerate(zip(engines, roots, strict=True)))

    def on_all(script: str, *, doing: str) -> list[str]:
        steps = [
            partial(engine.files.run, script, root, token, str(number), doing=doing, which=disk.DATA)
            for number, (engine, root) in numbered
        ]
        return [done.out.decode(errors="replace") for done in run_all(steps)]

    try:
        on_all(_MARK, doing="mark the data folder")
        seen = on_all(_MARKS, doing="list the data folder")
    finally:
        on_all(_UNMARK, doing="remove marks from the data folder")
    marks = [re.findall(rf"^@@mark {re.escape(token)}-(\d+)$", printed, re.MULTILINE) for printed in seen]
    return [min(map(int, each), default=number) for number, each in enumerate(marks)]


def resolve_source(engine: Engine, path: str) -> tuple[str, bool]:
    """Return its real path on a node, and whether it is a folder. Raises NodeUnfit, NodeUnreachable."""
    done = engine.files.run(_SOURCE, path, doing="find the data")
    found = re.search(r"^@@source (folder|file) (/.*)@@$", done.out.decode(errors="replace"), re.MULTILINE | re.DOTALL)
    if found is None:
        raise NodeUnfit(engine.node, f"could not find {path}: unexpected output", "check its login shell")
    return found[2], found[1] == "folder"


def copies(engine: Engine, root: str) -> list[Copy]:
    """Return this user's copies on a node; skip entries in another format. Raises NodeUnfit, NodeUnreachable."""
    printed = engine.machine.script(_LIST, root, timeout=LIST_TIMEOUT).out.decode(errors="replace")
    form = r"^@@data ((?:copies|partial)/[0-9a-f]{64}) (\d{1,12}) (\d{1,15}) ([01]) (\{.*\})$"
    found = []
    for folder, used, present, some, about in re.findall(form, printed, re.MULTILINE):
        try:
            parsed = json.loads(about)
            found.append(
                Copy(
                    engine.node,
                    folder,
                    str(parsed["source"])[:LONGEST_URL],
                    checked.number(parsed.get("bytes", 0), 1 << 60),
                    checked.number(parsed.get("files", 0), 1 << 40),
                    int(present) << 10,
                    int(used),
                    str(parsed.get("image", ""))[:200],
                    str(parsed.get("name", ""))[:200],
                    str(parsed.get("signature", ""))[:64],
                    empty=some == "0",
                )
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def remove(engine: Engine, root: str, copy: Copy) -> None:
    """Raises DataFailed if a container mounts it; NodeUnfit, NodeUnreachable."""
    done = engine.files.run(
        _REMOVE, root, copy.folder, doing="remove data", timeout=REMOVE_TIMEOUT, accept=lambda done: done.code == 3
    )
    if done.code:
        fix = "to remove the container of a run: launcher down RUN"
        raise DataFailed(engine.node, f"{copy.name[:12]} ({copy.source}) {done.message}", fix)


def copy_path(root: str, content: str, single: str) -> str:
    """Return the path of a copy on its node. single: name of the file if the data is a single file."""
    return posixpath.join(root, "copies", content, "files", single)


def select(found: Mapping[str, Sequence[Copy]], name: str) -> list[Copy]:
    """Return the copies that the name selects. Raises UsageError.

    name: the beginning of the content's hash, the source, the name of its file or folder (with or without the suffix),
    or the name in a job's `data`. The last two must mean one source: `rm` shall not remove other data.
    """
    every = [copy for each in found.values() for copy in each]
    source = _plain(name)
    exactly = [
        copy
        for copy in every
        if _plain(copy.source) == source or (len(name) >= SHORTEST and copy.name.startswith(name))
    ]
    if exactly:
        return exactly
    named = [copy for copy in every if name in _names(copy)]
    chosen = [copy for copy in named if not copy.empty] or named  # of one that never came, another may be meant
    sources = first_of(sorted({copy.source for copy in chosen or every}), 5)
    if not chosen:
        what = f"no such data on these nodes; they have: {sources or 'none'}"
        raise UsageError(name, what, "run: launcher data ls --nodes A,B")
    if len({copy.source for copy in chosen}) > 1:
        raise UsageError(name, f"selects data of several sources: {sources}", "name one of them")
    return chosen


def _plain(source: str) -> str:
    """Return one spelling of a source: `gpu-a:/pets/` is `gpu-a:/pets`, and a space in a URL is %20."""
    return source.replace(" ", "%20") if is_url(source) else source.rstrip("/")


def _names(copy: Copy) -> set[str]:
    path = PurePosixPath(copy.source.partition(":")[2])
    return {copy.called, path.name, path.stem} - {""}
