"""known_hosts as OpenSSH reads it: which keys a host may show, which algorithms to ask for, what a shown key means.

sshd(8), SSH_KNOWN_HOSTS FILE FORMAT. Files are read by `load`; everything else is pure.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from launcher.node.ssh.config import DEFAULT_PORT, Target

# What a key of one type signs with; a plain name signs as itself.
_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


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
    """The lines that hold a key; what is torn or unknown is passed over, as OpenSSH does."""
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


def load(files: Iterable[str]) -> list[KnownKey]:
    """All keys of these files; one that is not there holds none. Raises OSError for one that cannot be read."""
    found: list[KnownKey] = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        found += parse(text, file)
    return found


def matches(names: str, host: str) -> bool:
    """Whether a known_hosts name field speaks of `host` (`name` or `[name]:port`, lower case)."""
    if names.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part, validate=True) for part in names[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, host.encode(), hashlib.sha1).digest(), digest)
    hit = False
    for raw in names.lower().split(","):
        pattern = raw.removeprefix("!")
        # fnmatch knows [seq], known_hosts does not: there it is the host's own bracket
        if pattern and fnmatch.fnmatchcase(host, re.sub(r"\[", "[[]", pattern)):
            if raw.startswith("!"):
                return False
            hit = True
    return hit


def known_for(target: Target, keys: Sequence[KnownKey]) -> list[KnownKey]:
    """Keys that speak of this target. Nothing under `[host]:port`: those under `host`, as OpenSSH falls back."""
    exact = [key for key in keys if matches(key.names, target.known_as)]
    if exact or target.host_key_alias or target.port == DEFAULT_PORT:
        return exact
    return [key for key in keys if matches(key.names, target.hostname.lower())]


def judge(target: Target, keys: Sequence[KnownKey], key_type: str, blob: bytes) -> Finding:
    """What the key that the server showed means."""
    mine = known_for(target, keys)
    revoked = [key.place for key in mine if key.marker == "@revoked" and key.blob == blob]
    if revoked:
        return Finding(Verdict.REVOKED, tuple(revoked))
    plain = [key for key in mine if not key.marker]
    same = [key.place for key in plain if key.blob == blob]
    if same:
        return Finding(Verdict.KNOWN, tuple(same))
    exact = [key for key in plain if matches(key.names, target.known_as)]
    other = tuple(key.place for key in exact if key.type == key_type)
    return Finding(Verdict.CHANGED, other) if other else Finding(Verdict.UNKNOWN)


def order_algorithms(target: Target, keys: Sequence[KnownKey], ours: Sequence[str]) -> list[str]:
    """Our host key algorithms, those first whose key type known_hosts already holds, within what the user allows."""
    held = {name for key in known_for(target, keys) if not key.marker for name in signatures(key.type)}
    allowed = [name for name in ours if not target.host_key_algorithms or name in target.host_key_algorithms]
    return sorted(allowed or ours, key=lambda name: name not in held)


def signatures(key_type: str) -> tuple[str, ...]:
    """The signature algorithms of a key type, best first."""
    return _RSA_SIGNATURES if key_type == "ssh-rsa" else (key_type,)


def fingerprint(blob: bytes) -> str:
    """As `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def type_of(blob: bytes) -> str:
    """The key type that a public key blob names (RFC 4253, 6.6). Raises ValueError for what is no key."""
    length = int.from_bytes(blob[:4], "big")
    if len(blob) < 4 + length or not 0 < length < 100:
        raise ValueError("not an ssh public key")
    return blob[4 : 4 + length].decode("ascii")


def remember(target: Target, key_type: str, blob: bytes) -> None:
    """Append a new host's key to the user's first known_hosts file, as `StrictHostKeyChecking accept-new` does."""
    if not target.known_hosts or target.known_hosts[0] == "/dev/null":
        return
    name = target.known_as
    if target.hash_known_hosts:
        salt = os.urandom(20)
        digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    line = f"{name} {key_type} {base64.b64encode(blob).decode()}\n".encode()
    file = Path(target.known_hosts[0])
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # one write of O_APPEND: several launchers at once do not tear each other's lines
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)
