"""Commands and groups whose help shows no type for a flag, which takes no value; options that features add to one."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from inspect import Parameter
from typing import Any

from typer.core import TyperCommand, TyperGroup

from launcher.errors import UsageError


def _without_types_of_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Raises UsageError for an option that is a key of the job file, or the program's own, or lacks its value."""
        params = self.get_params(ctx)
        if not ctx.resilient_parsing and any("--set" in param.opts for param in params):
            taking = {name: not getattr(param, "is_flag", False) for param in params for name in param.opts}
            given = [param for param in params if param.param_type_name == "argument"]
            refuse_others(str(self.name), args, taking, len(given))
        return super().parse_args(ctx, args)


# The job file's keys, as options of the command line; those of torchrun as the keys that replace them.
KEYS = (
    *("name", "runtime", "image", "code", "nodes", "gpus", "processes", "run", "mounts", "data", "env", "secrets"),
    *("output", "restarts", "min_nodes", "spares", "lost_after", "port", "timeout", "hang_timeout", "resources"),
    *("docker", "cluster", "sweep", "each", "cache", "models", "budget", "revision", "codes"),
)
_OF_TORCHRUN = {"nproc_per_node": "processes", "master_port": "port", "max_restarts": "restarts", "num_gpus": "gpus"}


def refuse_others(command: str, args: Sequence[str], taking: Mapping[str, bool], arguments: int) -> None:
    """Raise UsageError if the command line has options of the program or keys of the job file: `--lr 0.1`, `lr=0.1`.

    taking: whether each option of the command takes a value. arguments: how many other arguments it has.
    """
    sets, given, words = list[str](), list[str](), [word for word in args if word != "--"]
    first = ""
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if _is_foreign(word, taking):
            if not equals and words and not words[0].startswith("-") and not words[0].endswith((".yaml", ".yml")):
                value = words.pop(0)
            sets.append(f"--set {_key(name)}={shlex.quote(value) if value else 'true'}")
        elif word.startswith("-") and word != "-":
            value = words.pop(0) if not equals and taking.get(word) and words else ""
            if value.startswith("-") and value in taking:
                fix = f"see its options: launcher {command} --help"
                raise UsageError(f"launcher {command}", f"{word} has no value: {value} follows it", fix)
            continue
        elif len(given) < arguments:
            given.append(word)
            continue
        elif equals:
            sets.append(f"--set {_key(name)}={shlex.quote(value)}")
        else:
            continue
        first = first or name
    if sets:
        what = f"{first} is not an option of this command"
        job = given[0] if given else "JOB"
        raise UsageError(f"launcher {command}", what, f"set it in the job: launcher {command} {job} {' '.join(sets)}")


def _is_foreign(word: str, taking: Mapping[str, bool]) -> bool:
    name = word.partition("=")[0] if word.startswith("--") else word[:2]
    return word.startswith("-") and word != "-" and name not in taking and not get_close_matches(name, taking, 1, 0.8)


def _key(option: str) -> str:
    """Return the key of the job that an option stands for: of the job file, else an argument of the program."""
    name = option.lstrip("-").replace("-", "_")
    if name in KEYS or name in _OF_TORCHRUN:
        return _OF_TORCHRUN.get(name, name)
    return f"run.args.{option.removeprefix('--') if '_' not in option else option}"


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
