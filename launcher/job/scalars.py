"""Scalars of a job file: numbers as written, durations, sizes, paths, hosts, arguments.

Every `parse_` function accepts a value from YAML or its own result, and raises BadValueError.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, unquote_plus

from launcher.job.problems import BadValueError, show

LOCAL = "local"  # this machine
ANY = "any"  # a node that a cluster chooses
Gpus = str | int | tuple[int, ...] | tuple[str, ...]
ArgValue = str | bool | None | tuple[str, ...]
Args = Mapping[str, ArgValue] | tuple[str, ...]


class WrittenInt(int):
    """An integer with its original text, so that `007` and `0x10` are passed to programs as written."""

    text: str


class WrittenFloat(float):
    """A number with its original text, so that `1.10` and `1e-4` are passed to programs as written."""

    text: str


class ProgramText(str):
    """Text for a program. Numbers need no quotes in a job file, as they are passed as written."""

    __slots__ = ()


class AmbiguousBool(str):
    """An unquoted yes, no, on or off: a boolean in YAML 1.1, text in 1.2. Rejected if ambiguous."""

    __slots__ = ()


_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL = ("", "~", "null", "Null", "NULL")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_AMBIGUOUS = ("yes", "no", "on", "off")
SHORTEST_SECRET = 4  # characters: masking a shorter value would garble every line
LONGEST_PASSED = 131_072  # bytes of one argument, or of one variable: MAX_ARG_STRLEN of Linux, execve(2)
TOO_LONG = f"the {LONGEST_PASSED:,} that Linux allows in one variable or argument; pass a file to the program instead"
_LONGEST_NUMBER = 64  # characters; longer ones are text (Python itself refuses to parse thousands of digits)
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#]*)[^#]*")
LONGEST_URL = 8000  # characters
# Names of parameters that hold credentials, without what is between words
_CREDENTIAL = re.compile(
    r".*(token|passw(or)?d|passphrase|secret|signature|credentials?|"
    r"(api|access|private|secret|auth|account|subscription)keys?(id)?)|(key|sig|auth|authorization|jwt|pwd|pass|sas)"
)


def is_url(text: str) -> bool:
    return "://" in text


def require_data_url(text: str) -> str:
    """Return a URL of data. Raises BadValueError for one with credentials, as it is written to records and labels."""
    found = _URL.fullmatch(text)
    if len(text) > LONGEST_URL:
        raise BadValueError(f"expected a URL of at most {LONGEST_URL:,} characters, not {len(text):,}")
    if "#" in text:
        known = "write %23 if it belongs to the name" if text.startswith("http") else "a name with # cannot be given"
        raise BadValueError(f"a # is not part of a file's URL: {known}")
    if found is None or "::" in text or not text.isprintable():
        raise BadValueError(
            f"expected KIND://PLACE/NAME in lower case, such as s3://bucket/imagenet.tar, not {show(text)}"
        )
    if found[1] in ("file", "local", "memory"):
        raise BadValueError(f"{found[1]}:// is no store: give the path, or host:/path")
    if not found[2]:
        raise BadValueError(f"{show(text)} names no server or bucket")
    user, at, _ = unquote(found[2]).rpartition("@")  # of Azure: CONTAINER@ACCOUNT
    names = [pair.partition("=")[0] for pair in re.split("[&;]", text.partition("?")[2])]
    named = any(_CREDENTIAL.fullmatch(re.sub("[^a-z]", "", unquote_plus(name).lower())) for name in names)
    if (at and (":" in user or found[1] in ("http", "https"))) or named:
        what = "a URL with credentials would be in records and on the nodes: give them as `secrets` (data push: --env)"
        raise BadValueError(what)
    return text


def resolve(text: str) -> str | int | float | bool | None:
    """Return a plain scalar's value by the core schema of YAML 1.2.2 (10.3): no dates, sexagesimals or yes/no."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if text.lower() in _AMBIGUOUS:
        return AmbiguousBool(text)
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        integer = WrittenInt(int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)))
        integer.text = text
        return integer
    if _FLOAT.fullmatch(text):
        number = WrittenFloat(text.replace(".", "") if text[-1].isalpha() else text)
        number.text = text
        return number
    return text


def passed_bytes(text: str) -> int:
    """Return the size of an argument, or of a variable as NAME=value, with the terminating NUL."""
    return len(text.encode("utf-8", "surrogatepass")) + 1


