"""A shell on a node that stays open: one short command after another, without a channel each.

A channel costs eight messages and a login shell on the node, a command in an open shell two. What is read here is the
node's own framing of each command: marks that nobody can guess, its exit code, what it wrote to stderr.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

from launcher.node.ssh.session import Done, Session

COMMAND = "exec sh"
_PIECE = 1 << 16
# The command's own process reads nothing of the shell's stdin; its stderr is held back until it has ended.
_LINE = """printf '%s begin\\n' {mark}
{{ E=$({{ {command}
}} </dev/null 2>&1 >&3 3>&-); C=$?; }} 3>&1
printf '%s end\\n%d\\n%s\\n%s done\\n' {mark} "$C" "$E" {mark}
"""


class NotBegun(Exception):  # noqa: N818 - no error yet: it may be run in another way
    """There is no shell, or not any more; nothing of the command has run."""


class Shell:
    """For one caller at a time; after any error it is to be closed."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def alive(self) -> bool:
        channel = self._session.channel
        return not (channel.closed or channel.eof_received) and channel.get_transport().is_active()

    def run(self, command: str, deadline: float) -> Done:
        """`command`: words quoted for a shell. deadline: of time.monotonic().

        Raises NotBegun, TimeoutError; EOFError when the shell ended under the command, or the connection did and nobody
        knows how far it came.
        """
        mark = secrets.token_hex(16)
        try:
            self._session.channel.sendall(_LINE.format(mark=mark, command=command).encode("utf-8", "surrogateescape"))
        except (OSError, EOFError) as error:
            raise NotBegun from error
        started = time.time()
        pieces = self._pieces(deadline)
        try:
            _, rest = _until(b"", f"{mark} begin\n".encode(), pieces)
        except EOFError as error:
            if self._session.channel.get_transport().is_active():  # then all that the shell ever said is here
                raise NotBegun from error
            raise
        rest = rest or next(pieces)
        first = time.time()
        out, rest = _until(rest, f"{mark} end\n".encode(), pieces)
        trailer, _ = _until(rest, f"\n{mark} done\n".encode(), pieces)
        code, _, err = trailer.partition(b"\n")
        return Done(int(code), out, err, started, first)

    def _pieces(self, deadline: float) -> Iterator[bytes]:
        channel = self._session.channel
        while True:
            channel.settimeout(max(0.01, deadline - time.monotonic()))
            piece = channel.recv(_PIECE)
            if not piece:
                raise EOFError("its shell ended")
            yield piece

    def close(self) -> None:
        self._session.close()


def _until(begun: bytes, mark: bytes, pieces: Iterator[bytes]) -> tuple[bytes, bytes]:
    """What comes before a mark and what after it, as far as it is there already."""
    seen = bytearray(begun)
    looked = 0
    while (place := seen.find(mark, looked)) < 0:
        looked = max(0, len(seen) - len(mark) + 1)
        seen += next(pieces)
    return bytes(seen[:place]), bytes(seen[place + len(mark) :])
