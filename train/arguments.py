"""Command-line options from a dataclass: each field declares the group, help text, default and limits of an option."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields
from typing import Any, NoReturn

from train.errors import TrainError
from train.own import is_own

OWN = "MODULE:FUNCTION"


class Parser(argparse.ArgumentParser):
    """Raises TrainError, in one line, where argparse prints the usage and exits."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown options come first: a required option that seems to be missing may be misspelt."""
        if unknown := self._unknown(args or ()):
            raise TrainError("; ".join(unknown))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        _, missing, names = message.partition("arguments are required: ")
        raise TrainError(f"{names}: required" if missing else message.removeprefix("argument "))

    def _unknown(self, args: Sequence[str]) -> list[str]:
        known = self._option_string_actions  # argparse has no public list
        given = [name for arg in args if (name := arg.partition("=")[0]).startswith("--") and len(name) > 2]
        if self._subparsers is not None:  # the parser of the command that follows knows the options
            return []
        found = []
        for name in dict.fromkeys(name for name in given if name not in known):
            close = difflib.get_close_matches(name.replace("_", "-"), [*known], n=1)
            found.append(f"{name}: no such option; " + (f"closest: {close[0]}" if close else f"see {self.prog} --help"))
        return found


def option(group: str, text: str, default: Any, **limits: Any) -> Any:
    """Return a field that is also a command-line option, as fields without a group are not.

    `limits`: argparse keywords, `above`, `minimum`, `maximum`; `own`: beside `choices`, a function of the user.
    """
    return field(default=default, metadata={"group": group, "help": text, **limits})


def parsed(declared: Any, argv: list[str], prog: str, description: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the values of all options of the dataclass `declared` by field name, and the names of those in `argv`.

    Raises:
        TrainError: an option is unknown or missing, or its value is of another type.
    """
    defaults = {item.name: item.default for item in fields(declared)}
    empty = argparse.Namespace(**dict.fromkeys(defaults, MISSING))  # so argparse fills in no default
    found = vars(_parser(declared, prog, description).parse_args(argv, empty))
    given = {
        key: tuple(value) if isinstance(value, list) else value for key, value in found.items() if value is not MISSING
    }
    return defaults | given, frozenset(given)


def _parser(declared: Any, prog: str, description: str) -> Parser:
    root = Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,  # --epoch must not silently mean --epochs
    )
    groups: dict[str, Any] = {}
    for item in fields(declared):
        meta = dict(item.metadata)
        group = meta.pop("group", "")
        if not group:
            continue
        groups[group] = groups.get(group) or root.add_argument_group(group)
        groups[group].add_argument(f"--{item.name.replace('_', '-')}", **_argument(item.default, meta))
    return root


def _argument(default: Any, meta: dict[str, Any]) -> dict[str, Any]:
    keywords: dict[str, Any] = {key: meta[key] for key in ("help", "choices", "nargs") if key in meta}
    if meta.get("own"):
        choices = keywords.pop("choices")
        return keywords | {"type": _choice(choices), "default": default, "metavar": f"{{{','.join(choices)},{OWN}}}"}
    if default is MISSING:
        return keywords | {"required": True, "metavar": "PATH"}
    if isinstance(default, bool):
        return keywords | {"action": argparse.BooleanOptionalAction, "default": default}
    kind = (type(default[0]) if default else str) if isinstance(default, tuple) else type(default)
    if "choices" not in keywords:
        keywords["metavar"] = {int: "N", float: "X", str: "TEXT"}[kind]
    return keywords | {"type": kind, "default": default}


def _choice(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a function that accepts one of these words, or the name of a function."""

    def check(text: str) -> str:
        if text in choices or is_own(text):
            return text
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(choices)}, {OWN})")

    return check


def check_limits(options: Any) -> None:
    """Raise TrainError if a value of this dataclass is outside its limits."""
    for item in fields(options):
        _check_limits(item.name, getattr(options, item.name), item.metadata)


def _check_limits(name: str, value: Any, meta: Any) -> None:
    if "above" in meta and not value > meta["above"]:
        raise TrainError(f"--{name.replace('_', '-')} {value}: must be greater than {meta['above']}")
    if "minimum" in meta and value < meta["minimum"]:
        raise TrainError(f"--{name.replace('_', '-')} {value}: must be at least {meta['minimum']}")
    if "maximum" in meta and not value <= meta["maximum"]:
        raise TrainError(f"--{name.replace('_', '-')} {value}: must be at most {meta['maximum']}")
