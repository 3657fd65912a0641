"""Masking of a report's texts: secrets, and what tells people and machines. Pure.

Names that are known (`Names`) are replaced wherever they are. So are those that look like one somewhere (a login, a
host of a URL, a home folder), once all texts were read (`learn`); and what looks like an address, an ssh key's file or
a token, where it is. A name has the same pseudonym everywhere.
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
from launcher.records.masking import MASK, Masker, names_secret

# The launcher's own words. If one is known to be somebody's login, it is replaced where it looks like one
_OWN = re.compile(r"launcher|train|trainer|python3?|torch|docker|slurm|ssh|any|all|none")
# They tell neither a person nor a company, and many are words of the launcher's own texts
_COMMON = re.compile(
    rf"{_OWN.pattern}|root|admin|ubuntu|debian|ec2-user|nobody|git|users?|home|local|localhost|localdomain|"
    r"-|(local|user|domain|address)-\d+|"
    r"(.+\.)?(nvcr\.io|nvidia\.com|docker\.(io|com)|ghcr\.io|quay\.io|github\.com|pytorch\.org|python\.org|"
    r"huggingface\.co|hf\.co)"
)
_NO_SECRET = ("true", "false", "none", "null", "auto", "basic", "bearer")  # values of such a name that are no secret
_NUMBER = re.compile(r"[0-9][0-9.,_]*[kKMGBT]?")  # of tokens that a model reads
# Words of the launcher's own texts that may be somebody's login or machine: replaced only where they look like one
_WORDS = re.compile(
    "args|base|cache|checkpoints|code|command|cpus?|datasets?|data|env|errors?|events?|failure|files?|gpus?|hosts?|images?|"
    "jobs?|key|kind|latest|logs?|main|master|memory|message|models?|modules?|names?|network|nodes?|opt|output|ports?|"
    "projects?|rank|results?|runs?|scripts?|scratch|shared|state|tests?|time|tmp|type|user|values?|versions?|what|work|"
    "workers?|workspace"
)
_TEXT = "tag:yaml.org,2002:str"
# Names of secrets before `=` or `:`, in any case and, with other words after them, in capitals: `max_tokens: 4` and
# `pad_token_id: 0` are none. After the dashes of an option a blank may follow.
_KEY = r"""
(?:(?i:secrets?|signature|[?&](?:sig|key|code|auth)|passw(?:or)?ds?|passphrases?|passcodes?|credentials?|jwt|token
      |(?:api|access|private|account|auth|secret|ssh|signing|encryption|session|service|master|license)[_-]?keys?
      |keys?[_-]?(?:file|path)|[_-](?:pwd|auth)|[_-]pass(?!ASSIGNED[0-9.]+[ ]?m?s?\b)|tokens(?!ASSIGNEDCOUNT))
  |(?:TOKEN|KEYS?|SECRETS?|(?<![A-Z])PASS|SSHPASS|(?<=[A-Z0-9_])(?<!OLD)PWD|CREDENTIALS?|PASSWORDS?)MORE
  |TOKENSMORE(?!ASSIGNEDCOUNT))["']?[ \t]*[=:][ \t]*
|(?<![\w-])--?(?:[A-Za-z0-9]{1,20}[_-]){0,4}(?i:secrets?|passw(?:or)?ds?|passphrases?|passcodes?|credentials?|jwt
      |pass|pwd|auth|token|(?:api|access|auth|ssh)?keys?|tokens(?=[ \t]+(?!COUNT)))(?i:[_-]?(?:file|path))?
      [ \t]+(?![-\s])
""".replace("MORE", "(?:FILE|PATH)?(?:_[A-Z0-9]{1,20}){0,3}").replace("ASSIGNED", r"""["']?[ \t]*[=:][ \t]*["']?""")
_KEY = _KEY.replace("COUNT", r"[0-9][0-9.,_]*[kKMGBT]?(?![\w-])")
_VALUE = r"""\\"[^"\n\\]{1,500}\\"|"[^"\n]{1,500}"|'[^'\n]{1,500}'|(?:[^\s"'&,;]|,(?=[^\s"']))+"""
# What looks like a secret or a name. Repetitions are limited: a program may print a megabyte without a blank.
_NAMED = re.compile(f"(?:{_KEY})(?P<value>{_VALUE})", re.VERBOSE)
_SHAPES = (
    r"""
(?P<pem>-----BEGIN[ ][A-Z ]{0,30}PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]{0,30}PRIVATE[ ]KEY-----|\Z))
|(?P<token>\b(?:hf_|api_org_|gh[pousr]_|github_pat_|gl[a-z]{2,4}-|sk-|[rs]k_live_|xox[a-z]-|xapp-|A[KS]IA|AIza|nvapi-
        |npm_|pypi-|dckr_pat_|ya29\.|hvs\.|SG\.|r8_|gsk_|wandb_v1_|bot[0-9]{6,12}:)[\w-]{12,}
    |\beyJ[\w-]{8,500}\.[\w-]{4,}(?:\.[\w-]*)?|(?<=\bBearer[ ])\S+
    |(?<=\bBasic[ ])(?=\S{0,500}[A-Z])(?=\S{0,500}[0-9=])[A-Za-z0-9+/]{6,}={0,2})
|(?P<header>(?i:authorization|cookie)["']?[ \t]*[=:][ \t]*\\?["']?)[^\s"'\\][^\n"'\\]{0,2000}
|(?P<file>(?<![^\s'"=:,(\[])[^\s'"=:,(\[]{0,200}?/?(?:\.ssh/[^\s'",:;)\]]{1,200}|\bid_(?:rsa|dsa|ecdsa|ed25519)\w*))
"""
    + f"|(?P<key>{_KEY})(?P<value>{_VALUE})"
    + r"""
|(?<=://)(?=[^\s"'<>]{0,400}(?i:hook))(?:[^\s/@'"]{1,200}@)?(?P<hook>[\w.-]{1,253})(?P<port>:\d{1,5})?/[^\s"'<>]*
|(?<=://)(?P<login>[^\s/@'"]{1,200}@)?(?P<server>[\w.-]{1,253})
|(?<![\w.])(?P<user>\w[\w.+-]{0,63})@(?!sha256:)
    (?P<host>[A-Za-z][\w-]{1,63}(?:\.[\w-]{1,63}){0,9}|\d{1,3}(?:\.\d{1,3}){3})
|(?P<folder>/(?:home|Users)/)(?P<owner>[\w.-]{1,64})
|(?P<board>tfevents\.\d+\.)(?P<wrote>[\w.-]{1,253}?)(?=\.\d+\.\d)
|(?:(?m:^)[\w.-]{1,253}(?=:\d+:\d+[ ]\[\d+\][ ]NCCL))
"""
)
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
    """Replaces secrets and names. pseudonyms: what each name is called in the report, in lower case.

    kept: those that are the launcher's own words, too, and stay where they do not look like a name.
    """

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
        logins = [user.lower() for user in names.users if _OWN.fullmatch(user.lower())]
        for user in dict.fromkeys(logins):
            self._add("user", user)
        machines = [name.lower() for name in (*itertools.chain(*names.nodes), *names.hosts)]
        self.kept = sorted({*logins, *filter(_OWN.fullmatch, machines)})
        users = [user for user in names.users if user.lower() not in logins and self._named("user", user) != user]
        self._paths = dict.fromkeys(names.keys, f"~/.ssh/{MASK}")
        for home in (home for home in names.homes if home.count("/") > 1):
            found = re.search("/(?:home|Users)/([^/]+)$", home)
            self._paths[home] = f"/home/{self._named('user', found[1] if found else home)}"
        words = {*hosts, *(domain for domain in domains if self._named("domain", domain) != domain)}
        people = [re.escape(user) if len(user) > 4 else rf"\b{re.escape(user)}\b" for user in _by_length(users)]
        known = [rf"{re.escape(path)}(?![\w.-])" for path in _by_length(self._paths)]
        known += [rf"(?<![A-Za-z0-9]){_any_of({word.lower() for word in words})}(?![A-Za-z0-9])"] if words else []
        known += [rf"(?<=\buser[ ]){_any_of({*logins})}\b"] if logins else []
        self._known = "|".join([*known, *people]) or "(?!)"
        self._shapes = self._with("(?!)")
        self._people = re.compile("|".join(people) or "(?!)", re.IGNORECASE)

    def learn(self, files: Iterable[tuple[str, str]]) -> None:
        """Read the names and texts of files; what looks like a login or a machine in one is replaced in all."""
        known = set(self.pseudonyms)
        for name, text in files:
            self.text(name)
            self.file(name, text)
        found = [name for name in self.pseudonyms if name not in known and len(name) > 2 and not _WORDS.fullmatch(name)]
        seen = {name for name in found if _address(name) is None}
        self._shapes = self._with(rf"(?<![A-Za-z0-9]){_any_of(seen)}(?![A-Za-z0-9])" if seen else "(?!)")

    def _with(self, seen: str) -> re.Pattern[str]:
        return re.compile(f"{_SHAPES}|(?i:{self._known}|{seen}){_ADDRESSES}", re.DOTALL | re.VERBOSE)

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
        if isinstance(node, yaml.SequenceNode):
            for one, other in itertools.pairwise(node.value):
                if _is_option(one.value) and _holds_secret(one.value, other.value):
                    _set(other, MASK)
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
        if "header" in part:
            return part["header"] + MASK
        if "key" in part:
            return part["key"] + MASK
        if "hook" in part:
            return f"{self._host(part['hook'])}{part.get('port', '')}/{MASK}"
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
            self._add(kind, name)
        return self.pseudonyms[name.lower()]

    def _add(self, kind: str, name: str) -> None:
        self._counts[kind] += 1
        self.pseudonyms[name.lower()] = f"{kind}-{self._counts[kind]}"


def secret_values(value: Any) -> Iterator[str]:
    """Yield the values of variables and options that are named like secrets, anywhere in a JSON value and its texts."""
    if isinstance(value, str):
        for found in _NAMED.finditer(value):
            if not found["value"].startswith(("$", "<")):  # a variable of a shell
                yield found["value"].strip("\\\"'")
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
    return isinstance(argument, str) and argument.startswith("-")


def _holds_secret(name: object, value: object) -> bool:
    if not isinstance(value, (str, int)) or value in ("", True, False) or not names_secret(str(name)):
        return False
    return not (re.search("tokens", str(name), re.IGNORECASE) and _NUMBER.fullmatch(str(value)))


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
