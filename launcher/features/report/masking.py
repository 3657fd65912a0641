"""Masking of a report's texts: secrets, and what tells people and machines. Pure.

Names that are known (`Names`) are replaced wherever they are, and what only looks like a login, a host of a URL, a home
folder, an address, an ssh key's file or a token, where it is. A name has the same pseudonym everywhere.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from launcher.local_files import parse_object
from launcher.records.masking import MASK, Masker

# They tell neither a person nor a company, and many are words of the launcher's own texts
_COMMON = re.compile(
    r"root|admin|ubuntu|debian|ec2-user|nobody|git|users?|home|local|localhost|localdomain|launcher|train|trainer|"
    r"python3?|torch|docker|slurm|ssh|any|all|none|-|(local|user|domain|address)-\d+|"
    r"(.+\.)?(nvcr\.io|nvidia\.com|docker\.(io|com)|ghcr\.io|quay\.io|github\.com|pytorch\.org|python\.org|"
    r"huggingface\.co|hf\.co)"
)
_SECRET_NAME = re.compile(r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?![A-Z])", re.IGNORECASE)
_NO_SECRET = ("true", "false", "none", "null", "auto")  # values of such a name that are no secret
_TEXT = "tag:yaml.org,2002:str"
# What looks like a secret or a name. Repetitions are limited: a program may print a megabyte without a blank.
_SHAPES = r"""
(?P<pem>-----BEGIN[ ][A-Z ]{0,30}PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]{0,30}PRIVATE[ ]KEY-----|\Z))
|(?P<token>\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA)[\w-]{12,}|(?<=\bBearer[ ])\S+)
|(?P<file>(?<![^\s'"=:,(\[])[^\s'"=:,(\[]{0,200}?/?(?:\.ssh/[^\s'",:;)\]]{1,200}|\bid_(?:rsa|dsa|ecdsa|ed25519)\w*))
|(?P<key>(?:(?i:token|secret|signature|[?&]sig|passw(?:or)?d|passphrase|(?:api|access|private|account|auth)[_-]?key)
    |KEY)["']?[ \t]*[=:][ \t]*)(?:"[^"\n]{1,500}"|'[^'\n]{1,500}'|[^\s"'&,;]+)
|(?<=://)(?P<login>[^\s/@'"]{1,200}@)?(?P<server>[\w.-]{1,253})
|(?<![\w.])(?P<user>\w[\w.+-]{0,63})@(?!sha256:)
    (?P<host>[A-Za-z][\w-]{1,63}(?:\.[\w-]{1,63}){0,9}|\d{1,3}(?:\.\d{1,3}){3})
|(?P<folder>/(?:home|Users)/)(?P<owner>[\w.-]{1,64})
|(?P<board>tfevents\.\d+\.)(?P<wrote>[\w.-]{1,253}?)(?=\.\d+\.\d)
|(?:(?m:^)[\w.-]{1,253}(?=:\d+:\d+[ ]\[\d+\][ ]NCCL))
"""
_ADDRESSES = r"""
|(?P<address>(?<![A-Za-z0-9.])(?<!==)(?<!version[ ])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)
    |(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4})(?![\w:]))
