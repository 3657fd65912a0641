"""The arguments of a job as the command line that a program is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.job.scalars import parse_text

ArgValue = str | bool | None | tuple[str, ...]
Args = Mapping[str, ArgValue] | tuple[str, ...]


def argv_of(args: Mapping[str, object] | Sequence[str]) -> tuple[str, ...]:
    """`k: v` becomes `--k v`, underscores dashes; true `--k`; false and null nothing; a list `--k a b`. A list of
    arguments is used as it is. Raises ValueError for anything nested deeper.
    """
    if not isinstance(args, Mapping):
        return tuple(parse_text(item) for item in args)
    argv: list[str] = []
    for key, value in args.items():
        if value is None or value is False:
            continue
        argv.append(option(key))
        if isinstance(value, (list, tuple)):
            argv += [parse_text(item) for item in value]
        elif value is not True:
            argv.append(parse_text(value))
    return tuple(argv)


def option(key: str) -> str:
    """An argument's name as a program's option: `batch_size` is `--batch-size`."""
    return "--" + key.replace("_", "-")
