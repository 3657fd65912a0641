"""A cluster's login machine, reached with the ssh program, which can prompt for passwords and second factors.

All commands of this process share one authenticated connection (ControlMaster): the user's own if it is open, else one
that is closed when this process exits. Only its start can prompt.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence

from launcher.errors import LoginLost, NodeUnfit, NodeUnreachable
from launcher.model.forward import Forward
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.node.machine import OPEN_TIMEOUT, CommandStream, LocalMachine, LocalStream, abbreviate
from launcher.node.ssh.config import (
    CLIENT_FAILED,
    CONNECT_TIMEOUT,
    SESSION_OPTIONS,
    open_ssh_argv,
    parse_host,
    resolve,
    ssh_argv,
    typed,
)

_SESSIONS = 8  # sshd's own limit is 10 (MaxSessions): one keeps the connection open, one is for a terminal
_FOLLOWERS = 4  # of these sessions
_FOLLOWER_TIMEOUT = 1.0  # seconds; the caller tries again
_CHECK_TIMEOUT = 10.0
_IDLE = 10  # seconds until the connection of a killed process is closed
_LONGEST_FOLDER = 60  # a socket path has at most 104 bytes, and OpenSSH temporarily appends 17
_opened: dict[tuple[str, str | None], Login] = {}  # until this process exits: a sweep connects again for each run
_opening = threading.Lock()


def log_in(host: str, ssh_config: str | None, timeout: float = CONNECT_TIMEOUT, *, ask: bool = True) -> Login:
    """Return this process's connection to a host; open it if necessary.

    timeout: seconds to connect if the ssh config has no ConnectTimeout; answering a prompt may take longer. ask: let
    ssh prompt on the user's terminal. Raises NodeUnreachable, UsageError, NodeUnfit.
    """
    with _opening:
        known = _opened.get((host, ssh_config))
        if known is None or not known.is_open():
            if known is not None:
                known.close()
            known = _opened[host, ssh_config] = Login(host, ssh_config, timeout, ask=ask)
            atexit.register(known.close)
        return known


class Login:
    """A connection of the ssh program. Thread-safe."""

    def __init__(self, host: str, ssh_config: str | None, timeout: float, *, ask: bool) -> None:
        """Raises what log_in raises."""
        target = resolve(host, ssh_config)
        self.host = host
        self.user = target.user
        self.sessions = threading.Semaphore(_SESSIONS)
        self.followers = threading.Semaphore(_FOLLOWERS)
        self._ssh_config = ssh_config
        self._undo: contextlib.ExitStack | None = None  # cleanup, if this process opened the connection
        self._socket: tuple[str, ...] = ()  # the user's own ControlPath
        if not self.is_open():
            self._connect(target.connect_timeout or timeout, ask=ask)
        self._held = LocalStream(self.argv(["cat"]))  # its stdin ends with this process, even if it is killed

    def argv(self, command: Sequence[str], *options: str) -> list[str]:
        """Return the ssh argv of a remote command. It fails if the connection was lost, instead of opening another."""
        alone = ("-o", "ProxyCommand=false")
        return open_ssh_argv(self.host, self._ssh_config, command, *self._socket, *alone, *options)

    def typed(self, command: str) -> str:
        return typed(self.host, self._ssh_config, command)

    def is_open(self) -> bool:
        return self._control("check") == 0

    def close(self) -> None:
        """Close the connection, unless it is the user's own."""
        self._held.close()
        if self._undo:
            self._control("exit")
            self._undo.close()

    def _connect(self, timeout: float, *, ask: bool) -> None:
        """Return once ssh has logged in and runs in the background. Its prompts and messages go to the terminal."""
        temporary = tempfile.gettempdir()
        parent = temporary if len(temporary) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 - a private folder in it
        folder = tempfile.mkdtemp(prefix="launcher-", dir=parent)
        self._socket = ("-S", f"{folder}/ssh")
        settings = [*SESSION_OPTIONS, f"ControlPersist={_IDLE}", f"ConnectTimeout={timeout:.0f}"]
        settings += [] if ask else ["BatchMode=yes"]
        options = ["-f", "-N", "-M", *self._socket, *(f"-o{setting}" for setting in settings)]
        argv, none = ssh_argv(parse_host(self.host), self._ssh_config, options), subprocess.DEVNULL
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)  # also after a Ctrl-C
            try:
                done = subprocess.run(argv, stdout=none, stderr=None if ask else none, check=False)
            except FileNotFoundError as error:
                raise NodeUnfit("this machine", "has no ssh program", "install it (Debian: openssh-client)") from error
            if done.returncode:
                what = "ssh could not log in" + (" (its message is above)" if ask else " without a prompt")
                raise NodeUnreachable(self.host, what, f"run: {self.typed('true')}")
            self._undo = undo.pop_all()

    def _control(self, command: str) -> int:
        """Run `ssh -O` for the process that has the connection; return its exit code."""
        argv = ssh_argv(parse_host(self.host), self._ssh_config, [*self._socket, "-O", command])
        with contextlib.suppress(FileNotFoundError, subprocess.TimeoutExpired):
            stdin = subprocess.DEVNULL
            done = subprocess.run(argv, stdin=stdin, capture_output=True, timeout=_CHECK_TIMEOUT, check=False)
            return done.returncode
        return CLIENT_FAILED


