"""Keys to offer to a server, in OpenSSH's order: agent keys that the config names, other agent keys, key files.

The user is never prompted: the error names an encrypted key file that no agent has.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko
from paramiko.agent import AgentSSH
from paramiko.pkey import PublicBlob

from launcher.errors import AuthFailed
from launcher.node.ssh.config import SshTarget

_AGENT_TIMEOUT = 10.0  # seconds
_NO_AGENT = "no ssh-agent responds"


class SilentAgentError(paramiko.SSHException, TimeoutError):
    """The agent did not respond in time. paramiko's thread would crash with a TimeoutError."""


class SocketAgent(AgentSSH):
    """The ssh-agent at a given socket; the only code that uses protected methods of paramiko.

    paramiko's public Agent supports only $SSH_AUTH_SOCK, not IdentityAgent of an ssh config, and waits indefinitely for
    an agent that does not respond. The base class implements the rest on top of `_connect` and `_close`. The keys of
    get_keys() sign by asking the agent.
    """

    if TYPE_CHECKING:  # paramiko's stubs leave out protected methods

        def _connect(self, conn: socket.socket) -> None: ...
        def _close(self) -> None: ...

    def __init__(self, path: str, timeout: float) -> None:
        """timeout: seconds for every response. Raises OSError, paramiko.SSHException if no agent responds."""
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(path)
            self._connect(connection)
        except BaseException:
            connection.close()
            raise

    def _send_message(self, msg: object) -> Any:
        try:
            return super()._send_message(msg)  # type: ignore[misc]
        except TimeoutError as error:
            raise SilentAgentError("timed out") from error

    def close(self) -> None:
        self._close()


class KeyFiles:
    """Private key files; each is read once for all nodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[str, tuple[list[paramiko.PKey], str]] = {}

    def load(self, path: str) -> tuple[list[paramiko.PKey], str]:
        """Return the keys of a file, first with its certificate, and why it has none; "" if that is normal."""
        with self._lock:
            if path not in self._read:
                self._read[path] = _load(path)
            return self._read[path]


def _load(path: str) -> tuple[list[paramiko.PKey], str]:
    certificate = Path(f"{path}-cert.pub")
    try:
        found = Path(path).stat()
        if found.st_uid == os.getuid() and found.st_mode & 0o077:
            return [], f"{path} is ignored: its permissions are too open (mode {found.st_mode & 0o777:04o})"
        key = paramiko.PKey.from_path(path)
    except FileNotFoundError:
        return [], ""  # all default names are tried; most do not exist
    except (TypeError, paramiko.PasswordRequiredException):  # TypeError: of `cryptography`
        return [], f"{path} is encrypted and in no ssh-agent"
    except (OSError, ValueError, paramiko.SSHException) as error:
        return [], f"{path} cannot be used: {error}"
    if not certificate.exists():
        return [key], ""
    plain = paramiko.PKey.from_path(path)
    plain.public_blob = None  # the same key without its certificate, for a server that does not trust the signer
    return [key, plain], ""


def public_half(path: str) -> bytes | None:
    """Return the public half of a key file whose private half may be in an agent: from `path`.pub, or `path` itself."""
    for candidate in (f"{path}.pub", path):
        with contextlib.suppress(OSError, ValueError):
            return PublicBlob.from_file(candidate).key_blob
    return None


def offers(
    target: SshTarget, agent_keys: Sequence[paramiko.PKey], files: KeyFiles, reasons: list[str]
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield (description, key) in the order to try them; `reasons` collects why configured keys are missing."""
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


def _without_a_key(transport: paramiko.Transport, target: SshTarget, deadline: float, reasons: list[str]) -> bool:
    """Ask for the method "none", as OpenSSH does first: some servers (Tailscale SSH) know the user by the network."""
    transport.auth_timeout = max(0.1, deadline - time.monotonic())
    try:
        further = transport.auth_none(target.user)
    except paramiko.AuthenticationException:  # refused, as by nearly all servers
        return False
    except (paramiko.SSHException, EOFError, OSError) as error:
        reasons.append(str(error) or type(error).__name__)
        return False
    return not further


def authenticate(transport: paramiko.Transport, target: SshTarget, files: KeyFiles, deadline: float) -> None:
    """Log in as the target's user. deadline: of time.monotonic(). Raises AuthFailed; where: the target's alias."""
    reasons: list[str] = []
    if _without_a_key(transport, target, deadline, reasons):
        return
    tried: list[str] = []
    accepted: list[str] = []
    agent_keys: Sequence[paramiko.PKey] = ()
    with contextlib.ExitStack() as stack:
        if target.identity_agent:
            timeout = max(0.1, min(_AGENT_TIMEOUT, (deadline - time.monotonic()) / 2))  # to know who was silent
            try:
                agent = stack.enter_context(contextlib.closing(SocketAgent(target.identity_agent, timeout)))
                agent_keys = agent.get_keys()
            except (OSError, paramiko.SSHException) as error:
                reasons.append(f"{_NO_AGENT} at {target.identity_agent}: {error}")
        for name, key in offers(target, agent_keys, files, reasons):
            if not transport.is_active() or time.monotonic() > deadline:
                lost = tried or not transport.is_active()
                reasons.append("the server closed the connection" if lost else "the time limit was reached")
                break
            tried.append(name)
            transport.auth_timeout = max(0.1, deadline - time.monotonic())
            try:
                further = transport.auth_publickey(target.user, key)
            except paramiko.BadAuthenticationType as error:
                reasons.append(f"it accepts only {', '.join(error.allowed_types)}, no keys")
                break
            except (paramiko.SSHException, EOFError, OSError) as error:
                if isinstance(error, SilentAgentError):  # it hangs, or waits in a prompt
                    tried.pop()
                    reasons.append(f"{_NO_AGENT} at {target.identity_agent}: it did not sign with {name}")
                    break
                if not isinstance(error, paramiko.AuthenticationException):
                    reasons.append(f"{name}: {error}")
                continue
            if not further:
                return
            accepted.append(name)
            if "publickey" not in further:
                reasons.append(f"it requires {', '.join(further)} as well")
                break
    if accepted:
        offered = f"accepted {' and '.join(accepted)} for user {target.user}, which is not enough"
    else:
        offered = f"rejected all keys for user {target.user} ({', '.join(tried)})" if tried else "no ssh key to offer"
    raise AuthFailed(target.alias, "; ".join([offered, *reasons]), _fix(target, reasons))


def _fix(target: SshTarget, reasons: Sequence[str]) -> str:
    for reason in reasons:
        if "is encrypted" in reason:
            return f"add it to your ssh-agent: ssh-add {shlex.quote(reason.split(' is encrypted')[0])}"
        if "permissions are too open" in reason:
            return f"run: chmod 600 {shlex.quote(reason.split(' is ignored')[0])}"
        if reason.startswith(_NO_AGENT):
            return (
                "`ssh-add -l` must list your keys: restart your ssh-agent and set SSH_AUTH_SOCK, or confirm its prompt"
            )
        if reason.startswith("it requires "):
            only = "let this user log in with a key alone (AuthenticationMethods publickey in its sshd_config)"
            return f"{only}: nobody is asked for a password or a second factor, and no ControlMaster is used for nodes"
        if reason.startswith("it accepts only "):
            return "its sshd must accept keys (PubkeyAuthentication yes in sshd_config): nobody is asked for a password"
        if "closed the connection" in reason:
            return "too many keys: set IdentitiesOnly yes and IdentityFile for this host in your ssh config"
    return f"only key authentication is supported; add your key there: {target.typed(program=['ssh-copy-id'])}"