def require_passable(text: str, name: str = "") -> None:
    """Raise BadValueError if an argument, or a variable as NAME=value, is too long to be passed to a program."""
    if (size := passed_bytes(text)) > LONGEST_PASSED:
        known = f"{name} is " if name else ""
        raise BadValueError(f"{known}too long: {size:,} bytes with its name and final NUL, more than {TOO_LONG}")


def parse_text(value: Any) -> ProgramText:
    """Return a scalar as passed to a program: numbers as written, true and false in lower case."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadValueError("a NUL character cannot be passed to a program")
        require_passable(value)
        return ProgramText(value)
    if isinstance(value, bool):
        return ProgramText("true" if value else "false")
    if isinstance(value, (int, float)):
        return ProgramText(getattr(value, "text", None) or repr(value))
    raise BadValueError(f"expected text, not {show(value)}" + ("; write '' for an empty one" if value is None else ""))


def _unquoted(value: Any) -> str:
    """Return a hint for a number that was written as text."""
    is_number = isinstance(value, str) and (_INT.fullmatch(value) or _FLOAT.fullmatch(value))
    return f"; write it without quotes: {value}" if is_number else ""


def whole(what: str, low: int, high: int) -> Callable[[Any], int]:
    """Return a parser of integers from `low` to `high`."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadValueError(f"expected {what}, an integer, not {show(value)}{_unquoted(value)}")
        if not low <= value <= high:
            raise BadValueError(f"expected {what} from {low} to {high}, not {show(value)}")
        return int(value)

    return parse


