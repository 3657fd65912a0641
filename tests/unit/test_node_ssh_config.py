"""How to reach a host, from OpenSSH's configuration."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.node.ssh.config import (
    HostSpec,
    Resolver,
    SshTarget,
    aliases,
    open_ssh_argv,
    parse_answer,
    parse_host,
    resolve,
    split_paths,
    ssh_argv,
    typed,
)

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="no OpenSSH client")
HOME = pwd.getpwuid(os.getuid()).pw_dir
ANSWER = """user carol
hostname 10.1.2.3
port 2222
addressfamily inet
hashknownhosts yes
identitiesonly yes
stricthostkeychecking accept-new
serveraliveinterval 5
serveralivecountmax 2
hostkeyalgorithms ssh-ed25519,rsa-sha2-512
hostkeyalias cluster
identityfile ~/.ssh/id_%h
identityfile /keys/my key
globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2
userknownhostsfile /home/c d/known %d/.kh2
connecttimeout 7
identityagent $MY_AGENT
proxyjump a,u@b:33
"""


def read(answer: str, alias: str = "gpu", **environ: str) -> SshTarget:
    return parse_answer(parse_host(alias), alias, answer, environ)


def test_a_command_of_a_message_reaches_the_host_as_the_launcher_does() -> None:
    assert typed("gpu-a", None, "true") == "ssh gpu-a true"
    assert typed("me@10.0.0.1:2222", "/a b/c", "echo works") == "ssh -F '/a b/c' -p 2222 me@10.0.0.1 'echo works'"
    assert typed("[::1]:22", None, program=["ssh-copy-id"]) == "ssh-copy-id -p 22 ::1"


def test_every_relevant_option_is_used() -> None:
    target = read(ANSWER, MY_AGENT="/run/agent")
    assert (target.hostname, target.port, target.user) == ("10.1.2.3", 2222, "carol")
    assert target.identity_files == (f"{HOME}/.ssh/id_10.1.2.3", "/keys/my key")
    assert target.known_hosts == ("/home/c d/known", f"{HOME}/.kh2")
    assert target.proxy_jump == ("a", "u@b:33")
    assert target.identity_agent == "/run/agent"
    assert target.identities_only
    assert target.hash_known_hosts
    assert target.strict == "accept-new"
    assert target.connect_timeout == 7
    assert (target.alive_interval, target.alive_count) == (5, 2)
    assert target.host_key_algorithms == ("ssh-ed25519", "rsa-sha2-512")
    assert target.known_as == "cluster"


def test_without_output_openssh_defaults_apply() -> None:
    target = read("", "me@somewhere:2200", SSH_AUTH_SOCK="/tmp/agent")
    assert (target.user, target.hostname, target.port) == ("me", "somewhere", 2200)
    assert target.identity_agent == "/tmp/agent"
    assert target.known_hosts[0] == f"{HOME}/.ssh/known_hosts"
    assert target.strict == "ask"
    assert target.known_as == "[somewhere]:2200"


def test_proxy_command_tokens_are_expanded_and_none_means_none() -> None:
    assert read("hostname h1\nport 23\nproxycommand nc -x proxy %h %p %%\n").proxy_command == "nc -x proxy h1 23 %"
    assert read("proxycommand none\nproxyjump none\n").proxy_command == ""
    assert read("proxyjump none\n").proxy_jump == ()


def test_two_aliases_of_one_server_share_a_connection_and_two_users_do_not() -> None:
    one, two = read("hostname h\nuser u\n", "a"), read("hostname h\nuser u\n", "b")
    assert one == two
    assert one != read("hostname h\nuser v\n", "a")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("gpu-a", HostSpec("gpu-a")),
        ("me@gpu-a", HostSpec("gpu-a", "me")),
        ("me@gpu-a:2222", HostSpec("gpu-a", "me", 2222)),
        ("ssh://me@gpu-a:2222/", HostSpec("gpu-a", "me", 2222)),
        ("[fe80::1]:22", HostSpec("fe80::1", "", 22)),
        ("fe80::1", HostSpec("fe80::1")),
        ("me@corp@gpu-a", HostSpec("gpu-a", "me@corp")),
    ],
)
def test_host_spellings_that_are_accepted(text: str, spec: HostSpec) -> None:
    assert parse_host(text) == spec


@pytest.mark.parametrize(
    "text", ["", "@a", "a:", "a:0", "a:70000", "a:x", "-oProxyCommand=x", "a b", "a;b", "a`b", "-l@h"]
)
def test_invalid_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_host(text)


@given(st.text())
def test_an_accepted_host_is_never_an_option_or_a_shell_word(text: str) -> None:
    try:
        spec = parse_host(text)
    except ValueError:
        return
    argv = ssh_argv(spec, None, [])
    assert argv[-2] == "--"
    assert not argv[-1].startswith("-")
    assert not set(argv[-1]) & set(" ;|&`$<>\n\"'\\")


@given(st.text(), st.text())
def test_any_output_can_be_parsed(answer: str, value: str) -> None:
    read(answer)
    read("".join(f"{line.split()[0]} {value}\n" for line in ANSWER.splitlines()))


def test_paths_with_spaces_are_kept() -> None:
    assert split_paths("/a b/c /d ~/e f none") == ["/a b/c", "/d", "~/e f", "none"]


def test_bulk_transfers_use_the_same_config_no_prompts_and_a_quoted_command() -> None:
    argv = open_ssh_argv("me@gpu:23", "/my/config", ["docker", "load", "a b"])
    assert argv[:3] == ["ssh", "-F", "/my/config"]
    assert "-oBatchMode=yes" in argv
    assert argv[-4:] == ["23", "--", "gpu", "docker load 'a b'"]


@needs_ssh
def test_openssh_reads_what_only_it_understands(tmp_path: Path) -> None:
    file, included = tmp_path / "config", tmp_path / "more"
    included.write_text('Match exec "true"\n Port 2200\n')
    file.write_text(f"Include {included}\nHost gpu*\n HostName %h.example.org\n User carol\n")
    target = resolve("gpu1", str(file))
    assert (target.hostname, target.port, target.user) == ("gpu1.example.org", 2200, "carol")
    assert resolve("me@gpu1:23", str(file)).known_as == "[gpu1.example.org]:23"


@needs_ssh
def test_openssh_errors_are_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text("Bogus yes\n")
    with pytest.raises(UsageError, match=r"(?i)bad configuration option: bogus"):
        resolve("gpu1", str(file))


def test_without_an_openssh_client_its_defaults_apply_but_not_its_config_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert resolve("me@gpu1:23").port == 23
    with pytest.raises(UsageError, match="without the OpenSSH client"):
        resolve("gpu1", "/my/config")


@needs_ssh
def test_many_hosts_are_resolved_concurrently_and_each_once(tmp_path: Path) -> None:
    file, log = tmp_path / "config", tmp_path / "log"
    file.write_text(f'Match exec "echo %n >>{log}"\n User me\n')
    resolver = Resolver(str(file))
    names = [f"n{index}" for index in range(50)]
    answers = [resolver.begin(name) for name in names * 2]
    assert [answer().hostname for answer in answers] == names * 2
    assert sorted(log.read_text().split()) == sorted(names)


def test_a_refused_host_is_refused_for_every_caller() -> None:
    resolver = Resolver(None)
    for _ in range(2):
        with pytest.raises(UsageError, match="not a node"):
            resolver.begin("-oProxyCommand=x")()


def test_aliases_of_a_config_and_the_files_that_it_includes(tmp_path: Path) -> None:
    config, more = tmp_path / "config", tmp_path / "more"
    config.write_text(f"Host gpu-a *.lab !x\n User ada\nhost=gpu-b\nInclude {tmp_path}/m* {config}\nMatch host z\n")
    more.write_text('HOST "gpu-c" gpu-a\n')
    assert aliases(str(config)) == ["gpu-a", "gpu-b", "gpu-c"]
    assert aliases(str(tmp_path / "none")) == []