class LoginStream(LocalStream):
    """Implements CommandStream with a session of the connection."""

    def __init__(self, argv: Sequence[str], machine: LoginMachine) -> None:
        super().__init__(machine.login.argv(argv))
        self._machine = machine
        self._ended_here = False
        self.budget = contextlib.ExitStack()  # semaphores to release when it is closed

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        found = super().receive(timeout)
        if found is None:
            self.exit_code()
        return found

    def exit_code(self) -> int:
        """Raises LoginLost."""
        code = super().exit_code()
        if code == CLIENT_FAILED and not self._ended_here:
            self._machine.check()
        return code

    def end(self) -> None:
        self._ended_here = True
        super().end()

    def close(self) -> None:
        self._ended_here = True
        super().close()
        self.budget.close()


class LoginMachine(LocalMachine):
    """Runs each command as `ssh HOST COMMAND`. All methods raise LoginLost if the connection is lost."""

    def __init__(self, node: str, login: Login, limits: AnswerLimits = DEFAULT_LIMITS) -> None:
        super().__init__(node, login.user, limits)
        self.login = login

    def typed(self, command: str) -> str:
        return self.login.typed(command)

    def check(self) -> None:
        """Raises LoginLost."""
        if not self.login.is_open():
            raise LoginLost(self.node, f"the ssh connection to {self.login.host} was lost", "run the command again")

    def open(self, argv: Sequence[str], *, lasting: bool = False) -> CommandStream:
        if not lasting:
            return super().open(argv)
        return self._start(argv, (self.login.followers, _FOLLOWER_TIMEOUT), (self.login.sessions, OPEN_TIMEOUT))

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> CommandStream:
        """Raises NodeUnreachable if no session becomes free in time."""
        stream = self._start(argv, (self.login.sessions, min(timeout, OPEN_TIMEOUT)))
        if not stdin:
            stream.end_input()
        return stream

    def interact(
        self,
        argv: Sequence[str],
        *,
        terminal: bool,
        interrupt: Callable[[], None],
        ports: Sequence[Forward] = (),  # noqa: ARG002 - the engine refuses them
    ) -> int:
        ssh = self.login.argv(argv, *(["-t"] if terminal else []))
        code = super().interact(ssh, terminal=terminal, interrupt=interrupt)
        if code == CLIENT_FAILED:
            self.check()
        return code

    def has_host_key(self, address: str, port: int, host_key: str, timeout: float) -> bool | None:  # noqa: ARG002
        return None

    def _start(self, argv: Sequence[str], *budgets: tuple[threading.Semaphore, float]) -> LoginStream:
        with contextlib.ExitStack() as held:
            for budget, timeout in budgets:
                if not budget.acquire(timeout=timeout):
                    what = f"no session for `{abbreviate(argv)}` was free on its ssh connection for {timeout:g} s"
                    raise NodeUnreachable(self.node, what, "run fewer commands at the same time")
                held.callback(budget.release)
            stream = LoginStream(argv, self)
            stream.budget = held.pop_all()
        return stream
