"""Which keys are offered to a server, in OpenSSH's order: the agent's that the config names, its others, key files.

Nothing is ever asked of the person: an encrypted key file that no agent holds is named in the error instead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko
from paramiko.agent import AgentSSH
from paramiko.pkey import PublicBlob

from launcher.errors import AuthFailed
from launcher.node.ssh.config import Target

_AGENT_TIMEOUT = 10.0  # seconds


class SocketAgent(AgentSSH):
    """The ssh-agent at a given socket, the one place where protected methods of paramiko are used.

    paramiko's public Agent knows $SSH_AUTH_SOCK only, so no IdentityAgent of an ssh config, and waits for ever for an
    agent that does not answer. Its base class does the rest; `_connect` and `_close` are what its subclasses are made
    of. Its get_keys() are keys that sign by asking the agent.
    """

    if TYPE_CHECKING:  # paramiko's stubs leave out protected methods

        def _connect(self, conn: socket.socket) -> None: ...
        def _close(self) -> None: ...

    def __init__(self, path: str, timeout: float) -> None:
        """timeout: seconds for every answer. Raises OSError, paramiko.SSHException when no agent answers there."""
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(path)
            self._connect(connection)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self._close()


class KeyFiles:
    """Private key files, each read once for all nodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[str, tuple[list[paramiko.PKey], str]] = {}

    def load(self, path: str) -> tuple[list[paramiko.PKey], str]:
        """The keys of a file, the one with its certificate first, and why there are none; "" where that is usual."""
        with self._lock:
            if path not in self._read:
                self._read[path] = _load(path)
            return self._read[path]


def _load(path: str) -> tuple[list[paramiko.PKey], str]:
    certificate = Path(f"{path}-cert.pub")
    try:
        found = Path(path).stat()
        if found.st_uid == os.getuid() and found.st_mode & 0o077:
            return [], f"{path} is left out, as OpenSSH does: others may read it (mode {found.st_mode & 0o777:04o})"
        key = paramiko.PKey.from_path(path)
    except FileNotFoundError:
        return [], ""  # the usual names are all tried; most are not there
    except (TypeError, paramiko.PasswordRequiredException):  # TypeError is how `cryptography` says it
        return [], f"{path} is encrypted and no agent holds it"
    except (OSError, ValueError, paramiko.SSHException) as error:
        return [], f"{path} cannot be used: {error}"
    if not certificate.exists():
        return [key], ""
    plain = paramiko.PKey.from_path(path)
    plain.public_blob = None  # the same key without its certificate, for a server that does not trust the signer
    return [key, plain], ""


def public_half(path: str) -> bytes | None:
    """The public half of a key file, for when the private half lies in an agent: from `path`.pub, or `path` itself."""
    for candidate in (f"{path}.pub", path):
        with contextlib.suppress(OSError, ValueError):
            return PublicBlob.from_file(candidate).key_blob
    return None


def offers(
    target: Target, agent_keys: Sequence[paramiko.PKey], files: KeyFiles, reasons: list[str]
) -> Iterator[tuple[str, paramiko.PKey]]:
    """(what it is, key) in the order in which to try; `reasons` gathers why a key that the config names is missing."""
    held = {key.asbytes(): key for key in agent_keys}
    named = {blob: path for path in target.identity_files if (blob := public_half(path)) is not None}
    for blob, path in named.items():
        if blob in held:
            yield f"{path} (agent)", held[blob]
    if not target.identities_only:
        for blob, key in held.items():
            if blob not in named:
                yield f"{getattr(key, 'comment', '') or key.get_name()} (agent)", key
    in_agent = {path for blob, path in named.items() if blob in held}
    for path in target.identity_files:
        if path in in_agent:
            continue
        keys, reason = files.load(path)
        if reason:
            reasons.append(reason)
        for key in keys:
            yield path, key


def authenticate(transport: paramiko.Transport, target: Target, files: KeyFiles, deadline: float) -> None:
    """Prove who we are. `deadline` is of time.monotonic(). Raises AuthFailed; where: the target's alias."""
    reasons: list[str] = []
    tried: list[str] = []
    agent_keys: Sequence[paramiko.PKey] = ()
    with contextlib.ExitStack() as stack:
        if target.identity_agent:
            timeout = max(0.1, min(_AGENT_TIMEOUT, deadline - time.monotonic()))
            try:
                agent = stack.enter_context(contextlib.closing(SocketAgent(target.identity_agent, timeout)))
                agent_keys = agent.get_keys()
            except (OSError, paramiko.SSHException) as error:
                reasons.append(f"no ssh-agent answers at {target.identity_agent}: {error}")
        for name, key in offers(target, agent_keys, files, reasons):
            if not transport.is_active() or time.monotonic() > deadline:
                reasons.append("the server ended the connection" if tried else "no time was left")
                break
            tried.append(name)
            transport.auth_timeout = max(0.1, deadline - time.monotonic())
            try:
                further = transport.auth_publickey(target.user, key)
            except paramiko.BadAuthenticationType as error:
                reasons.append(f"it takes {', '.join(error.allowed_types)} only, no keys")
                break
            except (paramiko.SSHException, EOFError, OSError) as error:
                if not isinstance(error, paramiko.AuthenticationException):
                    reasons.append(f"{name}: {error}")
                continue
            if not further:
                return
            reasons.append(f"after the key it asks for {', '.join(further)} as well")
            break
    offered = f"refused every key for user {target.user} ({', '.join(tried)})" if tried else "no ssh key to offer"
    raise AuthFailed(target.alias, "; ".join([offered, *reasons]), _cure(target, reasons))


def _cure(target: Target, reasons: Sequence[str]) -> str:
    for reason in reasons:
        if "is encrypted" in reason:
            return f"unlock it once: ssh-add {reason.split(' is encrypted')[0]}"
        if "others may read" in reason:
            return f"make it yours alone: chmod 600 {reason.split(' is left out')[0]}"
        if "ended the connection" in reason:
            return "too many keys: set IdentitiesOnly yes and IdentityFile for this host in your ssh config"
    return f"nodes are reached with keys and agents only; add your key there: ssh-copy-id {target.alias}"
