"""How OpenSSH would reach a host: `ssh -G` prints it, a pure parser reads the output.

No other implementation handles `Match exec`, canonical names and tokens in the same way.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import pwd
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

from launcher.errors import NodeUnreachable, UsageError
from launcher.node.parallel import in_background

CONNECT_TIMEOUT = 10.0  # seconds, if the user's ssh config sets no ConnectTimeout
DEFAULT_PORT = 22
DEFAULT_IDENTITIES = tuple(f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk"))
DEFAULT_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
DEFAULT_GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
CLIENT_FAILED = 255  # exit code of the OpenSSH client if it cannot connect or the connection is lost
_SSH_G_TIMEOUT = 30.0  # seconds: a user's `Match exec` may be slow
_SSH_G_PARALLEL = 32  # each keeps some files open
_STRICT = {"true": "yes", "ask": "ask", "accept-new": "accept-new", "no": "no", "off": "no", "false": "no"}
_FAMILY = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_STRANGE = re.compile(r"[\s'\"`;&|<>$\\]")
_HOST = re.compile(
    r"(?:(?P<user>[^-].*)@)?"
    r"(?:\[(?P<bracketed>[^-\]][^\]]*)\]|(?P<host>[^-@:][^@:]*|[^-@]*:[^@]*:[^@]*))"  # two colons: IPv6 without a port
    r"(?::(?P<port>[0-9]{1,9}))?"
)
# What a user's ssh config sets for interactive logins must not change the session of a command. IgnoreUnknown comes
# first, as each release of OpenSSH knows more of these; the user's own mistakes are found by `ssh -G`, without it.
SESSION_OPTIONS = (
    *("IgnoreUnknown=*", "ChannelTimeout=none", "ClearAllForwardings=yes", "ControlMaster=no"),
    *("ForkAfterAuthentication=no", "ForwardAgent=no", "ForwardX11=no", "PermitLocalCommand=no", "RemoteCommand=none"),
    *("RequestTTY=no", "SessionType=default", "StdinNull=no", "Tunnel=no", "UpdateHostKeys=no"),
    *("ServerAliveInterval=10", "ServerAliveCountMax=3"),
)
_CLIENT_OPTIONS = (
    *SESSION_OPTIONS,
    *("AddKeysToAgent=no", "BatchMode=yes", "Ciphers=^aes128-gcm@openssh.com", "LogLevel=ERROR"),
)
_TOKEN = re.compile(r"%(.)|\$\{(\w+)\}")
_DIFFERENT = re.compile(r"[\n!'\\]")  # within single quotes fish interprets \\ and \', tcsh interprets ! and newlines
_DECODE = 'eval "exec $(printf %b "$1")"'


@dataclass(frozen=True)
class SshTarget:
    """An ssh server as OpenSSH would reach it. Paths are absolute, tokens expanded."""

    alias: str = field(compare=False)  # two aliases of a server share a connection
    hostname: str
    port: int = DEFAULT_PORT
    user: str = ""
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str = ""  # path of a socket; "" for none
    proxy_jump: tuple[str, ...] = ()  # first hop first
    proxy_command: str = ""
    known_hosts: tuple[str, ...] = ()  # the user's files; a new key is added to the first
    global_known_hosts: tuple[str, ...] = ()
    hash_known_hosts: bool = False
    host_key_alias: str = ""
    host_key_algorithms: tuple[str, ...] = ()
    strict: str = "ask"  # yes | accept-new | ask | no
    connect_timeout: float | None = None
    alive_interval: int = 0
    alive_count: int = 3
    bind_address: str = ""
    family: int = socket.AF_UNSPEC
    config: str | None = field(default=None, compare=False)  # the file that is used instead of the user's ssh config

    def typed(self, *command: str, program: Sequence[str] = ("ssh",)) -> str:
        return typed(self.alias, self.config, *command, program=program)

    @property
    def known_as(self) -> str:
        """Its name in known_hosts: its HostKeyAlias, else the host, with the port if that is not 22."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.hostname if self.port == DEFAULT_PORT else f"[{self.hostname}]:{self.port}"


@dataclass(frozen=True)
class HostSpec:
    """A host as a user writes it: `alias`, `user@host`, `user@host:port`, `ssh://user@host:port`, `[::1]:22`."""

    host: str
    user: str = ""
    port: int | None = None


def parse_host(text: str) -> HostSpec:
    """Raises ValueError with the reason."""
    found = _HOST.fullmatch(text.removeprefix("ssh://").rstrip("/") if text.startswith("ssh://") else text)
    if not found or _STRANGE.search(text) or not text.isprintable():
        raise ValueError("expected a host name, an ssh alias or user@host:port")
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{port} is not a port (1 to 65535)")
    return HostSpec(found["bracketed"] or found["host"], found["user"] or "", port)


def chosen_config(path: str | PathLike[str] | None) -> Path | None:
    """Return the ssh config to use instead of the user's, also after a change of the working directory: this one, else
    that of LAUNCHER_SSH_CONFIG.
    """
    chosen = path or os.environ.get("LAUNCHER_SSH_CONFIG")
    return Path(chosen).absolute() if chosen else None


