"""Problems of a job file or of the settings file, with their positions, and the message that reports all of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from launcher.errors import JobInvalid

Path = tuple[str | int, ...]

SHOWN = 10  # maximum number of problems in a message


@dataclass(frozen=True)
class Mark:
    """A position: a line of a file (counted from 1), or an override such as `--set port=1`, without a line."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        parts = [printable(self.source), *(str(n) for n in (self.line, self.column) if n)]
        return ":".join(parts)


class Positions:
    """The position of each value of a job. All are equal, so that equal jobs from different files are equal."""

    def __init__(
        self, marks: Iterable[tuple[Path, Mark]] = (), file: FilePath | None = None, options: Sequence[str] = ()
    ) -> None:
        """options: of a command line, with which the file gives this job."""
        self._marks = dict(marks)
        self.file = file  # None for a job that was not loaded from a file
        self.options = tuple(options)
        self.of_file: object = None  # the job, if the file alone gives it, and gives it to who reads it again

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions)

    def __hash__(self) -> int:
        return 0

    def where(self, path: Path) -> Mark | None:
        """Return the position of `path` or its nearest parent; None for a job that was not loaded from a file."""
        while path and path not in self._marks:
            path = path[:-1]
        return self._marks.get(path)


@dataclass(frozen=True)
class Problem:
    """Position, path of the key (as in `--set`), and message."""

    mark: Mark
    path: Path
    message: str

    @property
    def text(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


class BadValueError(ValueError):
    """An invalid value. The message follows the key's path and says what is expected. fix: a command that helps."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(f"{what}\n  -> {fix}" if fix else what)
        self.what = what
        self.fix = fix


class LocatedError(BadValueError):
    """Problems at paths below the validated value, raised by the models' validators."""

    def __init__(self, problems: Sequence[tuple[Path, str]]) -> None:
        super().__init__("; ".join(f"{dotted(path)}: {message}" if path else message for path, message in problems))
        self.problems = tuple(problems)


def refusal(problems: Iterable[Problem]) -> JobInvalid:
    """Return one error for all problems, by line, overrides last; at most `SHOWN` are listed."""
    order = sorted(set(problems), key=lambda p: (p.mark.line == 0, p.mark.line, p.mark.column, p.text))
    first, *others = order
    lines = [first.text, *(f"{problem.mark}: {problem.text}" for problem in others[: SHOWN - 1])]
    if len(order) > SHOWN:
        lines.append(f"... and {len(order) - SHOWN} more")
    return JobInvalid(str(first.mark), "\n".join(lines))


def dotted(path: Path) -> str:
    return ".".join(str(part) if isinstance(part, int) else _short(printable(part)) for part in path)


def show(value: Any) -> str:
    """Return a value as quoted in messages: short, on one line, without control characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, str):
        return _short(repr(str(value)))
    return _short(str(value))


def nearest(name: str, known: Iterable[str], similar: float = 0.6) -> str:
    """Return `; did you mean 'x'?`, or "" if no known name is similar."""
    close = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=similar)
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown_key(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or all known keys if none is similar."""
    return nearest(name, known) or f"; expected one of {', '.join(known)}"


def expected(detail: Mapping[str, Any], keys: Sequence[str] = ()) -> str:
    """Return what an error of pydantic says. keys: those of a mapping that is expected here, if it has fixed ones."""
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        return "required key is missing"
    if kind == "string_type":
        return f"expected text, not {show(value)}"
    if kind in ("literal_error", "union_tag_invalid"):
        value = detail["ctx"].get("tag", value)
        options = detail["ctx"].get("expected") or detail["ctx"]["expected_tags"].replace(", ", " or ")
        known = options.replace("'", "").replace(" or ", ", ").split(", ")
        return f"expected {options}, not {show(value)}" + (nearest(value, known) if isinstance(value, str) else "")
    if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        such = f" with keys such as {', '.join(keys[:4])}" if keys else ""
        return f"expected a mapping{such}, not {show(value)}"
    if kind in ("tuple_type", "list_type"):
        hint = "; put it in [...]" if isinstance(value, str) else ""
        if isinstance(value, str) and re.fullmatch(r"[\w.@-]+([,\s]+[\w.@-]+)+", value):
            hint += ": [" + ", ".join(re.split(r"[,\s]+", value)) + "]"
        return f"expected a list, not {show(value)}{hint}"
    return str(detail["msg"])


def printable(text: str) -> str:
    """Return the text with line ends and control characters escaped, so that a message stays on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
