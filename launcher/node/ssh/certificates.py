"""Host certificates, signed by an authority that known_hosts names (@cert-authority).

OpenSSH's PROTOCOL.certkeys; validity is checked as by sshkey_cert_check_host() of its sshkey.c.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import paramiko

from launcher.errors import HostKeyChanged
from launcher.node.ssh.config import SshTarget
from launcher.node.ssh.known_hosts import (
    HOST_KEY_ALGORITHMS,
    KeyVerdict,
    KnownKey,
    fingerprint,
    judge,
    matches_pattern,
    type_of,
)

_FOR_HOSTS = 2  # SSH2_CERT_TYPE_HOST
_KEY_PARTS = {"ssh-ed25519": 1}  # number of strings in a key of this type; two for the others


@dataclass(frozen=True)
class Certificate:
    """authority: the public key that signed it. fault: why it is not valid for this host now, "" if it is."""

    authority: bytes
    fault: str


def verify(target: SshTarget, known: Sequence[KnownKey], key: paramiko.PKey) -> bool:
    """Whether an authority in known_hosts signed the server's host key; if not, the key itself must be verified.

    Raises HostKeyChanged for a revoked authority, and for a certificate of a known one that is not valid.
    """
    if key.public_blob is None:
        return False
    found = read(key.public_blob.key_blob, target.host_key_alias or target.hostname, time.time())
    markers = {line.marker: line.location for line in known if line.blob == found.authority}
    if "@revoked" in markers:
        signer = fingerprint(found.authority)
        what = f"the authority that signed its host key ({signer}) is revoked in {markers['@revoked']}"
        fix = "do not connect: ask the node's administrator for a newly signed host key"
        raise HostKeyChanged(target.alias, what, fix)
    revoked = judge(known, key.get_name(), key.asbytes()).verdict is KeyVerdict.REVOKED
    if "@cert-authority" not in markers or revoked:
        return False
    if found.fault:
        what = f"its host certificate, signed by the authority in {markers['@cert-authority']}, {found.fault}"
        fix = "ask the node's administrator to sign its host key again; to check: ssh-keygen -Lf CERTIFICATE"
        raise HostKeyChanged(target.alias, what, fix)
    return True


def read(blob: bytes, host: str, now: float) -> Certificate:
    """Parse a certificate; accepts any bytes. now: time.time()."""
    message = paramiko.Message(blob)
    kind = message.get_string().decode(errors="replace").removesuffix("-cert-v01@openssh.com")
    for _ in range(1 + _KEY_PARTS.get(kind, 2)):  # a nonce and the key
        message.get_string()
    message.get_int64()  # serial number
    purpose = message.get_int()
    message.get_string()  # a name for logs
    principals = [name.decode(errors="replace") for name in _strings(message.get_string())]
    after, before = message.get_int64(), message.get_int64()
    critical = message.get_string()
    message.get_string()  # extensions: unknown ones may be ignored
    message.get_string()  # reserved
    authority = message.get_string()
    signed = message.get_so_far()
    fault = ""
    if not _has_signed(authority, signed, message.get_string()):
        fault = "has an invalid signature"
    elif purpose != _FOR_HOSTS:
        fault = "is not a host certificate"
    elif not after <= now < before:
        fault = "is not valid yet" if now < after else "has expired"
    elif critical:
        fault = "has unknown critical options"
    elif principals and not any(matches_pattern(host.lower(), name.lower()) for name in principals):
        fault = f"is for {', '.join(principals)}, not for {host}"
    return Certificate(authority, fault)


def _strings(data: bytes) -> Iterator[bytes]:
    message = paramiko.Message(data)
    while message.get_remainder():
        yield message.get_string()


def _has_signed(authority: bytes, data: bytes, signature: bytes) -> bool:
    try:
        if type_of(signature) not in HOST_KEY_ALGORITHMS:  # ssh-rsa: SHA-1
            return False
        key = paramiko.PKey.from_type_string(type_of(authority), authority)
        return bool(key.verify_ssh_sig(data, paramiko.Message(signature)))
    except (ValueError, ArithmeticError, paramiko.SSHException, paramiko.pkey.UnknownKeyType):
        return False
