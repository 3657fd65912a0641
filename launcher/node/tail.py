"""Tail growing files of a node: a `tail -f` for each, all through one channel.

launcher.run.watch.reader reads on from the offsets that it has reached.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from launcher.errors import NodeUnreachable
from launcher.node.machine import Machine, shell
from launcher.node.opened import BELOW, relative

_LONGEST_LINE = 1 << 22  # bytes; of metrics
_IMPATIENT = 150  # pauses of 0.2 s before the first of 1 s, while a file is missing
# $1: the output folder. $2, $3: a file and its first byte to send, unchanged, to stdout; further pairs: whole lines to
# stderr, as `<index of the pair> <line>`. A file that cannot be opened, or not yet, is tried again. An open file is
# followed even if its name is removed: logs are only appended to. tail opens it again by the descriptor's name, for
# inotify. Exits when its stdin ends, and so with the connection, even while the files do not grow.
_FOLLOW = f"""{BELOW}
folder=$1
shift
tail -s 0.2 -c 0 /dev/null 2>/dev/null && often='-s 0.2' || often='' # busybox takes whole seconds
push() {{
  turns=0
  until [ -d "$folder" ]; do pause; done
  at "$folder"
  while :; do
    [ ! -f "$root/$1" ] || below "$1" follow "$2" 2>/dev/null
    pause
  done
}}
follow() {{ exec tail -c "+$1" $often -f /proc/self/fd/0; }}
pause() {{
  turns=$((turns + 1))
  if [ $turns -gt {_IMPATIENT} ]; then sleep 1; else sleep 0.2 2>/dev/null || sleep 1; fi
}}
[ -z "$1" ] || push "$1" "$2" &
shift 2
index=0
while [ $# -gt 1 ]; do
  (push "$1" "$2") | while IFS= read -r line; do printf '%s %s\\n' $index "$line" >&2; done &
  shift 2
  index=$((index + 1))
done
cat >/dev/null
trap '' TERM
kill -s TERM 0
"""


class Tail:
    """The contents of `path` from `offset` on, and all data appended later. A missing file is waited for.

    lines: further files, path -> offset, of which only whole lines are returned. All files share one channel.
    Not thread-safe, except for end().
    """

    def __init__(self, machine: Machine, path: str, offset: int, lines: Mapping[str, int], *, below: str) -> None:
        """Paths are absolute, below the output folder `below`; `path` may be "" for none. Raises NodeUnreachable."""
        names = [(relative(name, below) if name else "", start) for name, start in ((path, offset), *lines.items())]
        pairs = [text for name, start in names for text in (name, str(start + 1))]
        self._stream = machine.open(shell(_FOLLOW, below, *pairs), lasting=True)
        self._machine = machine
        self._path = path
        self._lines = list(lines)
        self._rest = b""
        self._ready: list[tuple[str, bytes]] = []

    def next(self, timeout: float) -> tuple[str, bytes] | None:
        """Return (path, appended bytes); None if nothing was appended for `timeout` seconds.

        Raises NodeUnreachable if the connection is lost: all data received before has been returned, so a new tail
        from that offset misses nothing.
        """
        deadline = time.monotonic() + timeout
        while not self._ready:
            found = self._stream.receive(max(0.0, deadline - time.monotonic()))
            if found is None:
                what = "stopped sending its log files"
                raise NodeUnreachable(self._machine.node, what, "check that the node is up")
            out, err = found
            if out:
                self._ready.append((self._path, out))
            *whole, self._rest = (self._rest + err).split(b"\n")
            if len(self._rest) > _LONGEST_LINE:
                what = f"sent a line over {_LONGEST_LINE >> 20} MiB"
                raise NodeUnreachable(self._machine.node, what, "check its metrics.jsonl")
            for line in whole:
                index, _, text = line.partition(b" ")
                if index.isdigit() and int(index) < len(self._lines):  # others are a login shell's own output
                    self._ready.append((self._lines[int(index)], text + b"\n"))
            if not self._ready and time.monotonic() >= deadline:
                return None
        return self._ready.pop(0)

    def end(self) -> None:
        """Make next() raise NodeUnreachable from now on, immediately if it is waiting."""
        self._stream.end()

    def close(self) -> None:
        self._stream.close()
