"""Validation of values read from a node or a record, which anyone may have written.

Each function accepts a value of any type and returns it validated. Raises ValueError that names the expected kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from launcher.model.plan import RUN_ID, RunId

OUTPUT_ROOT = ".launcher"  # in the ssh user's home: the folder of all runs' output folders
NODE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


def run_id(value: object) -> RunId:
    return text(value, RUN_ID, "run id")


def text(value: object, form: str, what: str) -> str:
    """Return the value if it is a string that `form`, a regular expression, matches completely."""
    if not isinstance(value, str) or not re.fullmatch(form, value, re.ASCII):
        raise _refused(value, what)
    return value


def printable(value: object, most: int, what: str) -> str:
    """Return a line of text of at most that many characters."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > most:
        raise _refused(value, what)
    return value


def node_name(value: object) -> str:
    return text(value, NODE_NAME, "node's name")


def number(value: object, most: int) -> int:
    """Return an integer from 0 to `most`, given as an integer or as decimal digits."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _refused(value, f"number up to {most}")
    return value


def output_folder(value: object, run: RunId) -> str:
    """Return `/.../.launcher/<run>`: an absolute path without `.` and `..`."""
    parts = value.split("/") if isinstance(value, str) and value.isprintable() and len(value) < 4096 else []
    if parts[:1] != [""] or parts[-2:] != [OUTPUT_ROOT, run] or {".", ".."} & set(parts):
        raise _refused(value, f"output folder of {run}")
    return "/".join(parts)


def fitting(value: object, form: Any) -> Any:
    """Return a JSON value without the parts that have another form.

    form: a type or a union of types; `[form]`: a list of such values; `{key: form}`: an object, whose other keys stay.
    Raises ValueError if the value itself is of another type.
    """
    kind = type(form) if isinstance(form, (list, dict)) else form
    if not isinstance(value, kind) or (isinstance(value, bool) and form not in (bool, bool | None, object)):
        raise _refused(value, str(getattr(kind, "__name__", kind)))
    if isinstance(form, list) and isinstance(value, list):
        return [part for _, part in _fitting((0, each, form[0]) for each in value)]
    if isinstance(form, dict) and isinstance(value, dict):
        return dict(_fitting((key, each, form.get(key, object)) for key, each in value.items()))
    return value


def _fitting(parts: Iterable[tuple[Any, object, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield the key and the value of those whose value has its form."""
    for key, value, form in parts:
        with suppress(ValueError):
            yield key, fitting(value, form)


def _refused(value: object, what: str) -> ValueError:
    return ValueError(f"{str(value)[:80]!a} is not a valid {what}")