def aliases(ssh_config: str | None) -> list[str]:
    """Return the hosts that the user's ssh config names, with the files that it includes; no patterns.

    Only for display and completion: what an alias means, `ssh -G` says.
    """
    folder = Path("~/.ssh").expanduser()
    waiting, read = [Path(ssh_config).expanduser() if ssh_config else folder / "config"], dict[Path, None]()
    found = dict[str, None]()
    while waiting:
        path = waiting.pop(0)
        if path in read or not path.is_file():
            continue
        read[path] = None
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, rest = re.sub(r"[\s=]+", " ", line.strip()).partition(" ")
            words = rest.replace('"', "").split()
            if key.lower() == "host":
                found |= dict.fromkeys(word for word in words if not set("*?!") & set(word))
            elif key.lower() == "include":  # also relative to ~/.ssh
                patterns = [str(folder / Path(word).expanduser()) for word in words]
                waiting += [Path(each) for pattern in patterns for each in sorted(glob.glob(pattern))]  # noqa: PTH207
    return [*found]


def ssh_options(ssh_config: str | None) -> list[str]:
    """Return the options for every OpenSSH program, so that all use the same configuration."""
    return ["-F", ssh_config] if ssh_config else []


def ssh_argv(spec: HostSpec, ssh_config: str | None, options: Sequence[str]) -> list[str]:
    user = ["-l", spec.user] if spec.user else []
    port = ["-p", str(spec.port)] if spec.port is not None else []
    return ["ssh", *ssh_options(ssh_config), *options, *user, *port, "--", spec.host]


def typed(alias: str, ssh_config: str | None, *command: str, program: Sequence[str] = ("ssh",)) -> str:
    """Return the command line with which a user reaches a host as the launcher does, for messages."""
    spec = parse_host(alias)
    port = ["-p", str(spec.port)] if spec.port is not None else []
    host = f"{spec.user}@{spec.host}" if spec.user else spec.host
    return shlex.join([*program, *ssh_options(ssh_config), *port, host, *command])


def open_ssh_argv(alias: str, ssh_config: str | None, command: Sequence[str], *options: str) -> list[str]:
    """Return the argv of the OpenSSH client, for bulk data and terminals; it never prompts.

    options: placed before ours, as ssh uses the first value of each. The remote command is one argument.
    """
    ours = [f"-o{option}" for option in _CLIENT_OPTIONS]
    return [*ssh_argv(parse_host(alias), ssh_config, [*options, *ours]), quote(command)]


def quote(argv: Sequence[str]) -> str:
    """Return a command as text that every login shell reads in the same way: sh, bash, zsh, fish, tcsh.

    Each argument is quoted; if shells differ, for a POSIX shell that the login shell starts.
    """
    plain = shlex.join(argv)
    if not any(_DIFFERENT.search(argument) for argument in argv):
        return plain
    octal = _DIFFERENT.sub(lambda found: f"\\0{ord(found[0]):03o}", plain)
    return f"sh -c '{_DECODE}' launcher '{octal}'"


class Resolver:
    """Runs `ssh -G` once for each alias. Thread-safe."""

    def __init__(self, ssh_config: str | None) -> None:
        self._ssh_config = ssh_config
        self._slots = threading.Semaphore(_SSH_G_PARALLEL)
        self._lock = threading.Lock()
        self._answers: dict[str, Callable[[], SshTarget]] = {}

    def begin(self, alias: str) -> Callable[[], SshTarget]:
        """Start in the background; call the returned function for the target, or the error (see resolve)."""
        with self._lock:
            if alias not in self._answers:
                self._answers[alias] = in_background(lambda: self._ask(alias))
            return self._answers[alias]

    def _ask(self, alias: str) -> SshTarget:
        with self._slots:
            return resolve(alias, self._ssh_config)


def resolve(alias: str, ssh_config: str | None = None) -> SshTarget:
    """Return how OpenSSH would reach `alias`; its defaults if it is not installed and no config file is given.

    Raises UsageError for a name or a configuration that OpenSSH rejects, NodeUnreachable if it does not respond.
    """
    try:
        spec = parse_host(alias)
    except ValueError as error:
        fix = "use an alias of your ssh config or user@host:port"
        raise UsageError(alias, f"not a node: {error}", fix) from error
    asked = typed(alias, ssh_config, program=("ssh", "-G"))
    try:
        argv = ssh_argv(spec, ssh_config, ["-G"])
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SSH_G_TIMEOUT, check=False)
    except (FileNotFoundError, NotADirectoryError) as error:  # PATH may hold anything
        if ssh_config:
            what = "cannot be read without the OpenSSH client"
            raise UsageError(ssh_config, what, "install it (Debian: openssh-client)") from error
        return parse_answer(spec, alias, "", os.environ)
    except subprocess.TimeoutExpired as error:
        what = f"`{asked}` did not exit within {_SSH_G_TIMEOUT:g} s"
        raise NodeUnreachable(alias, what, "check `Match exec` in your ssh config") from error
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()
        raise UsageError(ssh_config or "ssh config", f"OpenSSH rejects it: {message}", f"run: {asked}")
    return replace(
        parse_answer(spec, alias, done.stdout.decode(errors="surrogateescape"), os.environ), config=ssh_config
    )


