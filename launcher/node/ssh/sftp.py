"""Reading files over sftp, in few round trips: the four messages of the protocol that this takes.

draft-ietf-secsh-filexfer-02 (version 3, what OpenSSH speaks). paramiko's client waits for every open, seek and close.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import deque

import paramiko

_INIT, _VERSION, _OPEN, _CLOSE, _READ = 1, 2, 3, 4, 5
_STATUS, _HANDLE, _DATA = 101, 102, 103
_EOF, _NO_SUCH_FILE, _DENIED = 1, 2, 3
_FOR_READING = 1
_PIECE = 1 << 16  # bytes a request
_AHEAD = 16  # requests under way at most
_LONGEST = 1 << 20  # no answer of a server in its senses is longer


class SftpReader:
    """One sftp channel. Not for several threads at once."""

    def __init__(self, channel: paramiko.Channel) -> None:
        """`channel` has the sftp subsystem started. Raises EOFError, OSError when it does not speak sftp."""
        self._channel = channel
        self._next = 0
        self._ignored: set[int] = set()  # answers that nobody waits for
        self._send(_INIT, struct.pack(">I", 3))
        kind, _ = self._packet()
        if kind != _VERSION:
            raise EOFError(f"sftp began with message {kind}")

    def read(self, path: str, offset: int, limit: int) -> bytes:
        """Raises FileNotFoundError, PermissionError, OSError of the file; EOFError, TimeoutError of the channel."""
        name = path.encode("utf-8", "surrogateescape")
        kind, body = self._answer(self._request(_OPEN, _string(name) + struct.pack(">II", _FOR_READING, 0)))
        if kind != _HANDLE:
            raise _problem(body, path)
        handle = body[: 4 + _length(body)]
        try:
            return self._read(handle, path, offset, limit)
        finally:
            self._ignored.add(self._request(_CLOSE, handle))

    def _read(self, handle: bytes, path: str, offset: int, limit: int) -> bytes:
        """Ask for twice as much ahead with every answer: a log that has nothing new costs one request."""
        out = bytearray()
        asked = 0
        under_way: deque[tuple[int, int]] = deque()  # (request, bytes asked for)
        ahead = 1
        while asked < limit or under_way:
            while asked < limit and len(under_way) < ahead:
                size = min(_PIECE, limit - asked)
                under_way.append((self._request(_READ, handle + struct.pack(">QI", offset + asked, size)), size))
                asked += size
            request, size = under_way.popleft()
            kind, body = self._answer(request)
            if kind == _DATA:
                piece = body[4 : 4 + _length(body)]
                out += piece
                ahead = min(_AHEAD, ahead * 2)
            if kind != _DATA or len(piece) < size:  # the end, or less than asked for: what is behind does not fit on
                self._ignored.update(number for number, _ in under_way)
                under_way.clear()
                if kind != _DATA:
                    if _length(body) != _EOF:
                        raise _problem(body, path)
                    break
                asked = len(out)
        return bytes(out)

    def _request(self, kind: int, body: bytes) -> int:
        self._next = (self._next + 1) & 0xFFFFFFFF
        self._send(kind, struct.pack(">I", self._next) + body)
        return self._next

    def _answer(self, request: int) -> tuple[int, bytes]:
        while True:
            kind, body = self._packet()
            number, rest = _length(body), body[4:]
            if number == request:
                return kind, rest
            if number not in self._ignored:
                raise EOFError(f"sftp answered {number} when {request} was asked")
            self._ignored.discard(number)

    def _send(self, kind: int, body: bytes) -> None:
        self._channel.sendall(struct.pack(">IB", len(body) + 1, kind) + body)

    def _packet(self) -> tuple[int, bytes]:
        size = _length(self._exactly(4))
        if not 0 < size <= _LONGEST:
            raise EOFError(f"sftp message of {size} bytes")
        packet = self._exactly(size)
        return packet[0], packet[1:]

    def _exactly(self, size: int) -> bytes:
        out = bytearray()
        while len(out) < size:
            piece = self._channel.recv(size - len(out))
            if not piece:
                raise EOFError("the sftp channel ended")
            out += piece
        return bytes(out)


def _length(body: bytes) -> int:
    if len(body) < 4:
        raise EOFError("torn sftp message")
    return int.from_bytes(body[:4], "big")


def _string(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


def _problem(status: bytes, path: str) -> OSError:
    code = _length(status)
    known = {_NO_SUCH_FILE: errno.ENOENT, _DENIED: errno.EACCES}
    if code in known:
        return OSError(known[code], os.strerror(known[code]), path)  # becomes FileNotFoundError or PermissionError
    words = status[8 : 8 + _length(status[4:])].decode(errors="replace") if len(status) >= 8 else ""
    return OSError(errno.EIO, words or f"sftp status {code}", path)
