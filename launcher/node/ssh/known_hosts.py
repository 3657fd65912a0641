"""known_hosts as OpenSSH reads it: which keys a host may show, which algorithms to ask for, what a shown key means.

sshd(8), SSH_KNOWN_HOSTS FILE FORMAT.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import hashlib
import hmac
import os
import re
import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from launcher.errors import HostKeyChanged, HostKeyUnknown
from launcher.node.ssh.config import DEFAULT_PORT, Target, ssh_options

HOST_KEY_ALGORITHMS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
# What a key of one type signs with; any other type signs under its own name.
_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")
_PATTERN = re.compile(r"[*?!]")


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file."""

    names: str  # patterns as written, hashed ones too
    type: str
    blob: bytes
    marker: str = ""  # "@revoked", "@cert-authority" or none
    place: str = ""  # file:line


class Verdict(str, Enum):
    """What a host key that was shown means."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    places: tuple[str, ...] = ()  # the lines that say so


def parse(text: str, file: str = "") -> list[KnownKey]:
    """The lines that hold a key; other lines are ignored, as by OpenSSH."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        marker = ""
        if fields and fields[0].startswith("@"):
            marker, fields = fields[0], fields[1:]
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        found.append(KnownKey(fields[0], fields[1], blob, marker, f"{file}:{number}"))
    return found


class KnownHosts:
    """Known keys by host name: with hundreds of nodes not each of them looks at every line of a file."""

    def __init__(self, keys: Sequence[KnownKey] = ()) -> None:
        self._keys = keys
        self._plain: dict[str, list[int]] = {}
        self._hashed: list[tuple[int, bytes, bytes]] = []
        self._patterns: list[int] = []
        for place, key in enumerate(keys):
            if key.names.startswith("|"):
                if halves := _unhash(key.names):
                    self._hashed.append((place, *halves))
            elif _PATTERN.search(key.names):
                self._patterns.append(place)
            else:
                for name in set(key.names.lower().split(",")):
                    self._plain.setdefault(name, []).append(place)

    def of(self, host: str) -> list[KnownKey]:
        """In the order of their lines. host: `name` or `[name]:port`."""
        places = list(self._plain.get(host.lower(), ()))
        places += [place for place, salt, digest in self._hashed if _digest(salt, host) == digest]
        places += [place for place in self._patterns if matches(self._keys[place].names, host.lower())]
        return [self._keys[place] for place in sorted(places)]


