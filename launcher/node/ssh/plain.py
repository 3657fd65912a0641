"""Reads an ssh config that needs no OpenSSH to be understood: what `ssh -G` would say, without a process a node.

Files of `Host`, `Include` and plain values only, which most are. Whatever else applies to a host (`Match`, quotes,
canonical names, an option that is not known here, a value that OpenSSH would refuse) is a NotPlain: then OpenSSH is
asked. tests/unit/test_node_ssh_plain.py holds it against OpenSSH itself. ssh_config(5).
"""

from __future__ import annotations

import functools
import glob
import os
import pwd
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = "/usr/bin/ssh"  # another one may have another system-wide file
_SYSTEM = "/etc/ssh"
_DEPTH = 8  # of Include; OpenSSH's own limit is 16
_LINE = re.compile(r"(\w+)(?:[ \t]*=[ \t]*|[ \t]+)(\S(?:.*\S)?)")
_STRANGE = re.compile(r"[\"'\\#$]|%[^%CdhijkLlnpru]|[^ -~]|%$")
_NUMBER = re.compile(r"\d{1,9}")
_FLAG = re.compile(r"yes|no|true|false")
_ANY = re.compile(r".+")
_KEY_TYPE = r"(?:ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|rsa-sha2-(?:256|512))"
# What we read from an answer, and the values that mean to us what they mean to OpenSSH
_READ = {
    "hostname": re.compile(r"[\w.:-]+"),
    "port": re.compile(r"[1-9]\d{0,3}|[1-5]\d{4}"),
    "user": re.compile(r"[\w.-]+"),
    "identityfile": re.compile(r"[^ ]+"),
    "certificatefile": re.compile(r"[^ ]+"),
    "identitiesonly": _FLAG,
    "identityagent": re.compile(r"none|SSH_AUTH_SOCK|[/~][^ ]*"),
    "proxyjump": re.compile(r"[\w.:@,-]+"),
    "proxycommand": _ANY,
    "userknownhostsfile": _ANY,
    "globalknownhostsfile": _ANY,
    "hashknownhosts": _FLAG,
    "hostkeyalias": re.compile(r"[\w.:-]+"),
    "hostkeyalgorithms": re.compile(rf"{_KEY_TYPE}(?:,{_KEY_TYPE})*"),
    "stricthostkeychecking": re.compile(r"yes|no|ask|off|accept-new|true|false"),
    "connecttimeout": _NUMBER,
    "serveraliveinterval": _NUMBER,
    "serveralivecountmax": _NUMBER,
    "bindaddress": re.compile(r"[\w.:-]+"),
    "addressfamily": re.compile(r"any|inet|inet6"),
}
_WAYS = ("proxyjump", "proxycommand")  # whichever comes first
_PLAIN_FLAGS = {"true": "yes", "false": "no"}
_WILD = re.compile(r"[*?!]")
_MANY = ("identityfile", "certificatefile")  # each adds one; of all others the first counts
# What says nothing of how a server is reached and proven
_INERT = re.compile(
    "addkeystoagent|batchmode|checkhostip|ciphers|clearallforwardings|compression|connectionattempts|controlmaster|"
    "controlpath|controlpersist|escapechar|exitonforwardfailure|fingerprinthash|forwardagent|forwardx11|"
    "forwardx11timeout|forwardx11trusted|gssapiauthentication|gssapidelegatecredentials|ipqos|"
    "kbdinteractiveauthentication|kexalgorithms|loglevel|macs|nohostauthenticationforlocalhost|"
    "numberofpasswordprompts|passwordauthentication|permitlocalcommand|preferredauthentications|"
    "pubkeyauthentication|requesttty|sendenv|setenv|tcpkeepalive|updatehostkeys|visualhostkey"
)


Patterns = tuple[str, ...]


class NotPlain(Exception):  # noqa: N818 - no error: OpenSSH is asked instead
    """Only OpenSSH knows what this means."""


@dataclass(frozen=True)
class Setting:
    """One line: it counts for a host that all of `hosts` match, which are the Host lines that it stands under."""

    hosts: tuple[Patterns, ...]
    name: str  # lower case
    value: str


