"""A run's output folder on a node. It has a marker file, and is removed only if that names the run."""

from __future__ import annotations

from launcher.model.checked import OUTPUT_ROOT
from launcher.model.plan import RunId
from launcher.node.files import Files

MARKER = ".launcher-run"  # a file in the folder, with the run's ID
_REMOVE_TIMEOUT = 600.0
# $1: the folder, $2: the run. The marker may exist already, as nodes may share the folder.
MAKE = f"""
mkdir -p -- "$1" || exit
[ -s "$1/{MARKER}" ] || printf '%s\\n' "$2" >"$1/{MARKER}" || {{ rm -f -- "$1/{MARKER}"; rmdir -- "$1"; exit 1; }}
"""
# A program may have made its output folder, the marker or subfolders inaccessible (chmod 000); their owner can undo it.
# The marker is removed last, so that an interrupted removal can be repeated. Nodes that share the folder remove it at
# the same time: once it does not exist any more, errors of find do not matter.
_REMOVE = f"""
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
[ -f "$marker" ] && [ ! -L "$marker" ] && [ "$(head -c 100 -- "$marker")" = "$2" ] ||
  unless_gone "it has no file {MARKER} of this run"
find "$folder" -type d ! -perm -700 -exec chmod u+rwx {{}} \\; 2>/dev/null
find "$folder" -mindepth 1 -maxdepth 1 ! -name {MARKER} -exec rm -rf -- {{}} + && rm -rf -- "$folder" ||
  [ ! -e "$folder" ]
"""


def make(files: Files, path: str, run: RunId) -> None:
    """Make the folder (new folders get mode 0700) and the marker in it. Raises NodeUnfit, NodeUnreachable."""
    files.run(MAKE, path, run, doing=f"make the folder {path}")


def remove(files: Files, path: str, run: RunId) -> None:
    """Remove the folder, if it exists. Raises NodeUnfit with the reason if that is not possible; NodeUnreachable."""
    files.run(_REMOVE, path, run, files.home, doing=f"remove {path}", timeout=_REMOVE_TIMEOUT)
