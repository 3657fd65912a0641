"""The one way to open a file below an output folder, as shell functions for scripts that run on a node.

A program controls everything in its output folder, and the launcher reads it as the ssh user, outside of the container:
a link there could lead to any file of that user, a FIFO or a device could block the launcher. So a file is opened once,
proven to be the file that was meant, and read through its descriptor: a name may mean another file the next time. The
kernel's own path of the descriptor shows links anywhere in the path. print_spans.py does the same in Python, for many
files.

A file with several names is accepted if it belongs to the user: a container can link only files of the same mount, so
none outside the output folder, and programs keep checkpoints that way.
"""

from __future__ import annotations

from launcher.node.machine import shell

# POSIX sh with coreutils or busybox; Linux, because of /proc.
# at FOLDER: the output folder of what follows. It may be reached through links, as these are not the program's.
# below NAME COMMAND ...: run COMMAND, which may be a function, with the file FOLDER/NAME as its stdin; fail and print
# the reason to stderr if it cannot be opened.
# enter make|find NAME: change to the folder FOLDER/NAME, "" for FOLDER, step by step and never through a link; a
# working folder cannot be exchanged. make: make what is missing.
# append LINE: a COMMAND that appends it. The descriptor's own name opens that file again, whatever its path is now.
BELOW = r"""
at() { root=$(cd -P -- "$1" 2>/dev/null && pwd -P) || root=$1; }
below() {
  file=$root/$1
  shift
  if [ -L "$file" ]; then ignored 'it is a link'
  elif [ ! -e "$file" ]; then ls -d -- "$file" >/dev/null && ignored 'it has changed'
  elif [ ! -f "$file" ]; then ignored 'it is not a regular file'
  elif [ ! -r "$file" ]; then ignored 'Permission denied'
  else { proven && "$@"; } <"$file"
  fi
}
proven() {
  [ "$(readlink /proc/self/fd/0)" = "$file" ] || ignored 'a folder of its path is a link' || return
  [ -f /proc/self/fd/0 ] || ignored 'it is not a regular file' || return
  [ -O /proc/self/fd/0 ] || [ "$(stat -L -c %h /proc/self/fd/0)" = 1 ] ||
    ignored "it is a hard link to another user's file"
}
enter() {
  file=$root
  rest=$2
  cd -P -- "$file" 2>/dev/null || closed || return
  while [ -n "$rest" ]; do
    step=${rest%%/*}
    file=$file/$step
    [ "$1" = find ] || mkdir -p -- "./$step" || return
    cd -P -- "./$step" 2>/dev/null || closed || return
    [ "$PWD" = "$file" ] || ignored 'a folder of its path is a link' || return
    case $rest in */*) rest=${rest#*/} ;; *) rest='' ;; esac
  done
}
closed() { ls -- "$file/." >/dev/null; return 1; }
ignored() { printf 'below: %s\n' "$1" >&2; return 1; }
append() { printf '%s\n' "$1" >>/proc/self/fd/0; }
"""


def relative(path: str, below: str, forbidden: str = "\0") -> str:
    """Return the part of `path` below that folder. Raises ValueError if it is not below it, or cannot be sent."""
    name = path.removeprefix(f"{below}/")
    steps = name.split("/")
    if not below.startswith("/") or name == path or {"", ".", ".."} & {*steps} or {*path} & {*forbidden}:
        raise ValueError(f"{path!r} is not a path below {below}, or has a character that cannot be sent")
    return name


def bounded(seconds: float, script: str, *arguments: str) -> list[str]:
    """Return the argv of a script that is killed after a time: a FIFO may replace a file just before it is opened."""
    return ["timeout", "-s", "KILL", f"{seconds:g}", *shell(script, *arguments)]
