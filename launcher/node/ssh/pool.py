"""Every ssh connection of this process: one a server, shared by the nodes and jump hosts that are that server."""

from __future__ import annotations

import contextlib
import shlex
import threading
from dataclasses import replace

from launcher.errors import UsageError
from launcher.node.ssh.config import Target, parse_host, resolve, ssh_options
from launcher.node.ssh.link import Link, Shared
from launcher.node.ssh.plain import NotPlain, PlainConfig, read_config

CONNECT_TIMEOUT = 10.0  # seconds, where the user's ssh config sets no ConnectTimeout


class SshPool:
    """All links of this process, by what they connect to."""

    def __init__(self, ssh_config: str | None = None, connect_timeout: float = CONNECT_TIMEOUT) -> None:
        self.ssh_config = ssh_config
        self._shared = Shared(ssh_config, connect_timeout)
        self._lock = threading.Lock()
        self._links: dict[Target, Link] = {}
        self._targets: dict[str, Target] = {}
        self._read = False
        self._plain: PlainConfig | None = None
        self._watcher: threading.Thread | None = None

    def link(self, alias: str) -> Link:
        """The link to a host and to all its jump hosts, not connected yet.

        Raises UsageError for a name or a configuration that OpenSSH refuses, or jump hosts that lead in a circle.
        """
        link = self._link(alias, (), ())
        with self._lock:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="ssh keepalive", daemon=True)
                self._watcher.start()
        return link

    def in_hub(self, alias: str) -> bool:
        """Whether a greenlet may talk to this host: through a jump host, one that waits to send would stop the hub."""
        return not self._resolve(alias).proxy_jump

    def _link(self, alias: str, through: tuple[str, ...], before: tuple[Target, ...]) -> Link:
        """`through`: jump hosts in place of its own. `ssh -J a,b host` reaches host through b, and b through a."""
        target = self._resolve(alias)
        if through:
            target = replace(target, proxy_jump=through)
        if target.key in before:
            raise UsageError(alias, "its jump hosts lead in a circle", f"look at ProxyJump: ssh -G {alias}")
        jump = target.proxy_jump
        hop = self._link(jump[-1], jump[:-1], (*before, target.key)) if jump else None
        with self._lock:
            return self._links.setdefault(target.key, Link(self._shared, target, hop))

    def _resolve(self, alias: str) -> Target:
        if alias not in self._targets:
            self._targets[alias] = resolve(alias, self.ssh_config, plain=self._plain_config())
        return self._targets[alias]

    def _plain_config(self) -> PlainConfig | None:
        """The user's ssh config, read once; None for one that only OpenSSH understands."""
        with self._lock:
            if not self._read:
                self._read = True
                with contextlib.suppress(NotPlain):
                    self._plain = read_config(self.ssh_config)
            return self._plain

    def close(self) -> None:
        """End every connection; those behind a jump host first."""
        self._shared.closed.set()
        with self._lock:
            links = sorted(self._links.values(), key=lambda link: -link.depth)
        for link in links:
            link.close()

    def _watch(self) -> None:
        while not self._shared.closed.wait(2.0):
            with self._lock:
                links = list(self._links.values())
            for link in links:
                link.check_alive()


def open_ssh_argv(alias: str, ssh_config: str | None, command: list[str]) -> list[str]:
    """The OpenSSH client for bulk bytes: asks nothing, the fast cipher first, the remote command as one argument."""
    spec = parse_host(alias)
    port = ["-p", str(spec.port)] if spec.port is not None else []
    user = ["-l", spec.user] if spec.user else []
    options = ["-o", "BatchMode=yes", "-o", "Ciphers=^aes128-gcm@openssh.com", "-o", "ClearAllForwardings=yes"]
    return ["ssh", *ssh_options(ssh_config), *options, *user, *port, "--", spec.host, shlex.join(command)]
