"""No option of a user's ssh config changes the session of a command: with the installed OpenSSH, and a server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import NodeUnreachable, UsageError
from launcher.model.forward import Forward
from launcher.node.ssh.config import SESSION_OPTIONS, open_ssh_argv, resolve
from launcher.node.ssh.connection import SshPool
from launcher.node.ssh.machine import SshMachine
from tests.ports import free_port
from tests.unit.ssh_server import SshServer, ssh_server

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no OpenSSH client")
# Every option of ssh_config(5), up to OpenSSH 10.5 and with Debian's: those that we set, and why the others do no harm.
OURS = (
    "AddKeysToAgent BatchMode ChannelTimeout Ciphers ClearAllForwardings ControlMaster ForkAfterAuthentication"
    " ForwardAgent ForwardX11 IgnoreUnknown LogLevel PermitLocalCommand RemoteCommand RequestTTY ServerAliveCountMax"
    " ServerAliveInterval SessionType StdinNull Tunnel UpdateHostKeys"
)
HARMLESS = {
    "chooses where an option applies": "Host Match Include Tag CanonicalDomains CanonicalizeFallbackLocal"
    " CanonicalizeHostname CanonicalizeMaxDots CanonicalizePermittedCNAMEs",
    "ends with the connection made or refused": "AddressFamily BindAddress BindInterface ConnectionAttempts"
    " ConnectTimeout Hostname IPQoS Port ProxyCommand ProxyJump ProxyUseFdpass RefuseConnection TCPKeepAlive User"
    " VersionAddendum",
    "verifies the server": "CASignatureAlgorithms CheckHostIP FingerprintHash GlobalKnownHostsFile HashKnownHosts"
    " HostKeyAlgorithms HostKeyAlias KnownHostsCommand NoHostAuthenticationForLocalhost RevokedHostKeys"
    " StrictHostKeyChecking UserKnownHostsFile VerifyHostKeyDNS",
    "logs in, and asks nothing with BatchMode": "CertificateFile EnableSSHKeysign GSSAPIAuthentication"
    " GSSAPIClientIdentity GSSAPIDelegateCredentials GSSAPIKeyExchange GSSAPIKexAlgorithms GSSAPIRenewalForcesRekey"
    " GSSAPIServerIdentity GSSAPITrustDns HostbasedAcceptedAlgorithms HostbasedAuthentication IdentitiesOnly"
    " IdentityAgent IdentityFile KbdInteractiveAuthentication KbdInteractiveDevices NumberOfPasswordPrompts"
    " PasswordAuthentication PKCS11Provider PreferredAuthentications PubkeyAcceptedAlgorithms PubkeyAuthentication"
    " RequiredRSASize SecurityKeyProvider",
    "encrypts or compresses": "Compression KexAlgorithms MACs RekeyLimit WarnWeakCrypto",
    "of forwardings, which are cleared": "DynamicForward ExitOnForwardFailure GatewayPorts LocalForward"
    " PermitRemoteOpen RemoteForward StreamLocalBindMask StreamLocalBindUnlink",
    "of X11, tunnels and local commands, which are off": "ForwardX11Timeout ForwardX11Trusted LocalCommand"
    " TunnelDevice XAuthLocation",
    "a shared connection that is open is used, and none is left": "ControlPath ControlPersist",
    "of a terminal, as the user wants it": "EnableEscapeCommandline EscapeChar ObscureKeystrokeTiming",
    "environment, as the login shell's": "SendEnv SetEnv",
    "output for a user who debugs, or not shown at this LogLevel": "LogVerbose SyslogFacility VisualHostKey",
}
HOSTILE = """IgnoreUnknown *
AddKeysToAgent ask
BatchMode no
ChannelTimeout session=1s
ControlMaster auto
ControlPath ~/never/%C
ControlPersist 1h
DynamicForward 1080
EscapeChar none
ExitOnForwardFailure yes
ForkAfterAuthentication yes
ForwardAgent yes
ForwardX11 yes
KbdInteractiveDevices pam
LocalCommand echo local
LocalForward 16006 localhost:6006
LogLevel DEBUG3
PermitLocalCommand yes
RemoteCommand tmux new -A -s work
RemoteForward 9000 localhost:9000
RequestTTY force
SendEnv LANG
ServerAliveInterval 3600
SessionType none
SetEnv A=b
StdinNull yes
Tunnel yes
TunnelDevice 3
UpdateHostKeys ask
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with ssh_server(tmp_path) as made:
        yield made


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for shared connections: the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def machine(server: SshServer, sockets: Path) -> Iterator[SshMachine]:
    config = Path(server.config())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hostile = HOSTILE.replace("16006", str(taken.getsockname()[1])).replace("~/never", str(sockets))
        config.write_text(config.read_text() + hostile)
        pool = SshPool(str(config), 30)
        yield SshMachine("a", "node", pool)
        pool.close()


