"""known_hosts as OpenSSH reads it: keys that a host may have, algorithms to request, verification of its key.

sshd(8), SSH_KNOWN_HOSTS FILE FORMAT.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import paramiko

from launcher.errors import HostKeyChanged, HostKeyUnknown
from launcher.node.ssh.config import SshTarget

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")  # of an ssh-rsa key; any other type signs under its own name
_ECDSA = tuple(f"ecdsa-sha2-nistp{bits}" for bits in (256, 384, 521))
HOST_KEY_ALGORITHMS = ("ssh-ed25519", *_ECDSA, *_RSA_SIGNATURES)
CERTIFIED = tuple(f"{name}-cert-v01@openssh.com" for name in HOST_KEY_ALGORITHMS)  # see certificates.py
_PATTERN = re.compile(r"[*?!]")


@dataclass(frozen=True)
class KnownKey:
    """A line of a known_hosts file that matches the target."""

    type: str
    blob: bytes
    marker: str  # "@revoked", "@cert-authority" or none
    location: str  # file:line
    exact: bool  # it also matches the target's port, if that is not 22


class KeyVerdict(str, Enum):
    """The result of comparing a server's host key with the known ones."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True)
class KeyFinding:
    verdict: KeyVerdict
    locations: tuple[str, ...] = ()  # of the lines that it is based on


def load(target: SshTarget) -> list[KnownKey]:
    """Return the target's known keys; a missing file has none. Raises HostKeyUnknown for a file that is not readable.

    The files are read for every connection: this process or another may have added the host since.
    """
    texts = []
    for file in (*target.known_hosts, *target.global_known_hosts):
        try:
            texts.append((file, Path(file).read_text(encoding="utf-8", errors="replace")))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            what = f"its host key cannot be checked: {error}"
            raise HostKeyUnknown(target.alias, what, "make the file readable") from error
    return parse(target, texts)


def parse(target: SshTarget, texts: Iterable[tuple[str, str]]) -> list[KnownKey]:
    """Return the keys of a target in (file, text) pairs; other lines are ignored, as by OpenSSH.

    If `[host]:port` has none, return those of `host`, as OpenSSH does.
    """
    bare = target.host_key_alias or target.hostname
    found = []
    for file, text in texts:
        for number, line in enumerate(text.splitlines(), 1):
            fields = line.split()
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if len(fields) < 3 or fields[0].startswith("#"):
                continue
            exact = matches(fields[0], target.known_as)
            if exact or (bare != target.known_as and matches(fields[0], bare)):
                with contextlib.suppress(ValueError):
                    blob = base64.b64decode(fields[2], validate=True)
                    found.append(KnownKey(fields[1], blob, marker, f"{file}:{number}", exact))
    return [key for key in found if key.exact] or found


def matches(names: str, host: str) -> bool:
    """Whether a known_hosts name field matches `host`: `name` or `[name]:port`."""
    if names.startswith("|1|"):
        with contextlib.suppress(ValueError):  # a malformed line matches no host
            salt, digest = (base64.b64decode(field, validate=True) for field in names.split("|")[2:])
            return hmac.digest(salt, host.encode(), "sha1") == digest
        return False
    names, host = names.lower(), host.lower()
    if not _PATTERN.search(names):
        return host in names.split(",")
    hit = False
    for raw in names.split(","):
        if matches_pattern(host, raw.removeprefix("!")):
            if raw.startswith("!"):
                return False
            hit = True
    return hit


def matches_pattern(host: str, pattern: str) -> bool:
    """Whether a host matches a pattern with * and ?. Brackets are literal, which fnmatch would read as [seq]."""
    return fnmatch.fnmatchcase(host, pattern.replace("[", "[[]"))


