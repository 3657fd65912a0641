"""ssh configs read here, held against what OpenSSH itself says of them."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.node.ssh.config import Target, resolve
from launcher.node.ssh.plain import NotPlain, read_config
from launcher.node.ssh.transport import HOST_KEY_ALGORITHMS

pytestmark = pytest.mark.skipif(shutil.which("ssh") != "/usr/bin/ssh", reason="no OpenSSH client in its usual place")

ALIASES = ("gpu1", "GPU1", "gpu2", "a.gpu1", "me@gpu1", "gpu1:2200", "me@10.0.0.1:2201", "::1")
VALUES = {
    "HostName": ("10.0.0.1", "Node.Example.org", "fe80::1"),
    "Port": ("22", "2222", "59999"),
    "User": ("carol", "root"),
    "IdentityFile": ("~/.ssh/other", "/keys/%h/%r", "none"),
    "CertificateFile": ("~/.ssh/other-cert.pub",),
    "IdentitiesOnly": ("yes", "no", "true", "false"),
    "IdentityAgent": ("none", "SSH_AUTH_SOCK", "/run/agent", "~/agent"),
    "ProxyJump": ("none", "jump", "carol@jump:2222,other"),
    "ProxyCommand": ("none", "nc %h %p", "ssh -W %h:%p jump"),
    "UserKnownHostsFile": ("~/.ssh/kh", "/a/kh /b/kh", "none", "/dev/null"),
    "GlobalKnownHostsFile": ("/etc/kh", "none"),
    "HashKnownHosts": ("yes", "no"),
    "HostKeyAlias": ("cluster",),
    "HostKeyAlgorithms": ("ssh-ed25519", "rsa-sha2-512,ecdsa-sha2-nistp256"),
    "StrictHostKeyChecking": ("yes", "no", "ask", "accept-new", "off"),
    "ConnectTimeout": ("0", "7"),
    "ServerAliveInterval": ("0", "15"),
    "ServerAliveCountMax": ("2",),
    "BindAddress": ("127.0.0.1",),
    "AddressFamily": ("any", "inet", "inet6"),
    "ForwardAgent": ("yes",),
    "LogLevel": ("ERROR",),
    "ControlMaster": ("auto",),
    "ControlPath": ("~/.ssh/%C",),
    "SendEnv": ("LANG LC_*",),
}
PATTERN = st.sampled_from(["*", "gpu1", "gpu?", "!gpu1", "*.gpu1", "GPU1", "10.0.*", "[g]pu1", "gpu2"])
HOST = st.lists(PATTERN, min_size=1, max_size=3).map(lambda words: f"Host {' '.join(words)}")
OPTION = st.sampled_from([(name, value) for name, values in VALUES.items() for value in values])
FORM = st.sampled_from(["{} {}", "  {}={}", "\t{}  =  {}  ", "{} \t{}\r"])
LINE = st.one_of(
    HOST,
    st.builds(lambda option, form: form.format(*option), OPTION, FORM),
    st.sampled_from(["", "# Port 1", "Include more"]),
)


def effective(target: Target) -> Target:
    """What we make of it: of all algorithms those that we know, and no key files of kinds that we do not."""
    allowed = tuple(name for name in HOST_KEY_ALGORITHMS if name in target.host_key_algorithms)
    return replace(
        target,
        host_key_algorithms=() if len(allowed) == len(HOST_KEY_ALGORITHMS) else allowed,
        identity_files=tuple(file for file in target.identity_files if not file.endswith(("/id_xmss", "/id_dsa"))),
    )


@settings(max_examples=150, deadline=None)
@example(["HostName Node.Example.org"], [])
@example(["CertificateFile ~/c.pub", "CertificateFile ~/c.pub", "IdentityFile /k", "IdentityFile /k"], [])
@given(st.lists(LINE, max_size=12), st.lists(LINE.filter(lambda line: "Include" not in line), max_size=4))
def test_a_config_says_to_us_what_it_says_to_openssh(lines: list[str], more: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, included = Path(folder, "config"), Path(folder, "more")
        file.write_text("\n".join(lines).replace("Include more", f"Include {included} {folder}/none*"))
        included.write_text("\n".join(more))
        plain = read_config(str(file))
        for alias in ALIASES[:: 1 + len(lines) % 3]:
            asked = resolve(alias, str(file), {})
            assert effective(resolve(alias, str(file), {}, plain)) == effective(asked)


@pytest.mark.parametrize("alias", ALIASES)
def test_this_machine_s_own_config_too(alias: str) -> None:
    try:
        plain = read_config(None)
    except NotPlain:
        pytest.xfail("it is not plain")
    assert effective(resolve(alias, None, {}, plain)) == effective(resolve(alias, None, {}))


@pytest.mark.parametrize(
    "line",
    [
        "Match all",
        "Match exec true",
        "CanonicalizeHostname yes",
        "HostName %h.example.org",
        'IdentityFile "/my keys/id"',
        "IdentityFile /keys/$HOME/id",
        "HostKeyAlgorithms +ssh-rsa",
        "ConnectTimeout 1m",
        "Port 65536",
        "Port ssh",
        "Bogus yes",
        "PKCS11Provider /lib/x.so",
        "Port 22 # usual",
        "IdentitiesOnly maybe",
        "Port",
    ],
)
def test_for_anything_else_openssh_is_asked(tmp_path: Path, line: str) -> None:
    file = tmp_path / "config"
    file.write_text(f"{line}\nUser carol\n")
    with pytest.raises(NotPlain):
        read_config(str(file)).options("gpu1")


def test_what_openssh_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text("Bogus yes\n")
    with pytest.raises(UsageError, match=r"(?i)bad configuration option: bogus"):
        resolve("gpu1", str(file), plain=read_config(str(file)))


def test_hosts_whose_options_are_plain_need_no_other_host_s(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text('Host odd\n IdentityFile "/a b"\nHost gpu*\n Port 2222\n')
    plain = read_config(str(file))
    assert plain.options("gpu1") == {"port": ["2222"]}
    with pytest.raises(NotPlain):
        plain.options("odd")


def test_a_user_without_a_name_is_for_openssh_to_speak_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(NotPlain):
        read_config(None)


def test_a_file_that_is_missing_or_circular_is_for_openssh_to_speak_of(tmp_path: Path) -> None:
    with pytest.raises(NotPlain):
        read_config(str(tmp_path / "none"))
    circle = tmp_path / "circle"
    circle.write_text(f"Include {circle}\n")
    with pytest.raises(NotPlain):
        read_config(str(circle))


def test_hundreds_of_hosts_are_told_apart_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config"
    file.write_text("".join(f"Host n{place}\n Port {3000 + place}\n" for place in range(300)) + "Host *\n User me\n")
    plain = read_config(str(file))
    monkeypatch.setenv("PATH", os.devnull)  # no ssh to ask
    found = [resolve(f"n{place}", str(file), plain=plain) for place in range(300)]
    assert [(target.port, target.user) for target in found] == [(3000 + place, "me") for place in range(300)]
