"""Folders of a node that outlive containers (model.caches): made, and removed."""

from __future__ import annotations

import posixpath

from launcher.model.caches import FOLDER
from launcher.node.files import Files
from launcher.node.opened import BELOW

_TIMEOUT = 600.0  # seconds; models are large
# $1: ~/.launcher, $2: the name. The engine would make the folder as root; a link could lead anywhere.
_MAKE = f"""{BELOW}
at "$1"
umask 077
enter make "{FOLDER}/$2" || exit
[ -O . ] || {{ echo "it belongs to another user" >&2; exit 1; }}
chmod 700 .
"""
_NAMES = f"""{BELOW}
at "$1"
[ -d "$root/{FOLDER}" ] && [ ! -L "$root/{FOLDER}" ] || exit 0
enter find {FOLDER} || exit
for each in *; do [ ! -d "./$each" ] || [ -L "./$each" ] || printf '%s\\n' "$each"; done
"""
_REMOVE = f"""{BELOW}
at "$1"
enter find {FOLDER} || exit
[ -L "./$2" ] || find "./$2" -type d ! -perm -700 -exec chmod u+rwx {{}} \\; 2>/dev/null
rm -rf -- "./$2" || exit
cd .. && rmdir {FOLDER} 2>/dev/null # if it was the last one
exit 0
"""


def make(files: Files, folder: str) -> None:
    """Make the folder, only for its user (0700). Raises NodeUnfit, NodeUnreachable."""
    root, own = posixpath.split(folder)
    files.run(_MAKE, posixpath.dirname(root), own, doing=f"make the folder {folder} (needless with `cache: false`)")


def names(files: Files, root: str) -> list[str]:
    """Return the names of the folders, also of empty ones. root: ~/.launcher. Raises NodeUnfit, NodeUnreachable."""
    return files.run(_NAMES, root, doing=f"list {root}/{FOLDER}").out.decode(errors="replace").splitlines()


def remove(files: Files, folder: str) -> None:
    """Remove the folder with what is in it; if it was the last one, that of all. Raises NodeUnfit, NodeUnreachable."""
    root, own = posixpath.split(folder)
    files.run(_REMOVE, posixpath.dirname(root), own, doing=f"remove {folder}", timeout=_TIMEOUT)
