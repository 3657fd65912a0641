"""Commands and groups whose help shows no type for a flag, which takes no value; options that features add to one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter
from typing import Any

from typer.core import TyperCommand, TyperGroup


def _without_types_of_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


def with_options(function: Callable[..., Any], options: Sequence[tuple[Callable[..., Any], str]]) -> Callable[..., Any]:
    """Return a command with the options of features: the keyword-only parameters of functions.

    The command gets the functions, with the values of their options, as its parameter `added`. options: each function,
    whose docstring precedes the command's example, and the command's parameter that precedes its own in --help.
    """
    signature = inspect.signature(function, eval_str=True)
    if "added" not in signature.parameters:
        return function
    parameters = [each for each in signature.parameters.values() if each.name != "added"]
    shown = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    text, mark, example = (function.__doc__ or "").partition("\n\n    Example: ")
    taken = []
    for option, after in options:
        its = inspect.signature(option, eval_str=True).parameters.values()
        own = [each for each in its if each.kind is Parameter.KEYWORD_ONLY]
        place = [each.name for each in shown].index(after) + 1
        shown[place:place] = own
        taken.append((option, [each.name for each in own]))
        text += f"\n\n    {(option.__doc__ or '').strip()}"

    def command(**values: Any) -> Any:
        added = [partial(option, **{name: values.pop(name) for name in names}) for option, names in taken]
        return function(**values, added=added)

    command.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]  # typer reads it
    command.__doc__ = text + mark + example
    return command