def judge(known: Sequence[KnownKey], key_type: str, blob: bytes) -> KeyFinding:
    """Compare the server's host key with the known ones."""
    revoked = [key.location for key in known if key.marker == "@revoked" and key.blob == blob]
    if revoked:
        return KeyFinding(KeyVerdict.REVOKED, tuple(revoked))
    plain = [key for key in known if not key.marker]
    same = [key.location for key in plain if key.blob == blob]
    if same:
        return KeyFinding(KeyVerdict.KNOWN, tuple(same))
    other = tuple(key.location for key in plain if key.exact and key.type == key_type)
    return KeyFinding(KeyVerdict.CHANGED, other) if other else KeyFinding(KeyVerdict.UNKNOWN)


def order_algorithms(target: SshTarget, known: Sequence[KnownKey]) -> list[str]:
    """Return the algorithms to request, of those that the user allows: certificates if an authority is known first."""
    held = {name for key in known if not key.marker for name in signatures(key.type)}
    certified = CERTIFIED if any(key.marker == "@cert-authority" for key in known) else ()
    ours = [*certified, *sorted(HOST_KEY_ALGORITHMS, key=lambda name: name not in held)]
    return [name for name in ours if name in target.host_key_algorithms] or ours


def signatures(key_type: str) -> tuple[str, ...]:
    """Return the signature algorithms of a key type, best first."""
    return _RSA_SIGNATURES if key_type == "ssh-rsa" else (key_type,)


def fingerprint(blob: bytes) -> str:
    """Return the fingerprint as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def type_of(blob: bytes) -> str:
    """Return the key type in a public key blob (RFC 4253, 6.6). Raises ValueError for other bytes."""
    length = int.from_bytes(blob[:4], "big")
    if len(blob) < 4 + length or not 0 < length < 100:
        raise ValueError("not an ssh public key")
    return blob[4 : 4 + length].decode("ascii")


def verify(target: SshTarget, known: Sequence[KnownKey], key_type: str, blob: bytes) -> None:
    """Verify the server's host key as OpenSSH does. Raises HostKeyUnknown, HostKeyChanged."""
    finding = judge(known, key_type, blob)
    shown = f"{key_type} {fingerprint(blob)}"
    if finding.verdict is KeyVerdict.REVOKED:
        what = f"its host key ({shown}) is revoked in {', '.join(finding.locations)}"
        fix = "do not connect: ask the node's administrator for its new host key"
        raise HostKeyChanged(target.alias, what, fix)
    if finding.verdict is KeyVerdict.CHANGED and target.strict != "no":
        file = next(iter(target.known_hosts), "~/.ssh/known_hosts")
        what = f"its host key ({shown}) differs from the known one in {', '.join(finding.locations)}: "
        what += "the host was reinstalled, or this is a man-in-the-middle attack"
        fix = "compare it with the output of `ssh-keygen -lf` on the node; if it is right, remove the old one: "
        fix += f"ssh-keygen -R '{target.known_as}' -f {file}"
        raise HostKeyChanged(target.alias, what, fix)
    if finding.verdict is KeyVerdict.UNKNOWN:
        if target.strict not in ("no", "accept-new"):
            asking = target.typed("true", program=("ssh", "-o", "StrictHostKeyChecking=ask"))
            fix = f"show it: ssh-keyscan -p {target.port} {target.hostname} | ssh-keygen -lf -; "
            fix += f"if it is the node's key, accept it: {asking}"
            raise HostKeyUnknown(target.alias, f"its host key ({shown}) is not in any known_hosts file", fix)
        remember(target, key_type, blob)


def remember(target: SshTarget, key_type: str, blob: bytes) -> None:
    """Append a new host's key to the user's first known_hosts file, as `StrictHostKeyChecking accept-new` does."""
    if not target.known_hosts or target.known_hosts[0] == "/dev/null":
        return
    name = paramiko.HostKeys.hash_host(target.known_as) if target.hash_known_hosts else target.known_as
    line = f"{name} {key_type} {base64.b64encode(blob).decode()}\n".encode()
    file = Path(target.known_hosts[0])
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # one write with O_APPEND: lines of concurrent processes are not mixed
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as out:
        out.write(line)