"""


@dataclass(frozen=True)
class Names:
    """What is known to be secret, or to tell people and machines."""

    secrets: Sequence[str] = ()
    users: Sequence[str] = ()
    homes: Sequence[str] = ()  # folders
    nodes: Sequence[Sequence[str]] = ()  # by rank: the names and addresses of each
    hosts: Sequence[str] = ()  # other machines
    keys: Sequence[str] = ()  # files of ssh keys


class Anonymous:
    """Replaces secrets and names. pseudonyms: what each name is called in the report, in lower case."""

    def __init__(self, names: Names) -> None:
        self.pseudonyms: dict[str, str] = {}
        self._counts = Counter[str]()
        secrets = [value for value in names.secrets if value.lower() not in _NO_SECRET]
        self._secrets = [part for value in secrets for part in (value, *value.splitlines()) if len(part) >= 4]
        self._mask = Masker(secrets)
        for number, own in enumerate(names.nodes, 1):
            for name in filter(_tells, own):
                self.pseudonyms.setdefault(name.lower(), f"node-{number}" + "-address" * (_address(name) is not None))
        hosts = [*self.pseudonyms, *(host for host in names.hosts if self._named("host", host) != host)]
        domains = {host.partition(".")[2] for host in hosts if _address(host) is None}
        users = [user for user in names.users if self._named("user", user) != user]
        self._paths = dict.fromkeys(names.keys, f"~/.ssh/{MASK}")
        for home in (home for home in names.homes if home.count("/") > 1):
            found = re.search("/(?:home|Users)/([^/]+)$", home)
            self._paths[home] = f"/home/{self._named('user', found[1] if found else home)}"
        words = {*hosts, *(domain for domain in domains if self._named("domain", domain) != domain)}
        people = [re.escape(user) if len(user) > 4 else rf"\b{re.escape(user)}\b" for user in _by_length(users)]
        known = [rf"{re.escape(path)}(?![\w.-])" for path in _by_length(self._paths)]
        known += [rf"(?<![A-Za-z0-9]){_any_of({word.lower() for word in words})}(?![A-Za-z0-9])"] if words else []
        literal = "|".join([*known, *people]) or "(?!)"
        self._shapes = re.compile(f"{_SHAPES}|(?i:{literal}){_ADDRESSES}", re.DOTALL | re.VERBOSE)
        self._people = re.compile("|".join(people) or "(?!)", re.IGNORECASE)

    def text(self, text: str) -> str:
        """Mask secrets first, as a part of one could look like a name; and at the end, as pseudonyms are text too."""
        return self._mask(self._shapes.sub(self._replaced, self._mask(text)))

    def leaks(self, text: str) -> bool:
        """Return whether a masked text still has a secret or a user's name, by a fault of this module."""
        return any(secret in text for secret in self._secrets) or self._people.search(text) is not None

    def file(self, name: str, text: str) -> str:
        """Mask a file: values of JSON and YAML as a program reads them, any other text as it is written."""
        if name.endswith(".jsonl"):
            return "".join(self._json(line, None) + "\n" for line in text.splitlines())
        if name.endswith(".json"):
            return self._json(text, 2) + "\n"
        with suppress(yaml.YAMLError, RecursionError):
            if name.endswith(".yaml") and (node := yaml.compose(text, Loader=yaml.SafeLoader)) is not None:
                self._yaml(node, set())
                return str(yaml.serialize(node, Dumper=yaml.SafeDumper, allow_unicode=True, width=1000))
        return self.text(text)

    def _json(self, text: str, indent: int | None) -> str:
        found = parse_object(text)
        with suppress(RecursionError):
            return json.dumps(self._deep(found), indent=indent, ensure_ascii=False) if found else self.text(text)
        return self.text(text)

    def _deep(self, value: Any) -> Any:
        if isinstance(value, dict):
            pairs = ((key, MASK if _holds_secret(key, inner) else self._deep(inner)) for key, inner in value.items())
            return {self.text(key): inner for key, inner in pairs}
        if isinstance(value, list):
            after = zip(("", *value), value, strict=False)
            return [
                MASK if _is_option(one) and _holds_secret(one, other) else self._deep(other) for one, other in after
            ]
        return self.text(value) if isinstance(value, str) else value

    def _yaml(self, node: yaml.Node, seen: set[int]) -> None:
        if id(node) in seen:  # an alias
            return
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            _set(node, self.text(node.value))
        for each in node.value if isinstance(node, yaml.CollectionNode) else ():
            if isinstance(each, tuple) and _holds_secret(each[0].value, each[1].value):
                _set(each[1], MASK)
            for inner in each if isinstance(each, tuple) else (each,):
                self._yaml(inner, seen)

    def _replaced(self, found: re.Match[str]) -> str:
        part = {name: text for name, text in found.groupdict().items() if text is not None}
        if {"pem", "token"} & part.keys():
            return MASK
        if "file" in part:
            return f"~/.ssh/{MASK}"
        if "key" in part:
            return part["key"] + MASK
        if "server" in part:
            return (f"{MASK}@" if "login" in part else "") + self._host(part["server"])
        if "user" in part:
            return f"{self._named('user', part['user'])}@{self._host(part['host'])}"
        if "folder" in part:
            return part["folder"] + self._named("user", part["owner"])
        if "board" in part:
            return part["board"] + self._host(part["wrote"])
        if "address" in part:
            return found[0] if _address(found[0]) is None else self._named("address", found[0])
        return self._paths.get(found[0]) or self._host(found[0])

    def _host(self, name: str) -> str:
        return self._named("host" if _address(name) is None else "address", name)

    def _named(self, kind: str, name: str) -> str:
        """Return the pseudonym of a name; the name itself if it tells nothing."""
        if name.lower() not in self.pseudonyms:
            if not _tells(name):
                return name
            self._counts[kind] += 1
            self.pseudonyms[name.lower()] = f"{kind}-{self._counts[kind]}"
        return self.pseudonyms[name.lower()]


def secret_values(value: Any) -> Iterator[str]:
    """Yield the values of variables and options that are named like secrets, anywhere in a JSON value."""
    if isinstance(value, dict):
        yield from (str(inner) for key, inner in value.items() if _holds_secret(key, inner))
        for inner in value.values():
            yield from secret_values(inner)
    elif isinstance(value, list):
        pairs = itertools.pairwise(value)
        yield from (str(inner) for before, inner in pairs if _is_option(before) and _holds_secret(before, inner))
        for inner in value:
            yield from secret_values(inner)


def _is_option(argument: object) -> bool:
    return isinstance(argument, str) and argument.startswith("--")


def _holds_secret(name: object, value: object) -> bool:
    return isinstance(value, (str, int)) and value not in ("", True, False) and bool(_SECRET_NAME.search(str(name)))


def _set(node: yaml.ScalarNode, text: str) -> None:
    if text != node.value:
        node.value, node.tag, node.style = text, _TEXT, "'"


def _by_length(words: Iterable[str]) -> list[str]:
    return sorted(words, key=len, reverse=True)


def _any_of(words: Collection[str]) -> str:
    """Return a pattern of these words that shares their beginnings: thousands of nodes would be tried one by one."""
    rests = dict[str, set[str]]()
    for word in filter(None, words):
        rests.setdefault(word[0], set()).add(word[1:])
    found = [re.escape(first) + _any_of(rest) for first, rest in rests.items()]
    text = "|".join(found) if len(found) == 1 and "" not in words else f"(?:{'|'.join(found)})"
    return "" if not found else text + "?" * ("" in words)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _tells(name: str) -> bool:
    """Return whether a name tells a person, a company or a machine."""
    if (address := _address(name)) is not None:
        return not (address.is_loopback or address.is_unspecified or address.is_reserved or address.is_multicast)
    return len(name) > 1 and not _COMMON.fullmatch(name.lower())