class PlainConfig:
    """The settings of these files, in OpenSSH's order of precedence."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = settings
        self._named: dict[str, list[int]] = {}  # under a Host line of names: not asked of every node
        self._others: list[int] = []
        for place, setting in enumerate(settings):
            last = setting.hosts[-1] if setting.hosts else ("*",)
            if _WILD.search(" ".join(last)):
                self._others.append(place)
            else:
                for name in set(last):
                    self._named.setdefault(name, []).append(place)

    def options(self, host: str) -> dict[str, list[str]]:
        """As `ssh -G host` lists them, without its defaults. Raises NotPlain."""
        found: dict[str, list[str]] = {}
        for place in sorted([*self._named.get(host, ()), *self._others]):
            setting = self._settings[place]
            if not _INERT.fullmatch(setting.name) and all(_speaks_of(patterns, host) for patterns in setting.hosts):
                _take(setting, found)
        return found


def _take(setting: Setting, into: dict[str, list[str]]) -> None:
    name, value = setting.name, setting.value
    allowed = _READ.get(name)
    if allowed is None or not allowed.fullmatch(value) or _STRANGE.search(value):
        raise NotPlain(f"{name} {value}")
    if name in _MANY:
        into.setdefault(name, []).append(value)
    elif name not in _WAYS or not any(way in into for way in _WAYS):
        into.setdefault(name, [_PLAIN_FLAGS.get(value, value) if allowed is _FLAG else value])


def read_config(file: str | None) -> PlainConfig:
    """Of the file given to ssh as -F, else of the user's and the system's own. Raises NotPlain."""
    if shutil.which("ssh") != _PROGRAM:
        raise NotPlain("another ssh")
    try:
        mine = Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh")  # OpenSSH asks the password file, not $HOME
    except KeyError as error:
        raise NotPlain("no such user") from error
    if file is not None:
        return PlainConfig(list(_settings(Path(file), (), mine, 0)))
    found: list[Setting] = []
    for folder, name, private in ((mine, "config", True), (Path(_SYSTEM), "ssh_config", False)):
        if os.access(folder / name, os.F_OK):
            found += _settings(folder / name, (), folder, 0, private=private)
    return PlainConfig(found)


def _settings(
    file: Path, outer: tuple[Patterns, ...], folder: Path, depth: int, *, private: bool = False
) -> Iterator[Setting]:
    """`private`: OpenSSH refuses it when others may write it."""
    try:
        with file.open(encoding="utf-8") as stream:
            about = os.fstat(stream.fileno())
            text = stream.read()
    except (OSError, ValueError) as error:
        raise NotPlain(str(error)) from error
    if private and (about.st_uid not in (0, os.getuid()) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise NotPlain(f"{file} may be written by others")
    hosts = outer
    for line in text.split("\n"):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None:
            raise NotPlain(stripped)
        name, value = match.group(1).lower(), match.group(2)
        if name == "match" or name.startswith("canonical"):
            raise NotPlain(stripped)
        if name in ("host", "include") and _STRANGE.search(value):
            raise NotPlain(stripped)
        if name == "host":
            hosts = (*outer, tuple(value.split()))
        elif name == "include":
            yield from _included(value, hosts, folder, depth, private=private)
        else:
            yield Setting(hosts, name, value)


def _included(value: str, hosts: tuple[Patterns, ...], folder: Path, depth: int, *, private: bool) -> Iterator[Setting]:
    if depth >= _DEPTH:
        raise NotPlain("Include in Include in Include ...")
    for word in value.split():
        if word.startswith("~"):
            raise NotPlain(word)
        for path in sorted(glob.glob(str(folder / word))):  # noqa: PTH207 - Path.glob takes no absolute pattern
            yield from _settings(Path(path), hosts, folder, depth + 1, private=private)


def _speaks_of(patterns: Patterns, host: str) -> bool:
    hit = False
    for pattern in patterns:
        if _expression(pattern.removeprefix("!")).fullmatch(host):
            if pattern.startswith("!"):
                return False
            hit = True
    return hit


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    """Of * and ?; the brackets of fnmatch mean nothing here."""
    return re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)
