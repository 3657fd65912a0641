"""A node's files over ssh: reads by sftp on a channel that stays open, everything else by one short command."""

from __future__ import annotations

import posixpath
import re
import secrets
import threading
from collections.abc import Sequence

import paramiko

from launcher.errors import LauncherError, NodeUnfit
from launcher.node.engine import FileEntry
from launcher.node.machine import Done
from launcher.node.ssh.commands import Session, Ssh
from launcher.node.ssh.sftp import SftpReader

_TIMEOUT = 60.0
_REMOVE_TIMEOUT = 600.0
_COPY_TIMEOUT = 3600.0  # checkpoints may be large, and a disk slow
_MISSING = 44  # exit code of our own scripts: it is not there

_WRITE = 'umask 077; cat >"$2" && chmod "$1" "$2" && mv -f -- "$2" "$3" || { rm -f -- "$2"; exit 1; }'
_SCAN = f'[ -d "$1" ] || exit {_MISSING}; cd -- "$1" && find . -type f -printf "%s %T@ %P\\0"'
_COPY = f'[ -d "$1" ] || exit {_MISSING}; umask 077; mkdir -p -- "$2" && cp -RPp -- "$1/." "$2"'
_READ = f'[ -e "$1" ] || exit {_MISSING}; tail -c "+$2" -- "$1" | head -c "$3"'

_ENTRY = re.compile(rb"(\d{1,18}) (-?\d{1,12}(?:\.\d{1,12})?) (.+)", re.DOTALL)


class _NoSftp(Exception):  # noqa: N818 - inside this module only
    pass


class RemoteFiles:
    """The Files of a node that is reached over ssh. Safe for several threads; reads take turns."""

    def __init__(self, ssh: Ssh) -> None:
        self._ssh = ssh
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._reader: SftpReader | None = None
        self._by_command = False  # its sshd has no sftp

    def make_dir(self, path: str) -> None:
        """Raises NodeUnfit when it cannot be made, NodeUnreachable."""
        self._script('umask 077; mkdir -p -- "$1"', _absolute(path), doing=f"make the folder {path}")

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """All of it or nothing: a temporary file beside it takes its name. Raises NodeUnfit, NodeUnreachable."""
        temporary = f"{_absolute(path)}.{secrets.token_hex(4)}.part"
        self._script(_WRITE, f"{mode:o}", temporary, path, doing=f"write {path}", stdin=data)

    def scan(self, root: str) -> Sequence[FileEntry]:
        """Raises NodeUnfit for a folder that may not be read, NodeUnreachable."""
        done = self._script(_SCAN, _absolute(root), doing=f"list {root}", missing=True, vanished=True)
        return parse_scan(done.out)

    def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes:
        """Raises FileNotFoundError, PermissionError, OSError of the file; NodeUnreachable."""
        _absolute(path)
        with self._lock:
            if not self._by_command:
                try:
                    return self._read(path, offset, limit)
                except _NoSftp:
                    self._by_command = True
        done = self._ssh.run(_sh(_READ, path, str(offset + 1), str(limit)), timeout=_TIMEOUT)
        if done.code == _MISSING:
            raise FileNotFoundError(path)
        if done.code or done.err:
            raise OSError(f"{self._ssh.node}: {path}: {done.complaint}")
        return done.out

    def copy_tree(self, source: str, target: str) -> bool:
        """Raises NodeUnfit, also where there is no room for it; NodeUnreachable."""
        done = self._script(
            _COPY, _absolute(source), _absolute(target), doing=f"copy {source}", timeout=_COPY_TIMEOUT, missing=True
        )
        return done.code == 0

    def remove_tree(self, path: str) -> None:
        """Raises NodeUnfit when something of it cannot be removed, NodeUnreachable."""
        clean = posixpath.normpath(_absolute(path))
        if clean.count("/") < 2 or ".." in path.split("/"):
            raise ValueError(f"{path} is no folder that the launcher may remove")
        self._script('rm -rf -- "$1"', clean, doing=f"remove {path}", timeout=_REMOVE_TIMEOUT)

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _read(self, path: str, offset: int, limit: int) -> bytes:
        for fresh in (self._reader is None, True):
            try:
                return self._sftp().read(path, offset, limit)
            except (EOFError, TimeoutError, paramiko.SSHException) as error:
                self._drop()
                if fresh:
                    raise self._ssh.lost(error) from error
            except OSError as error:
                if error.filename is None:  # of the channel, not of the file
                    self._drop()
                    if fresh:
                        raise self._ssh.lost(error) from error
                    continue
                raise
        raise AssertionError("unreachable")

    def _sftp(self) -> SftpReader:
        if self._reader is not None:
            return self._reader
        self._session, reader = self._ssh.session(_start_sftp)
        self._reader = reader
        return reader

    def _drop(self) -> None:
        session, self._session, self._reader = self._session, None, None
        if session:
            session.close()

    def _script(
        self,
        script: str,
        *arguments: str,
        doing: str,
        stdin: bytes = b"",
        timeout: float = _TIMEOUT,
        missing: bool = False,
        vanished: bool = False,
    ) -> Done:
        """`missing`: it may say that its object is not there. `vanished`: what went away under it is no error."""
        done = self._ssh.run(_sh(script, *arguments), stdin, timeout)
        if done.code == 0 or (missing and done.code == _MISSING) or (vanished and _only_vanished(done.err)):
            return done
        raise self._failure(doing, done)

    def _failure(self, doing: str, done: Done) -> LauncherError:
        words = done.complaint
        if "No space left" in words or "Disk quota" in words:
            return NodeUnfit(self._ssh.node, f"could not {doing}: {words}", "make room there: launcher clean")
        if "Permission denied" in words or "Operation not permitted" in words:
            cure = f"user {self._ssh.user} must own it: look with ls -l there"
            return NodeUnfit(self._ssh.node, f"could not {doing}: {words}", cure)
        return NodeUnfit(self._ssh.node, f"could not {doing}: {words or f'exit code {done.code}'}")


def parse_scan(listing: bytes) -> list[FileEntry]:
    """From entries `<bytes> <epoch seconds> <path>`, each ended by a NUL; what is none of it is passed over."""
    found = []
    for entry in listing.split(b"\0"):
        match = _ENTRY.fullmatch(entry)
        if match:
            size, mtime, path = match.groups()
            found.append(FileEntry(path.decode("utf-8", "surrogateescape"), int(size), float(mtime)))
    return found


def _start_sftp(channel: paramiko.Channel) -> SftpReader:
    try:
        channel.invoke_subsystem("sftp")
    except paramiko.SSHException as error:
        if channel.get_transport().is_active():
            raise _NoSftp from error
        raise
    channel.settimeout(_TIMEOUT)
    return SftpReader(channel)


def _sh(script: str, *arguments: str) -> list[str]:
    return ["sh", "-c", script, "launcher", *arguments]


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"{path!r} is no absolute path")
    return path


def _only_vanished(err: bytes) -> bool:
    """Whether find complained only of files that went away while it looked."""
    lines = err.decode(errors="replace").splitlines()
    return bool(lines) and all("No such file or directory" in line for line in lines)
