"""An ssh server on localhost for tests: paramiko's, behind a relay that can drop, freeze and break connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko


class _Sessions(paramiko.ServerInterface):
    """Accepts every key; `sleep` never exits, `drip` and `flood` print forever, any other command exits with code 0."""

    def __init__(self, server: SshServer, transport: paramiko.Transport) -> None:
        self._server = server
        self._transport = transport
        self._given = self._tried = 0
        self._wanted, self._factors = server.wants, list(server.factors)

    def get_allowed_auths(self, username: str) -> str:
        return self._wanted

    def check_auth_none(self, username: str) -> int:
        self._server.methods.append("none")
        return paramiko.AUTH_SUCCESSFUL if self._server.accepts_none else paramiko.AUTH_FAILED

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self._server.methods.append("publickey")
        if self._factors and self._wanted == "publickey":
            self._wanted = self._factors.pop(0)
            return paramiko.AUTH_PARTIALLY_SUCCESSFUL
        self._tried += 1
        if self._tried >= self._server.most_tries:
            self._transport.close()
        refuses = self._server.accepts_none or self._server.wants != "publickey"
        refuses = refuses or self._server.accepts not in (None, key.asbytes())
        return paramiko.AUTH_FAILED if refuses else paramiko.AUTH_SUCCESSFUL

    def check_channel_pty_request(self, channel: paramiko.Channel, *_: object) -> bool:
        self._server.requests.append("pty")
        return True

    def check_channel_env_request(self, channel: paramiko.Channel, name: bytes, value: bytes) -> bool:
        return True

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        if not self._server.forwards:
            return paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        self._server.requests.append("forward")
        return paramiko.OPEN_FAILED_CONNECT_FAILED  # nothing listens on any port

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if self._server.refuse_sessions > 0:
            self._server.refuse_sessions -= 1
            return paramiko.OPEN_FAILED_RESOURCE_SHORTAGE
        if self._given >= self._server.most_sessions:
            return paramiko.OPEN_FAILED_RESOURCE_SHORTAGE
        self._given += 1
        self._server.sessions += 1
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self._server.requests.append(command.decode())
        if command.startswith((b"drip", b"flood")):
            threading.Thread(target=self._print, args=(channel, command.startswith(b"drip")), daemon=True).start()
        elif not command.startswith(b"sleep"):
            threading.Thread(target=self._end, args=(channel,), daemon=True).start()
        return True

    def _print(self, channel: paramiko.Channel, slowly: bool) -> None:
        _until_replied(channel)
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # until the client disconnects
            while True:
                channel.sendall(b"x" if slowly else b"x" * (1 << 16))
                time.sleep(0.1 * slowly)

    def _end(self, channel: paramiko.Channel) -> None:
        _until_replied(channel)
        channel.send_exit_status(0)
        channel.close()


def _until_replied(channel: paramiko.Channel) -> None:
    """Wait until the reply to the client's request is sent: the same thread then reads the answer to this question."""
    channel.get_transport().global_request("replied@tests", wait=True)


class SshServer:
    """`accepted`, `sessions`: numbers of connections and sessions so far.

    `drop`: how many of the next connections are closed before any data. `most_sessions`: of one connection, ever.
    `accepts_none`: logs everybody in without a key, and nobody with one. `wants`: the first method; `factors`: further
    ones after a key. `accepts`: the only key, if not None; `most_tries`: of keys, then the connection is closed.
    `forwards`: allows tunnels, which then fail.
    `methods`, `requests`: of clients so far, to log in (a method each) and in sessions (`pty`, `forward`, a command).
    """

    def __init__(self, folder: Path) -> None:
        self.key: paramiko.PKey = paramiko.ECDSAKey.generate()
        self.accepted = self.sessions = self.drop = self.refuse_sessions = 0
        self.most_sessions = self.most_tries = 1000
        self.accepts: bytes | None = None
        self.accepts_none = self.forwards = False
        self.wants: str = "publickey"
        self.factors: tuple[str, ...] = ()
        self.methods: list[str] = []
        self.requests: list[str] = []
        self.frozen = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._folder = folder
        paramiko.ECDSAKey.generate().write_private_key_file(str(folder / "id"))
        self.trust(self.key)
        threading.Thread(target=self._serve, daemon=True).start()

    def trust(self, key: paramiko.PKey) -> None:
        line = f"[127.0.0.1]:{self.port} {key.get_name()} {key.get_base64()}\n"
        (self._folder / "known_hosts").write_text(line)

    def config(self, **options: object) -> str:
        """An ssh config in which this server is `node`."""
        lines = ["Host *", *(f"{name} {value}" for name, value in options.items())]  # the first value counts
        lines += ["HostName 127.0.0.1", f"Port {self.port}", "User me", "IdentityAgent none"]
        lines += [f"IdentityFile {self._folder}/id", f"UserKnownHostsFile {self._folder}/known_hosts"]
        lines += ["GlobalKnownHostsFile /dev/null"]
        file = self._folder / "config"
        file.write_text("\n ".join(lines) + "\n")
        return str(file)

    def cut(self) -> None:
        """Close all open connections."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                outside, _ = self._listener.accept()
                self.accepted += 1
                if self.drop > 0:
                    self.drop -= 1
                    outside.close()
                    continue
                inside, ours = socket.socketpair()
                self._open += [outside, inside]
                for source, target in ((outside, inside), (inside, outside)):
                    threading.Thread(target=self._relay, args=(source, target), daemon=True).start()
                transport = paramiko.Transport(ours)
                transport.add_server_key(self.key)
                transport.start_server(threading.Event(), _Sessions(self, transport))

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.frozen.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    server = SshServer(folder)
    try:
        yield server
    finally:
        server.close()
