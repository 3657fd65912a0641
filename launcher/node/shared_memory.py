"""What dead processes left in /dev/shm of a machine: files whose names PyTorch and others choose, and any others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Files that PyTorch, Python, NCCL, OpenMP and UCX leave in /dev/shm with --ipc=host when they are killed. Other names
# are kept, as they may be a user's data set.
SHARED = ("torch_*", "psm_*", "sem.mp-*", "sem.loky-*", "nccl-*", "__KMP_REGISTERED_LIB_*", "cuda.shm.*", "ucx_shm_*")
# Removes such files of this user that no process has open, and prints their names. $1: seconds since the epoch, by the
# node's clock; older files are kept.
CLEAR = f"""
since=$1
for pattern in {" ".join(f"'{name}'" for name in SHARED)}; do
  find /dev/shm -maxdepth 1 -type f -user "$(id -u)" -name "$pattern" 2>/dev/null
done | while IFS= read -r file; do
  changed=$(stat -c %Y -- "$file" 2>/dev/null) || continue
  [ "$changed" -ge "$since" ] || continue
  grep -qsF -- "$file" /proc/[0-9]*/maps && continue
  ls -l /proc/[0-9]*/fd 2>/dev/null | grep -qF -- "-> $file" && continue
  rm -f -- "$file" && printf '%s\\n' "${{file##*/}}"
done
"""
# Prints `@@left <bytes> <epoch seconds> <name>` for each file or folder of this user, under any name, that is not older
# than $1 and that no process has open. Of a folder: the size of all in it, and its newest time.
LEFT = """
LC_ALL=C
export LC_ALL
since=$1
open=$({ ls -l /proc/[0-9]*/fd; ls -l /proc/[0-9]*/cwd; } 2>/dev/null | sed -n 's|.* -> \\(/dev/shm/.*\\)|\\1|p'
  sed -n 's|.* \\(/dev/shm/.*\\)|\\1|p' /proc/[0-9]*/maps 2>/dev/null)
find /dev/shm ! -path /dev/shm -prune -user "$(id -u)" 2>/dev/null | while IFS= read -r file; do
  if [ -L "$file" ] || ! { [ -f "$file" ] || [ -d "$file" ]; }; then continue; fi
  set -- $(find "$file" -exec stat -c '%Y %s %F' {} + 2>/dev/null |
    awk '$1 > t { t = $1 } $3 == "regular" { s += $2 } END { printf "%.0f %.0f", t, s }')
  [ "${1:-0}" -ge "$since" ] || continue
  printf '%s\\n' "$open" | grep -qxF -- "$file" && continue
  printf '%s\\n' "$open" | grep -qF -- "$file/" && continue
  printf '@@left %s %s %s\\n' "$2" "$1" "${file##*/}"
done
"""
_LEFT = re.compile(r"@@left (\d{1,18}) (\d{1,12}) ([^/\n]{1,255})")
REMOVE = 'cd /dev/shm || exit; for name in "$@"; do rm -rf -- "./$name" || exit; done'  # $1, ...: names


@dataclass(frozen=True)
class Shared:
    """A file or folder in /dev/shm. size: bytes; changed: seconds since the epoch, by the node's clock."""

    name: str
    size: int
    changed: int


def parse(printed: bytes) -> Sequence[Shared]:
    """Return what LEFT has printed, the largest first; other lines, as of a login shell, are ignored."""
    lines = printed.decode("utf-8", "replace").splitlines()
    found = (_LEFT.fullmatch(line) for line in lines)
    left = [Shared(match[3], int(match[1]), int(match[2])) for match in found if match and match[3] not in (".", "..")]
    return sorted(left, key=lambda each: each.size, reverse=True)
