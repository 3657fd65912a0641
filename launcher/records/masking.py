"""Masking of secret values, in output and in the files of a run; and in all that this process prints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from launcher.job.scalars import SHORTEST_SECRET

MASK = "***"
_SECRETS = ("token", "key", "secret", "password", "passwd", "passphrase", "passcode", "credential", "jwt")
_ONE_OF_A_NAME = frozenset({"pass", *_SECRETS, *(f"{word}s" for word in _SECRETS)})
_LAST_OF_A_NAME = frozenset({"auth", "authorization", "cookie", "pwd", "dsn", "webhook"})
# As PGPASSWORD, KEYFILE, SSHPASS; a path of a program is no password, nor is a way around
_ENDING = re.compile(
    "(?:token|key|secret|password|passwd|pwd|credential)s?(?:file|path)?$|(?<!ask)(?<!by)(?<!com)(?<!sur)pass$"
)
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_FOLDERS = ("pwd", "oldpwd")  # of a shell
# What a setting of fsspec has beside credentials: switches, numbers, words such as `virtual` and `us-east-1`, addresses
_PLAIN = re.compile(r"(?i:true|false|none|null)|[0-9.]*|[a-z]{1,12}(?:[-_][a-z0-9]{1,9}){0,2}|\w+://[^@?]*")


def names_secret(name: str) -> bool:
    """Return whether a variable, option or key of this name has a secret: HF_TOKENS, apiKeyFile, DB_PASS, MYSQL_PWD."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or "".join(words) in _FOLDERS:
        return False
    return words[-1] in _LAST_OF_A_NAME or any(word in _ONE_OF_A_NAME or _ENDING.search(word) for word in words)


def fsspec_values(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield what may be a credential in the settings of fsspec: FSSPEC_S3_SECRET=x, FSSPEC_HTTPS={"headers": ...}."""
    for name, value in variables.items():
        if name.startswith("FSSPEC_"):
            yield from _credentials(name, _parsed(value))


def _credentials(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _credentials(f"{name}_key" if "headers" in name.lower() else key, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _credentials(name, inner)
    elif isinstance(value, str) and (names_secret(name) or not _PLAIN.fullmatch(value)):
        yield value


def _parsed(value: str) -> Any:
    """Return the object or list that is written as JSON; else the text."""
    try:
        found = json.loads(value) if value.lstrip()[:1] in ("{", "[") else value
    except (ValueError, RecursionError):
        return value
    return found


def _parts(value: str) -> Iterator[str]:
    """Yield a secret, its lines, the texts that it has if it is JSON, what follows `Bearer`; and all as in a URL."""
    found = _parsed(value)
    inner = () if found is value else tuple(_credentials("", found))
    for part in (value, *value.splitlines(), *inner):
        scheme, blank, rest = part.partition(" ")
        for each in (part, rest) if blank and scheme.lower() in ("bearer", "basic", "token") else (part,):
            yield from (each, quote(each, safe=""), quote(each))


class Masker:
    """Replaces secret values. A part that is shorter than SHORTEST_SECRET, as a line of a value, is not masked."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        whole = [part for value in values for part in _parts(value)]
        escaped = [json.dumps(part)[1:-1] for part in whole]  # as written in error files and metrics
        # Longest first: one secret may contain another.
        parts = {part for part in (*whole, *escaped) if len(part) >= SHORTEST_SECRET}
        self._values: Sequence[str] = sorted(parts, key=len, reverse=True)
        self._bytes = [value.encode("utf-8", "surrogateescape") for value in self._values]
        self.longest = max(map(len, self._bytes), default=0)  # bytes; 0 if there are no secrets
        lengths = "|".join(rf"\*{{{size}}}" for size in sorted({*map(len, self._bytes)}))
        self._in_place = re.compile(rf"(?<!\*)(?:{lengths})(?!\*)") if lengths else None

    def __call__(self, line: str) -> str:
        """Mask a text for display. One that was masked in a file gets the same mask, which does not show the length."""
        if self._in_place is not None and "****" in line:
            line = self._in_place.sub(MASK, line)
        for value in self._values:
            line = line.replace(value, MASK)
        return line

    def in_place(self, data: bytes) -> bytes:
        """Replace every byte of a secret by *, for a copy, whose length must stay that of the file on the node: it is
        the offset from which any launcher continues.
        """
        for value in self._bytes:
            data = data.replace(value, b"*" * len(value))
        return data

    def deep(self, value: Any) -> Any:
        """Mask all text in a JSON value."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {key: self.deep(inner) for key, inner in value.items()}
        return [self.deep(inner) for inner in value] if isinstance(value, list) else value


_hidden: frozenset[str] = frozenset()
_of_what_is_printed = Masker()


def hide(values: Iterable[str]) -> None:
    """Mask these values in all that this process prints: a server or a program may repeat what it was sent."""
    global _hidden, _of_what_is_printed
    if not _hidden.issuperset(new := frozenset(values)):
        _hidden |= new
        _of_what_is_printed = Masker(_hidden)


def printed(text: str) -> str:
    """Return a text as this process may print it."""
    return _of_what_is_printed(text)