class KnownHostsFiles:
    """known_hosts files, read once for all nodes and again when they have changed. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[tuple[str, ...], tuple[list[object], KnownHosts]] = {}

    def load(self, files: tuple[str, ...]) -> KnownHosts:
        """All keys of these files; one that is not there holds none. Raises OSError for one that cannot be read."""
        with self._lock:
            states = [_state(file) for file in files]
            before = self._read.get(files)
            if before is None or before[0] != states:
                found: list[KnownKey] = []
                for file in files:
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        found += parse(Path(file).read_text(encoding="utf-8", errors="replace"), file)
                before = self._read[files] = states, KnownHosts(found)
            return before[1]


def _state(file: str) -> object:
    """Another one when the file has changed."""
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def matches(names: str, host: str) -> bool:
    """Whether a known_hosts name field, not hashed, means `host` (`name` or `[name]:port`, lower case)."""
    hit = False
    for raw in names.lower().split(","):
        pattern = raw.removeprefix("!")
        # fnmatch knows [seq], known_hosts does not: there it is the host's own bracket
        if pattern and fnmatch.fnmatchcase(host, pattern.replace("[", "[[]")):
            if raw.startswith("!"):
                return False
            hit = True
    return hit


def _unhash(names: str) -> tuple[bytes, bytes] | None:
    """(salt, digest) of `|1|salt|digest`; None for a torn line."""
    fields = names.split("|")
    if len(fields) != 4 or fields[1] != "1":
        return None
    try:
        return base64.b64decode(fields[2], validate=True), base64.b64decode(fields[3], validate=True)
    except (binascii.Error, ValueError):
        return None


def _digest(salt: bytes, host: str) -> bytes:
    return hmac.digest(salt, host.encode(), "sha1")


def known_for(target: Target, known: KnownHosts) -> list[KnownKey]:
    """Keys of this target. None under `[host]:port`: those under `host`, as OpenSSH falls back."""
    exact = known.of(target.known_as)
    if exact or target.host_key_alias or target.port == DEFAULT_PORT:
        return exact
    return known.of(target.hostname.lower())


def judge(target: Target, known: KnownHosts, key_type: str, blob: bytes) -> Finding:
    """What the key that the server showed means."""
    mine = known_for(target, known)
    revoked = [key.place for key in mine if key.marker == "@revoked" and key.blob == blob]
    if revoked:
        return Finding(Verdict.REVOKED, tuple(revoked))
    plain = [key for key in mine if not key.marker]
    same = [key.place for key in plain if key.blob == blob]
    if same:
        return Finding(Verdict.KNOWN, tuple(same))
    exact = known.of(target.known_as)
    other = tuple(key.place for key in exact if key.type == key_type and not key.marker)
    return Finding(Verdict.CHANGED, other) if other else Finding(Verdict.UNKNOWN)


def order_algorithms(target: Target, known: KnownHosts, ours: Sequence[str]) -> list[str]:
    """Our host key algorithms, those first whose key type known_hosts already holds, within what the user allows."""
    held = {name for key in known_for(target, known) if not key.marker for name in signatures(key.type)}
    allowed = [name for name in ours if not target.host_key_algorithms or name in target.host_key_algorithms]
    return sorted(allowed or ours, key=lambda name: name not in held)


def signatures(key_type: str) -> tuple[str, ...]:
    """The signature algorithms of a key type, best first."""
    return _RSA_SIGNATURES if key_type == "ssh-rsa" else (key_type,)


def fingerprint(blob: bytes) -> str:
    """As `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def type_of(blob: bytes) -> str:
    """The key type that a public key blob names (RFC 4253, 6.6). Raises ValueError for other bytes."""
    length = int.from_bytes(blob[:4], "big")
    if len(blob) < 4 + length or not 0 < length < 100:
        raise ValueError("not an ssh public key")
    return blob[4 : 4 + length].decode("ascii")


def prove(target: Target, known: KnownHosts, key_type: str, blob: bytes, ssh_config: str | None) -> None:
    """What OpenSSH does with the key that the server showed. Raises HostKeyUnknown, HostKeyChanged."""
    finding = judge(target, known, key_type, blob)
    shown = f"{key_type} {fingerprint(blob)}"
    if finding.verdict is Verdict.REVOKED:
        raise HostKeyChanged(
            target.alias,
            f"the host key it shows ({shown}) is revoked in {', '.join(finding.places)}",
            "do not connect: ask the node's administrator for its new host key",
        )
    if finding.verdict is Verdict.CHANGED and target.strict != "no":
        file = next(iter(target.known_hosts), "~/.ssh/known_hosts")
        raise HostKeyChanged(
            target.alias,
            f"it shows another host key ({shown}) than {', '.join(finding.places)} says: "
            "the host was reinstalled, or this is a man-in-the-middle attack",
            f"compare with `ssh-keygen -lf` on the node; when right: ssh-keygen -R '{target.known_as}' -f {file}",
        )
    if finding.verdict is Verdict.UNKNOWN:
        if target.strict not in ("no", "accept-new"):
            options = [*ssh_options(ssh_config), "-o", "StrictHostKeyChecking=ask"]
            raise HostKeyUnknown(
                target.alias,
                f"its host key ({shown}) is in no known_hosts file",
                f"see it: ssh-keyscan -p {target.port} {target.hostname} | ssh-keygen -lf -; "
                f"when it is the node's own, accept it: {shlex.join(['ssh', *options, target.alias, 'true'])}",
            )
        remember(target, key_type, blob)


def remember(target: Target, key_type: str, blob: bytes) -> None:
    """Append a new host's key to the user's first known_hosts file, as `StrictHostKeyChecking accept-new` does."""
    if not target.known_hosts or target.known_hosts[0] == "/dev/null":
        return
    name = target.known_as
    if target.hash_known_hosts:
        salt = os.urandom(20)
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(_digest(salt, name)).decode()}"
    line = f"{name} {key_type} {base64.b64encode(blob).decode()}\n".encode()
    file = Path(target.known_hosts[0])
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # one write of O_APPEND: several launchers at once do not tear each other's lines
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)
