"""Keys, known_hosts and the ssh config with which tests reach the nodes, including aliases that fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bed.settings import NO_DOCKER, TRAINER
from tests.bed.shell import run


@dataclass(frozen=True)
class SshFiles:
    """The files below one state directory."""

    folder: Path

    @property
    def config(self) -> Path:
        """For `ssh -F` and LAUNCHER_SSH_CONFIG."""
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        """Every node's real host key."""
        return self.folder / "known_hosts"

    @property
    def key(self) -> Path:
        """The client key that every user of every node accepts."""
        return self.folder / "id_ed25519"

    @property
    def wrong_key(self) -> Path:
        """A client key that no node accepts."""
        return self.folder / "id_wrong"

    def host_key(self, index: int) -> Path:
        """The host key of node `index`, kept here so that a recreated node has the same key."""
        return self.folder / f"host_key_{index}"

    def make_keys(self, indices: list[int]) -> None:
        """Creates missing keys; existing keys are kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for path in [self.key, self.wrong_key, self.folder / "host_key_changed", *map(self.host_key, indices)]:
            if not path.exists():
                run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "launcher-bed", "-f", str(path)])

    def write(self, addresses: Mapping[int, str], blackhole: str, no_route: str) -> None:
        """Writes three known_hosts files (correct, empty, changed) and the config with all aliases."""
        changed = self.folder / "known_hosts_changed"
        empty = self.folder / "known_hosts_empty"
        public = {index: self.host_key(index).with_suffix(".pub").read_text().strip() for index in addresses}
        wrong = (self.folder / "host_key_changed.pub").read_text().strip()
        self.known_hosts.write_text("".join(f"{addresses[index]} {key}\n" for index, key in public.items()))
        changed.write_text("".join(f"{address} {wrong}\n" for address in addresses.values()))
        empty.write_text("")

        first = addresses[1]
        hosts = []
        for index, address in addresses.items():
            hosts.append(_host(f"node{index}", address))
            hosts.append(_host(f"node{index}-root", address, User="root"))
            hosts.append(_host(f"node{index}-nodocker", address, User=NO_DOCKER))
            hosts += [
                _host(f"node{index}-via-node{other}", address, ProxyJump=f"node{other}")
                for other in addresses
                if other != index
            ]
        hosts += [
            _host("refused", first, Port="1"),
            _host("blackhole", blackhole),
            _host("no-route", no_route),
            _host("no-such-host", "no-such-host.invalid"),
            _host("unknown-host-key", first, UserKnownHostsFile=str(empty)),
            _host("changed-host-key", first, UserKnownHostsFile=str(changed)),
            _host("wrong-key", first, IdentityFile=str(self.wrong_key)),
        ]
        defaults = {
            "User": TRAINER,
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": str(self.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "PasswordAuthentication": "no",
        }
        # OpenSSH uses the first value it finds, so the defaults come last; it uses all IdentityFiles.
        key = _block("* !wrong-key", {"IdentityFile": str(self.key)})
        self.config.write_text("\n".join([*hosts, key, _block("*", defaults)]))


def _host(alias: str, address: str, **options: str) -> str:
    return _block(alias, {"HostName": address, **options})


def _block(pattern: str, options: Mapping[str, str]) -> str:
    return "\n".join([f"Host {pattern}", *(f"    {key} {value}" for key, value in options.items()), ""])