def _settings(argv: list[str]) -> dict[str, str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.lower().splitlines() if " " in line)


def test_every_option_is_set_or_known_to_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(HOSTILE)
    known = {option.lower() for names in (OURS, *HARMLESS.values()) for option in names.split()}
    assert set(_settings(["ssh", "-F", str(file), "-G", "node"])) - known == set()


def test_what_we_set_wins(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(HOSTILE)
    argv = open_ssh_argv("node", str(file), ["true"])
    ours = dict(word[2:].lower().split("=", 1) for word in argv if word.startswith("-o"))
    assert set(ours) == set(OURS.lower().split())
    found = _settings([*argv[: argv.index("--")], "-G", "node"])
    same = {"no": "false", "none": None}
    for name, value in ours.items():
        if name not in ("ciphers", "ignoreunknown"):  # added to the defaults; not shown
            assert found.get(name) in (value, same.get(value), None if name == "channeltimeout" else value), name
    assert not {"localforward", "remoteforward", "dynamicforward"} & set(found)


def test_an_openssh_that_lacks_an_option_ignores_it(tmp_path: Path) -> None:
    """`Unheard` stands for SessionType and others before OpenSSH 8.7; the user's own list is not replaced."""
    assert SESSION_OPTIONS[0] == "IgnoreUnknown=*"
    file = tmp_path / "config"
    file.write_text("IgnoreUnknown UseKeychain\nUseKeychain yes\n")
    argv = open_ssh_argv("node", str(file), ["true"])
    _settings([*argv[: argv.index("--")], "-oUnheard=no", "-G", "node"])
    file.write_text("UseKeychain yes\n")
    with pytest.raises(UsageError, match=r"(?i)bad configuration option: usekeychain"):
        resolve("node", str(file))


def _interact(machine: SshMachine, *, ports: tuple[Forward, ...] = ()) -> int:
    return machine.interact(["id", "-u"], terminal=False, interrupt=lambda: None, ports=ports)


def test_a_command_of_the_ssh_program_is_ours_alone(
    server: SshServer, machine: SshMachine, sockets: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _interact(machine) == 0
    assert server.requests == ["id -u"]
    assert capfd.readouterr() == ("", "")
    assert not list(sockets.iterdir())


def test_a_port_is_forwarded_beside_a_local_forward_of_the_config(server: SshServer, machine: SshMachine) -> None:
    server.forwards = True
    port = free_port()
    assert _interact(machine, ports=(Forward(port, 8888),)) == 0
    assert server.requests == ["forward", "id -u"]
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UsageError, match=f"cannot listen on port {port}"):
        _interact(machine, ports=(Forward(port, 8888),))


def test_an_sshd_that_forwards_nothing_is_an_error_before_the_command(server: SshServer, machine: SshMachine) -> None:
    with pytest.raises(NodeUnreachable, match="AllowTcpForwarding"):
        _interact(machine, ports=(Forward(free_port(), 8888),))
    assert server.requests == []
