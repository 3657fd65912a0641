"""A run's output folder on a node. It has a marker file, and is removed only if that names the run.

That of a command (`doctor`, `shell`) has a second one, which tells it from a run's once its container is gone.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.model.checked import OUTPUT_ROOT
from launcher.model.plan import RunId, is_run_id
from launcher.node.files import Files
from launcher.node.opened import BELOW

MARKER = ".launcher-run"  # a file in the folder, with the run's ID
OF_COMMAND = ".launcher-of-"  # and a purpose (labels.PURPOSE): a file in the folder of a command
COMMANDS = {"bench": "doctor", "probe": "doctor", "shell": "shell"}  # by purpose
_TIMEOUT = 600.0  # seconds; a disk or a network may be slow
# $1: the folder, $2: the run, $3: the working directory, $4: the purpose. The marker may exist already, as nodes may
# share the folder.
# The image's entrypoint may run the program as another user, who must see the code.
# cat, unlike the shell, reports why a write failed.
_MAKE = f"""
mkdir -p -- "$1" || exit
[ -s "$1/{MARKER}" ] || printf '%s\\n' "$2" | cat >"$1/{MARKER}" || {{ rm -f -- "$1/{MARKER}"; rmdir -- "$1"; exit 1; }}
[ "$4" = run ] || : >"$1/{OF_COMMAND}$4" || exit
mkdir -p -- "$3" && chmod 755 "$3"
"""
# $1: the working directory; then pairs of a source and a path in this folder, at which the engine will mount it. stdin:
# the code. The engine would create missing mount points as root, which may have no rights here (NFS).
_UNPACK = """
cd -- "$1" || exit
shift
umask 022
tar -xzpof - || exit
while [ $# -ge 2 ]; do
  if [ ! -e "$2" ] && [ ! -L "$2" ]; then
    if [ -d "$1" ]; then mkdir -p -- "$2"; else mkdir -p -- "${2%/*}" && TZ=UTC0 touch -t 197001010000 -- "$2"; fi ||
      exit
  fi
  shift 2
done
"""
# A program may have made its output folder, the marker or subfolders inaccessible (chmod 000); their owner can undo it.
# The marker is removed last, so that an interrupted removal can be repeated. Nodes that share the folder remove it at
# the same time: once it does not exist any more, errors of find do not matter.
_REMOVE = f"""{BELOW}
refuse() {{ echo "$1" >&2; exit 1; }}
unless_gone() {{ [ -e "$folder" ] && refuse "$1"; exit 0; }}
folder=$1 marker="$1/{MARKER}" home=${{3:-$HOME}}
case $home in /*) ;; *) refuse "HOME is '$home'; expected an absolute path" ;; esac
[ "$folder" = "${{home%/}}/{OUTPUT_ROOT}/$2" ] || refuse "it is not below ${{home%/}}/{OUTPUT_ROOT}"
[ ! -L "$folder" ] || refuse "it is a symbolic link"
[ -O "$folder" ] || unless_gone "it belongs to another user"
chmod u+rwx "$folder" 2>/dev/null
rmdir -- "$folder" 2>/dev/null && exit
[ -r "$marker" ] || [ -L "$marker" ] || chmod u+r "$marker" 2>/dev/null
at "$folder"
[ "$(below {MARKER} head -c 100 2>/dev/null)" = "$2" ] ||
  unless_gone "it has no file {MARKER} of this run"
find "$folder" -type d ! -perm -700 -exec chmod u+rwx {{}} \\; 2>/dev/null
find "$folder" -mindepth 1 -maxdepth 1 ! -name {MARKER} -exec rm -rf -- {{}} + && rm -rf -- "$folder" ||
  [ ! -e "$folder" ]
"""


def make(files: Files, path: str, run: RunId, workdir: str, purpose: str = "run") -> None:
    """Make the folder (new folders get mode 0700), the marker in it, and a working directory (0755).

    purpose: as in labels.PURPOSE. Raises NodeUnfit, NodeUnreachable.
    """
    files.run(_MAKE, path, run, workdir, purpose, doing=f"make the folder {path}")


def unpack(files: Files, workdir: str, code: bytes, mounts: Iterable[tuple[str, str]] = ()) -> None:
    """Unpack the code (a snapshot's archive) into a working directory, as the ssh user, with its modes and times.

    mounts: sources on the node and paths relative to the working directory, at which an engine will mount them.
    Raises NodeUnfit, NodeUnreachable.
    """
    pairs = [text for source, at in mounts for text in (source, f"./{at}")]
    files.run(_UNPACK, workdir, *pairs, doing=f"unpack the code into {workdir}", stdin=code, timeout=_TIMEOUT)


def runs(files: Files) -> set[RunId]:
    """Return the runs that have an output folder on the node, without commands. Raises NodeUnfit, NodeUnreachable."""
    every = f'cd -- "${{1:-$HOME}}/{OUTPUT_ROOT}" && ls -1 && ls -1d -- */{OF_COMMAND}*'
    script = f"{{ {every}; }} 2>/dev/null; exit 0"
    listed = files.run(script, files.home, doing="list output folders").out.decode("utf-8", "replace").splitlines()
    of_commands = {line.partition("/")[0] for line in listed if "/" in line}
    return {name for name in listed if is_run_id(name)} - of_commands


def command(names: Iterable[str]) -> str:
    """Return which command the folder is of; "" for a run's. names: of the files in it."""
    purposes = (name.removeprefix(OF_COMMAND) for name in names if name.startswith(OF_COMMAND))
    return next((COMMANDS[purpose] for purpose in purposes if purpose in COMMANDS), "")


def find(files: Files, run: RunId) -> str | None:
    """Return the path of a run's output folder, if this user has one here. Raises NodeUnfit, NodeUnreachable."""
    script = f'folder=${{2:-$HOME}}/{OUTPUT_ROOT}/$1; [ ! -f "$folder/{MARKER}" ] || printf "at %s\\n" "$folder"'
    done = files.run(script, run, files.home, doing=f"look for the output folder of {run}")
    lines = [line for line in done.out.decode("utf-8", "surrogateescape").splitlines() if line.isprintable()]
    return next((line[3:] for line in reversed(lines) if line.startswith("at /")), None)


def remove(files: Files, path: str, run: RunId) -> None:
    """Remove the folder, if it exists. Raises NodeUnfit with the reason if that is not possible; NodeUnreachable."""
    files.run(_REMOVE, path, run, files.home, doing=f"remove {path}", timeout=_TIMEOUT)
