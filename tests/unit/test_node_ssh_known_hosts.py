"""known_hosts is interpreted as by OpenSSH."""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.node.ssh import known_hosts
from launcher.node.ssh.config import SshTarget
from launcher.node.ssh.known_hosts import (
    HOST_KEY_ALGORITHMS,
    KeyVerdict,
    KnownKey,
    judge,
    load,
    matches,
    order_algorithms,
    parse,
)


def blob(key_type: str, body: bytes) -> bytes:
    return struct.pack(">I", len(key_type)) + key_type.encode() + struct.pack(">I", len(body)) + body


ED, OTHER_ED = blob("ssh-ed25519", b"1" * 32), blob("ssh-ed25519", b"2" * 32)
RSA = blob("ssh-rsa", b"3" * 64)


def line(names: str, key: bytes) -> str:
    return f"{names} {known_hosts.type_of(key)} {base64.b64encode(key).decode()} a comment\n"


def hashed(name: str) -> str:
    salt = b"s" * 20
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def known_keys(target: SshTarget, text: str) -> list[KnownKey]:
    return parse(target, [("kh", text)])


HOST = SshTarget("gpu", "10.0.0.1")
PORT = SshTarget("gpu", "10.0.0.1", port=2222)


@pytest.mark.parametrize(
    ("known", "target", "verdict"),
    [
        ("", HOST, KeyVerdict.UNKNOWN),
        (line("10.0.0.1", ED), HOST, KeyVerdict.KNOWN),
        (line("a,10.0.0.1,b", ED), HOST, KeyVerdict.KNOWN),
        (line("10.0.0.*", ED), HOST, KeyVerdict.KNOWN),
        (line("10.0.0.*,!10.0.0.1", ED), HOST, KeyVerdict.UNKNOWN),
        (line(hashed("10.0.0.1"), ED), HOST, KeyVerdict.KNOWN),
        (line(hashed("10.0.0.2"), ED), HOST, KeyVerdict.UNKNOWN),
        (line("10.0.0.1", OTHER_ED), HOST, KeyVerdict.CHANGED),
        (line("10.0.0.1", OTHER_ED) + line("10.0.0.1", ED), HOST, KeyVerdict.KNOWN),
        (line("10.0.0.1", RSA), HOST, KeyVerdict.UNKNOWN),  # another key type: OpenSSH too treats it as a new host
        ("@revoked " + line("*", ED) + line("10.0.0.1", ED), HOST, KeyVerdict.REVOKED),
        ("@revoked " + line("*", OTHER_ED) + line("10.0.0.1", ED), HOST, KeyVerdict.KNOWN),
        ("@cert-authority " + line("*", ED), HOST, KeyVerdict.UNKNOWN),
        (line("[10.0.0.1]:2222", ED), PORT, KeyVerdict.KNOWN),
        (line(hashed("[10.0.0.1]:2222"), ED), PORT, KeyVerdict.KNOWN),
        (line("10.0.0.1", ED), PORT, KeyVerdict.KNOWN),  # "found matching key w/out port"
        (line("10.0.0.1", OTHER_ED), PORT, KeyVerdict.UNKNOWN),
        (line("[10.0.0.1]:2222", OTHER_ED) + line("10.0.0.1", ED), PORT, KeyVerdict.CHANGED),
        (line("cluster", ED), SshTarget("gpu", "10.0.0.1", host_key_alias="cluster"), KeyVerdict.KNOWN),
        (line("10.0.0.1", ED), SshTarget("gpu", "10.0.0.1", host_key_alias="cluster"), KeyVerdict.UNKNOWN),
        (
            line("Cluster", ED),
            SshTarget("gpu", "10.0.0.1", host_key_alias="CLUSTER"),
            KeyVerdict.KNOWN,
        ),  # case-insensitive
        ("|1|torn|\n" + line("|1|torn|", ED) + line("|2|YQ==|YQ==", ED), HOST, KeyVerdict.UNKNOWN),
        ("# " + line("10.0.0.1", ED) + "torn\n10.0.0.1 ssh-ed25519 !!!\n", HOST, KeyVerdict.UNKNOWN),
    ],
)
def test_verdicts(known: str, target: SshTarget, verdict: KeyVerdict) -> None:
    assert judge(known_keys(target, known), "ssh-ed25519", ED).verdict is verdict


def test_a_changed_key_names_the_line_of_the_old_one() -> None:
    known = parse(HOST, [("/home/me/.ssh/known_hosts", "# first\n" + line("10.0.0.1", OTHER_ED))])
    assert judge(known, "ssh-ed25519", ED).locations == ("/home/me/.ssh/known_hosts:2",)


def test_algorithms_of_known_keys_are_requested_first() -> None:
    order = order_algorithms(HOST, known_keys(HOST, line("10.0.0.1", RSA)))
    assert order[:2] == ["rsa-sha2-512", "rsa-sha2-256"]
    assert sorted(order) == sorted(HOST_KEY_ALGORITHMS)


def test_algorithms_that_the_user_disallows_are_not_offered() -> None:
    target = SshTarget("gpu", "h", host_key_algorithms=("rsa-sha2-512",))
    assert order_algorithms(target, []) == ["rsa-sha2-512"]


@given(st.text(), st.text(min_size=1))
def test_any_text_is_handled(text: str, name: str) -> None:
    keys = known_keys(HOST, text + "\n" + f"{name} ssh-ed25519 {base64.b64encode(ED).decode()}")
    judge(keys, "ssh-ed25519", ED)


def test_brackets_are_not_a_character_class() -> None:
    assert matches("[h]:22", "[h]:22")
    assert not matches("[h]:22", "h:22")


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    target = SshTarget("gpu", "10.0.0.1", known_hosts=(str(file),), global_known_hosts=(str(tmp_path / "none"),))
    assert load(target) == []
    file.write_text(line("10.0.0.1", ED))
    assert [key.location for key in load(target)] == [f"{file}:1"]


@pytest.mark.parametrize("hash_it", [False, True])
def test_a_recorded_host_is_known(tmp_path: Path, hash_it: bool) -> None:
    file = tmp_path / "new" / "known_hosts"
    target = SshTarget("gpu", "10.0.0.1", port=2222, known_hosts=(str(file),), hash_known_hosts=hash_it)
    known_hosts.remember(target, "ssh-ed25519", ED)
    assert judge(load(target), "ssh-ed25519", ED).verdict is KeyVerdict.KNOWN
    assert ("10.0.0.1" in file.read_text()) is not hash_it


def test_nothing_is_written_if_the_user_has_no_known_hosts_file() -> None:
    known_hosts.remember(SshTarget("gpu", "h", known_hosts=("/dev/null",)), "ssh-ed25519", ED)
    known_hosts.remember(SshTarget("gpu", "h"), "ssh-ed25519", ED)


@given(st.binary())
def test_an_invalid_key_blob_is_a_value_error(data: bytes) -> None:
    try:
        known_hosts.type_of(data)
    except ValueError:
        return
