"""known_hosts as OpenSSH reads it: which keys a host may show, which algorithms to ask for, what a shown key means.

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
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import paramiko

from launcher.errors import HostKeyChanged, HostKeyUnknown
from launcher.node.ssh.config import Target, ssh_options

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")  # of an ssh-rsa key; any other type signs under its own name
_ECDSA = tuple(f"ecdsa-sha2-nistp{bits}" for bits in (256, 384, 521))
HOST_KEY_ALGORITHMS = ("ssh-ed25519", *_ECDSA, *_RSA_SIGNATURES)
CERTIFIED = tuple(f"{name}-cert-v01@openssh.com" for name in HOST_KEY_ALGORITHMS)  # by an authority: certificates.py
_PATTERN = re.compile(r"[*?!]")


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file that means the target."""

    type: str
    blob: bytes
    marker: str  # "@revoked", "@cert-authority" or none
    place: str  # file:line
    exact: bool  # it names the target's port too, where that is not 22


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


def load(target: Target) -> list[KnownKey]:
    """What the target's files know of it; a missing file knows nothing. Raises HostKeyUnknown for one we may not read.

    Read for every connection: this process or another may have added the host since.
    """
    texts = []
    for file in (*target.known_hosts, *target.global_known_hosts):
        try:
            texts.append((file, Path(file).read_text(encoding="utf-8", errors="replace")))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            what = f"its host key cannot be checked: {error}"
            raise HostKeyUnknown(target.alias, what, "make that file readable for you") from error
    return parse(target, texts)


def parse(target: Target, texts: Iterable[tuple[str, str]]) -> list[KnownKey]:
    """The keys of a target in (file, text) pairs; other lines are ignored, as by OpenSSH.

    Where nothing is known under `[host]:port`: those under `host`, as OpenSSH falls back.
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
    """Whether a known_hosts name field means `host`: `name` or `[name]:port`."""
    if names.startswith("|1|"):
        with contextlib.suppress(ValueError):  # a torn line means no host
            salt, digest = (base64.b64decode(field, validate=True) for field in names.split("|")[2:])
            return hmac.digest(salt, host.encode(), "sha1") == digest
        return False
    names, host = names.lower(), host.lower()
    if not _PATTERN.search(names):
        return host in names.split(",")
    hit = False
    for raw in names.split(","):
        if like(host, raw.removeprefix("!")):
            if raw.startswith("!"):
                return False
            hit = True
    return hit


def like(host: str, pattern: str) -> bool:
    """Whether it is this pattern with * and ? in it. fnmatch knows [seq] too: here that is the host's own bracket."""
    return fnmatch.fnmatchcase(host, pattern.replace("[", "[[]"))


def judge(known: Sequence[KnownKey], key_type: str, blob: bytes) -> Finding:
    """What the key that the server showed means."""
    revoked = [key.place for key in known if key.marker == "@revoked" and key.blob == blob]
    if revoked:
        return Finding(Verdict.REVOKED, tuple(revoked))
    plain = [key for key in known if not key.marker]
    same = [key.place for key in plain if key.blob == blob]
    if same:
        return Finding(Verdict.KNOWN, tuple(same))
    other = tuple(key.place for key in plain if key.exact and key.type == key_type)
    return Finding(Verdict.CHANGED, other) if other else Finding(Verdict.UNKNOWN)


def order_algorithms(target: Target, known: Sequence[KnownKey]) -> list[str]:
    """To ask for, within what the user allows: certificates where an authority is known, then types of known keys."""
    held = {name for key in known if not key.marker for name in signatures(key.type)}
    certified = CERTIFIED if any(key.marker == "@cert-authority" for key in known) else ()
    ours = [*certified, *sorted(HOST_KEY_ALGORITHMS, key=lambda name: name not in held)]
    return [name for name in ours if name in target.host_key_algorithms] or ours


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


def prove(target: Target, known: Sequence[KnownKey], key_type: str, blob: bytes, ssh_config: str | None) -> None:
    """What OpenSSH does with the key that the server showed. Raises HostKeyUnknown, HostKeyChanged."""
    finding = judge(known, key_type, blob)
    shown = f"{key_type} {fingerprint(blob)}"
    if finding.verdict is Verdict.REVOKED:
        what = f"the host key it shows ({shown}) is revoked in {', '.join(finding.places)}"
        fix = "do not connect: ask the node's administrator for its new host key"
        raise HostKeyChanged(target.alias, what, fix)
    if finding.verdict is Verdict.CHANGED and target.strict != "no":
        file = next(iter(target.known_hosts), "~/.ssh/known_hosts")
        what = f"it shows another host key ({shown}) than {', '.join(finding.places)} says: "
        what += "the host was reinstalled, or this is a man-in-the-middle attack"
        fix = f"compare with `ssh-keygen -lf` on the node; when right: ssh-keygen -R '{target.known_as}' -f {file}"
        raise HostKeyChanged(target.alias, what, fix)
    if finding.verdict is Verdict.UNKNOWN:
        if target.strict not in ("no", "accept-new"):
            options = [*ssh_options(ssh_config), "-o", "StrictHostKeyChecking=ask"]
            fix = f"see it: ssh-keyscan -p {target.port} {target.hostname} | ssh-keygen -lf -; "
            fix += f"when it is the node's own, accept it: {shlex.join(['ssh', *options, target.alias, 'true'])}"
            raise HostKeyUnknown(target.alias, f"its host key ({shown}) is in no known_hosts file", fix)
        remember(target, key_type, blob)


def remember(target: Target, key_type: str, blob: bytes) -> None:
    """Append a new host's key to the user's first known_hosts file, as `StrictHostKeyChecking accept-new` does."""
    if not target.known_hosts or target.known_hosts[0] == "/dev/null":
        return
    name = paramiko.HostKeys.hash_host(target.known_as) if target.hash_known_hosts else target.known_as
    line = f"{name} {key_type} {base64.b64encode(blob).decode()}\n".encode()
    file = Path(target.known_hosts[0])
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # one write of O_APPEND: several launchers at once do not tear each other's lines
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as out:
        out.write(line)
