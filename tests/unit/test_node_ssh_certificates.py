"""Host certificates are accepted as by OpenSSH; any bytes from a server are handled."""

from __future__ import annotations

import base64
import subprocess
import time
from pathlib import Path

import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import HostKeyChanged
from launcher.node.ssh.certificates import read, verify
from launcher.node.ssh.config import SshTarget
from launcher.node.ssh.known_hosts import CERTIFIED, HOST_KEY_ALGORITHMS, KnownKey, order_algorithms, parse

HOST = SshTarget("gpu", "gpu-7.cluster")


def keygen(*arguments: object) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, arguments)], check=True, capture_output=True)


def signed(folder: Path, *options: str, authority: str = "ed25519", kind: str = "ed25519") -> paramiko.PKey:
    """A host key with a certificate, as a server shows it. The authority's public half is in `folder`/ca.pub."""
    keygen("-t", authority, "-N", "", "-f", folder / "ca")
    keygen("-t", kind, "-N", "", "-f", folder / "host")
    keygen("-s", folder / "ca", "-I", "a host", *(options or ("-h", "-n", HOST.hostname)), folder / "host.pub")
    certificate = base64.b64decode((folder / "host-cert.pub").read_text().split()[1])
    classes = {"ed25519": paramiko.Ed25519Key, "ecdsa": paramiko.ECDSAKey, "rsa": paramiko.RSAKey}
    return classes[kind](data=certificate)


def known(folder: Path, marker: str = "@cert-authority", names: str = "*.cluster", key: str = "ca") -> list[KnownKey]:
    return parse(HOST, [("kh", f"{marker} {names} {(folder / f'{key}.pub').read_text()}")])


@pytest.mark.parametrize(("authority", "kind"), [("ed25519", "ecdsa"), ("ecdsa", "rsa"), ("rsa", "ed25519")])
def test_an_authority_may_sign_keys_of_every_type(tmp_path: Path, authority: str, kind: str) -> None:
    key = signed(tmp_path, authority=authority, kind=kind)
    assert verify(HOST, known(tmp_path), key)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("-h", "-n", "other.cluster"), "is for other.cluster, not for gpu-7.cluster"),
        (("-n", HOST.hostname), "is not a host certificate"),
        (("-h", "-V", "20200101:20210101"), "has expired"),
        (("-h", "-V", "20990101:20990201"), "is not valid yet"),
        (("-h", "-O", "critical:a@b=c"), "has unknown critical options"),
    ],
)
def test_a_certificate_that_is_not_valid_is_refused(tmp_path: Path, options: tuple[str, ...], fault: str) -> None:
    key = signed(tmp_path, *options)
    with pytest.raises(HostKeyChanged, match=f"signed by the authority in kh:1, {fault}"):
        verify(HOST, known(tmp_path), key)


@pytest.mark.parametrize("options", [("-h",), ("-h", "-n", "*.cluster"), ("-h", "-n", "a,GPU-7.Cluster")])
def test_names_in_a_certificate_are_patterns_and_optional(tmp_path: Path, options: tuple[str, ...]) -> None:
    key = signed(tmp_path, *options)
    assert verify(HOST, known(tmp_path), key)


def test_an_unknown_authority_is_ignored_and_a_revoked_one_is_refused(tmp_path: Path) -> None:
    key = signed(tmp_path)
    keygen("-t", "ed25519", "-N", "", "-f", tmp_path / "other")
    assert not verify(HOST, known(tmp_path, key="other"), key)
    assert not verify(HOST, known(tmp_path, names="*.elsewhere"), key)
    assert not verify(HOST, known(tmp_path, marker=""), key)
    assert not verify(HOST, known(tmp_path) + known(tmp_path, "@revoked", key="host"), key)  # known_hosts refuses it
    with pytest.raises(HostKeyChanged, match="revoked in kh:1"):
        verify(HOST, known(tmp_path) + known(tmp_path, "@revoked"), key)


def test_a_changed_byte_of_a_certificate_is_detected(tmp_path: Path) -> None:
    key = signed(tmp_path)
    assert key.public_blob is not None
    blob = key.public_blob.key_blob
    assert read(blob, HOST.hostname, time.time()).fault == ""
    for index in range(4, len(blob) - 4 - 83):  # up to its signature
        changed = blob[:index] + bytes([blob[index] ^ 1]) + blob[index + 1 :]
        assert read(changed, HOST.hostname, time.time()).fault, index


def test_certificates_are_requested_if_an_authority_is_known(tmp_path: Path) -> None:
    signed(tmp_path)
    assert order_algorithms(HOST, known(tmp_path)) == [*CERTIFIED, *HOST_KEY_ALGORITHMS]
    assert order_algorithms(HOST, known(tmp_path, marker="")) == list(HOST_KEY_ALGORITHMS)


@given(st.binary(max_size=400))
def test_any_bytes_are_handled(blob: bytes) -> None:
    assert read(blob, "h", 0.0).fault
