"""Files of a node that are followed while they grow: one `tail -F` each, all of them through one channel.

launcher.run.followed reads them, from the offsets that it has reached.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from launcher.errors import NodeUnreachable
from launcher.node.machine import Machine, shell

_LONGEST_LINE = 1 << 22  # of metrics
# $1, $2: a file and from which byte on, to stdout as it is; further pairs: whole lines to stderr, `<place of the pair>
# <line>`. Ends with its stdin, and so with the connection, also while the files are quiet.
_FOLLOW = r"""
push() { exec tail -c "+$2" -s 0.2 -F -- "$1" 2>/dev/null; }
[ -z "$1" ] || push "$1" "$2" &
shift 2
place=0
while [ $# -gt 1 ]; do
  (push "$1" "$2") | while IFS= read -r line; do printf '%s %s\n' $place "$line" >&2; done &
  shift 2
  place=$((place + 1))
done
cat >/dev/null
trap '' TERM
kill -s TERM 0
"""


class Follower:
    """What `path` has from `offset` on and whatever is added, pushed; files that are not there yet are waited for.

    lines: further files, path -> offset, of which only whole lines are pushed. One channel for all of them. Not for
    several threads at once, but for end().
    """

    def __init__(self, machine: Machine, path: str, offset: int, lines: Mapping[str, int]) -> None:
        """Paths are absolute; "" for no `path`. Raises NodeUnreachable."""
        pairs = [word for name, start in ((path, offset), *lines.items()) for word in (name, str(start + 1))]
        self._stream = machine.open(shell(_FOLLOW, *pairs), lasting=True)
        self._machine = machine
        self._path = path
        self._lines = list(lines)
        self._rest = b""
        self._ready: list[tuple[str, bytes]] = []

    def next(self, timeout: float) -> tuple[str, bytes] | None:
        """(path, what was added to it); None when nothing was for `timeout` seconds.

        Raises NodeUnreachable when the connection is lost: what came until then has been handed out, so a new follower
        from there on misses nothing.
        """
        deadline = time.monotonic() + timeout
        while not self._ready:
            found = self._stream.receive(max(0.0, deadline - time.monotonic()))
            if found is None:
                raise NodeUnreachable(self._machine.node, "its files are not sent any more", "is the node still up?")
            out, err = found
            if out:
                self._ready.append((self._path, out))
            *whole, self._rest = (self._rest + err).split(b"\n")
            if len(self._rest) > _LONGEST_LINE:
                raise NodeUnreachable(self._machine.node, "sends a line without an end", "look at its metrics.jsonl")
            for line in whole:
                place, _, text = line.partition(b" ")
                if place.isdigit() and int(place) < len(self._lines):  # others are a login shell's own output
                    self._ready.append((self._lines[int(place)], text + b"\n"))
            if not self._ready and time.monotonic() >= deadline:
                return None
        return self._ready.pop(0)

    def end(self) -> None:
        """next() raises NodeUnreachable from now on, at once where it is waiting."""
        self._stream.end()

    def close(self) -> None:
        self._stream.close()
