"""A run's output folder on a node: it gets a marker, and goes only where that proves it to be the run's own."""

from __future__ import annotations

from launcher.model.checked import OUTPUT_ROOT
from launcher.model.plan import RunId
from launcher.node.files import Files

MARKER = ".launcher-run"  # in the folder: a file with the run's id
_REMOVE_TIMEOUT = 600.0
# $1: the folder, $2: the run. Nodes may share the folder, so the marker may be there.
MAKE = f"""
mkdir -p -- "$1" || exit
[ -s "$1/{MARKER}" ] || printf '%s\\n' "$2" >"$1/{MARKER}" || {{ rm -f -- "$1/{MARKER}"; rmdir -- "$1"; exit 1; }}
"""
# A program may have locked (chmod 000) its output folder, the marker or folders in it, whose owner may undo that.
# The marker goes last, so that a removal that was cut off can be done again. Nodes that share the folder remove it at
# the same time: once it is gone, find's complaint about that means nothing.
_REMOVE = f"""
refuse() {{ echo "$1" >&2; exit 1; }}
unless_gone() {{ [ -e "$folder" ] && refuse "$1"; exit 0; }}
folder=$1 marker="$1/{MARKER}" home=${{3:-$HOME}}
case $home in /*) ;; *) refuse "HOME is '$home'; expected an absolute path" ;; esac
[ "$folder" = "${{home%/}}/{OUTPUT_ROOT}/$2" ] || refuse "it is not below ${{home%/}}/{OUTPUT_ROOT}"
[ ! -L "$folder" ] || refuse "it is a link"
[ -O "$folder" ] || unless_gone "it belongs to another user"
chmod u+rwx "$folder" 2>/dev/null
rmdir -- "$folder" 2>/dev/null && exit
[ -r "$marker" ] || [ -L "$marker" ] || chmod u+r "$marker" 2>/dev/null
[ -f "$marker" ] && [ ! -L "$marker" ] && [ "$(head -c 100 -- "$marker")" = "$2" ] ||
  unless_gone "there is no file {MARKER} of this run in it"
find "$folder" -type d ! -perm -700 -exec chmod u+rwx {{}} \\; 2>/dev/null
find "$folder" -mindepth 1 -maxdepth 1 ! -name {MARKER} -exec rm -rf -- {{}} + && rm -rf -- "$folder" ||
  [ ! -e "$folder" ]
"""


def make(files: Files, path: str, run: RunId) -> None:
    """Make it and its parents, mode 0700 for what is new, with the marker. Raises NodeUnfit, NodeUnreachable."""
    files.run(MAKE, path, run, doing=f"make the folder {path}")


def remove(files: Files, path: str, run: RunId) -> None:
    """Nothing to do where it is missing. Raises NodeUnfit where it is not removed, with the reason; NodeUnreachable."""
    files.run(_REMOVE, path, run, files.home, doing=f"remove {path}", timeout=_REMOVE_TIMEOUT)