def parse_answer(spec: HostSpec, alias: str, answer: str, environ: Mapping[str, str]) -> SshTarget:
    """Parse the output of `ssh -G`; missing values get OpenSSH's defaults. Other lines are ignored."""
    many: dict[str, list[str]] = {}
    for line in answer.splitlines():
        name, _, value = line.strip().partition(" ")
        if value:
            many.setdefault(name.lower(), []).append(value.strip())
    single = {name: values[0] for name, values in many.items()}
    hostname = single.get("hostname", spec.host).lower()
    port = _integer(single.get("port"), spec.port or DEFAULT_PORT)
    user = single.get("user", spec.user or _local_user().pw_name)
    jump = "" if single.get("proxyjump", "none") == "none" else single["proxyjump"]
    expand = _expander(spec, hostname, port, user, jump, single.get("hostkeyalias", spec.host), environ)

    def paths(name: str, default: Sequence[str]) -> tuple[str, ...]:
        written = split_paths(single[name]) if name in single else list(default)
        return tuple(expand(path) for path in written if path != "none")

    files = many.get("identityfile", list(DEFAULT_IDENTITIES))
    command = single.get("proxycommand", "none")
    return SshTarget(
        alias=alias,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=tuple(dict.fromkeys(expand(f) for f in files if f != "none")),
        identities_only=single.get("identitiesonly") == "yes",
        identity_agent=_agent(single.get("identityagent", "SSH_AUTH_SOCK"), environ, expand),
        proxy_jump=tuple(hop.strip() for hop in jump.split(",") if hop.strip()),
        proxy_command="" if command == "none" else expand(command),
        known_hosts=paths("userknownhostsfile", DEFAULT_KNOWN_HOSTS),
        global_known_hosts=paths("globalknownhostsfile", DEFAULT_GLOBAL_KNOWN_HOSTS),
        hash_known_hosts=single.get("hashknownhosts") == "yes",
        host_key_alias=single.get("hostkeyalias", ""),
        host_key_algorithms=tuple(a for a in single.get("hostkeyalgorithms", "").split(",") if a),
        strict=_STRICT.get(single.get("stricthostkeychecking", "ask"), "yes"),
        connect_timeout=_integer(single.get("connecttimeout"), 0) or None,
        alive_interval=_integer(single.get("serveraliveinterval"), 0),
        alive_count=_integer(single.get("serveralivecountmax"), 3),
        bind_address=single.get("bindaddress", ""),
        family=_FAMILY.get(single.get("addressfamily", "any"), socket.AF_UNSPEC),
    )


def _expander(
    spec: HostSpec, hostname: str, port: int, user: str, jump: str, key_alias: str, environ: Mapping[str, str]
) -> Callable[[str], str]:
    """Return a function that expands `~/`, %-tokens and ${VARIABLES} (ssh_config(5), TOKENS), except unknown ones."""
    here, local = socket.gethostname(), _local_user()
    tokens = {
        "%": "%",
        "C": hashlib.sha1(f"{here}{hostname}{port}{user}{jump}".encode(), usedforsecurity=False).hexdigest(),
        "d": local.pw_dir,
        "h": hostname,
        "i": str(local.pw_uid),
        "j": jump,
        "k": key_alias,
        "L": here.split(".")[0],
        "l": here,
        "n": spec.host,
        "p": str(port),
        "r": user,
        "u": local.pw_name,
    }

    def expand(value: str) -> str:
        if value == "~" or value.startswith("~/"):
            value = local.pw_dir + value[1:]
        return _TOKEN.sub(lambda found: (tokens if found[1] else environ).get(found[1] or found[2], found[0]), value)

    return expand


@functools.cache
def _local_user() -> pwd.struct_passwd:
    """Like OpenSSH, use the password database instead of $HOME."""
    return pwd.getpwuid(os.getuid())


def split_paths(value: str) -> list[str]:
    """Split paths that `ssh -G` prints unquoted, separated by spaces. A path starts with /, ~, %, $ or none."""
    found: list[str] = []
    for piece in value.split(" "):
        if found and not piece.startswith(("/", "~", "%", "$", "none")):
            found[-1] += f" {piece}"
        elif piece:
            found.append(piece)
    return found


def _agent(value: str, environ: Mapping[str, str], expand: Callable[[str], str]) -> str:
    if value == "none":
        return ""
    if value == "SSH_AUTH_SOCK":
        return environ.get("SSH_AUTH_SOCK", "")
    if value.startswith("$") and not value.startswith("${"):
        return environ.get(value[1:], "")
    return expand(value)


def _integer(value: str | None, default: int) -> int:
    return int(value) if value is not None and value.isascii() and value.isdigit() else default