_DURATION = re.compile(r"(?=.)(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_LONGEST = 10 * 365 * 86400


def duration(seconds: float) -> str:
    """Return a duration as `1:02:11` or `2:11`."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class NumberOfSeconds(int):
    """A duration that was written without a unit, of which the writer may have meant another one."""


def parse_duration(value: Any) -> int:
    """Return seconds from `24h`, `15m`, `90s`, `1h30m`, or a number of seconds."""
    seconds = math.nan
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number:
        seconds = float(value) if abs(value) < _LONGEST * 10 else math.inf
    elif isinstance(value, str) and len(value) < 40 and (found := _DURATION.fullmatch(value.strip().lower())):
        seconds = sum(float(n) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True) if n)
    if not math.isnan(seconds) and 1 <= round(min(seconds, _LONGEST + 1)) <= _LONGEST:
        return NumberOfSeconds(round(seconds)) if is_number else round(seconds)
    raise BadValueError(f"expected a duration of at least 1s, such as 24h, 15m, 90s or 1h30m, not {show(value)}")


def show_duration(seconds: int) -> str:
    """Return the shortest form for `parse_duration`: 24h, 1h30m, 45s."""
    parts = ((seconds // 3600, "h"), (seconds % 3600 // 60, "m"), (seconds % 60, "s"))
    return "".join(f"{n}{unit}" for n, unit in parts if n)


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt])(?:i?b)?", re.IGNORECASE)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SMALLEST = 6 << 20  # Docker's own minimum memory limit


def parse_size(value: Any) -> int:
    """Return bytes from `64g`, `512m`, `1.5g` (powers of 1024, as in Docker), or a number of bytes."""
    size = math.nan
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and len(value) < 40 and (found := _SIZE.fullmatch(value.strip())):
        size = float(found[1]) * _UNITS[found[2].lower()]
    if _SMALLEST <= size < 1 << 60:
        return int(size)
    raise BadValueError(f"expected a size of at least 6m, such as 64g or 512m, not {show(value)}")


def show_size(size: int) -> str | int:
    """Return the form for `parse_size`, in the largest unit that divides the size."""
    for letter in "tgmk":
        if size % _UNITS[letter] == 0:
            return f"{size // _UNITS[letter]}{letter}"
    return size


def parse_flag(value: Any) -> bool:
    if isinstance(value, AmbiguousBool) and value.lower() in _AMBIGUOUS:
        return value.lower() in ("yes", "on")
    if isinstance(value, bool):
        return value
    raise BadValueError(f"expected true or false, not {show(value)}{_unquoted(value)}")


def parse_cpus(value: Any) -> float:
    if not isinstance(value, bool) and isinstance(value, (int, float)) and 0.01 <= value <= 100_000:
        return float(value)
    raise BadValueError(f"expected a number of CPUs above 0, such as 16 or 1.5, not {show(value)}{_unquoted(value)}")


_GPU_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}")


def parse_gpus(value: Any) -> Gpus:
    """Parse `all`, `none`, a number, indices or UUIDs; 0 is `none`."""
    if value in ("all", "none"):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return whole("a number of GPUs", 0, 1024)(value) or "none"
    if not isinstance(value, (list, tuple)):
        hint = _unquoted(value)
        if isinstance(value, str) and _GPU_UUID.fullmatch(value):
            hint = f"; put it in [...]: [{value}]"
        elif isinstance(value, str) and re.fullmatch(r"\d+(\s*,\s*\d+)+", value):
            hint = f"; for these indices: [{', '.join(re.findall(r'[0-9]+', value))}]"
        raise BadValueError(f"expected all, none, a number, or a list of indices or of UUIDs, not {show(value)}{hint}")
    if not value:
        raise BadValueError("an empty list of GPUs; expected none or all")
    for item in value:
        if value.count(item) > 1:
            raise BadValueError(f"GPU {show(item)} is listed twice")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return tuple(whole("a GPU's index", 0, 1023)(item) for item in value)
    if not all(isinstance(item, str) for item in value):
        raise BadValueError("expected a list of GPU indices or of UUIDs, not both")
    for item in value:
        if not _GPU_UUID.fullmatch(item):
            raise BadValueError(f"expected a GPU's index or its UUID (GPU-...), not {show(item)}{_unquoted(item)}")
    return tuple(map(str, value))


def parse_path(value: Any) -> str:
    """Return an absolute path in normal form, as required by Docker mounts."""
    if not isinstance(value, str):
        raise BadValueError(f"expected an absolute path, not {show(value)}")
    if not value.startswith("/"):
        raise BadValueError(f"expected an absolute path, starting with /, not {show(value)}")
    if ".." in value.split("/"):
        raise BadValueError(f"expected a path without '..', not {show(value)}")
    if re.search(r"[:,\x00-\x1f\x7f]", value):
        raise BadValueError(f"expected a path without colons, commas and control characters, not {show(value)}")
    return "/" + posixpath.normpath(value).strip("/")


def parse_address(value: Any) -> str:
    """Return an IP address that another node can connect to."""
    try:
        address = ipaddress.ip_address(value if isinstance(value, str) else "")
    except ValueError:
        raise BadValueError(f"expected an IP address such as 10.0.0.5, not {show(value)}") from None
    if address.is_unspecified or address.is_multicast:
        raise BadValueError(f"expected the IP address of a machine, not {show(value)}")
    return str(address)


# Excludes options of ssh and characters that need escaping in a label or file name.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.+-]*)@)?"
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


def parse_host(value: Any) -> str:
    """Parse an ssh config alias, user@host:port, ssh://user@host:port, or `local`."""
    if isinstance(value, str) and value.startswith("ssh://"):
        value = value.removeprefix("ssh://").rstrip("/")
    found = _HOST.fullmatch(value) if isinstance(value, str) and len(value) <= 300 else None
    if not found:
        hint = "; write it in quotes" if isinstance(value, (int, float)) else ""
        if isinstance(value, str) and value.count(":") > 1:
            hint = "; put an IPv6 address in brackets"
        if isinstance(value, str) and value.count("@") > 1:
            hint = "; give a user name with an @ in your ssh config, and its alias here"
        raise BadValueError(f"expected an ssh alias, user@host:port or local, not {show(value)}{hint}")
    if found["port"] and not 1 <= int(found["port"]) <= 65535:
        raise BadValueError(f"expected a port from 1 to 65535 in {show(value)}")
    return str(value)


def machine(host: str) -> tuple[str, str]:
    """Return host name and port, which identify a machine; port "": that of the ssh config."""
    found = _HOST.fullmatch(host)
    return (found["host"].lower(), found["port"] or "") if found else (host, "")


def names_of(hosts: Sequence[str]) -> list[str]:
    """Return default names: the host without user, with the port if hosts are repeated; local-0, local-1, ..."""
    bare = Counter(machine(host)[0] for host in hosts)
    names: list[str] = []
    count = itertools.count()
    for host in hosts:
        name, port = machine(host)
        if host == LOCAL and bare[LOCAL] > 1:
            names.append(f"{LOCAL}-{next(count)}")
            continue
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", name.strip("[]")).lstrip("-._") or "node"
        names.append((f"{plain}-{port}" if bare[name] > 1 and port else plain)[:63])
    return names
