"""Arguments of a program: a mapping or a list as argv, and with other values for some options.

A key means the option of its name, with - for _ or the reverse; without dashes in front, whichever the option has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TypeVar

from launcher.job.problems import BadValueError, LocatedError, Path, show
from launcher.job.scalars import Args, ArgValue, parse_text

Value = TypeVar("Value")

# --lr, -lr, --lr=0.1, lr=0.1, +lr=0.1
_WORD = re.compile(r"(?P<dashes>-{0,2})\+{0,2}(?P<name>[A-Za-z0-9][\w.-]*)(?P<equals>=(?P<value>.*))?", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def option_of(key: str) -> str:
    """Return a mapping's key as an option: `--k`, with dashes for underscores; one that begins with a dash, as is."""
    return key if key.startswith("-") else "--" + key.replace("_", "-")


def argv_of(args: Mapping[str, object] | Sequence[str]) -> tuple[str, ...]:
    """Return the arguments as argv. `k: v` becomes `--k v` (`option_of`); true becomes `--k`; false and null are
    omitted; a list becomes `--k a b`. A list of arguments is not changed. Raises ValueError for other values.
    """
    if not isinstance(args, Mapping):
        return tuple(parse_text(item) for item in args)
    argv: list[str] = []
    for key, value in args.items():
        if value is None or value is False:
            continue
        argv.append(option_of(key))
        if isinstance(value, (list, tuple)):
            argv += [parse_text(item) for item in value]
        elif value is not True:
            argv.append(parse_text(value))
    return tuple(argv)


def merged(args: Args, own: Args) -> Args:
    """Return `args` with those of a variant or a node: each option where and as it stands, else appended; a list of
    arguments is appended. Raises LocatedError with the keys of options that cannot be replaced.
    """
    if not isinstance(own, Mapping):
        return (*argv_of(args), *own)
    problems: list[tuple[Path, str]] = []
    for key, value in own.items():
        if isinstance(args, Mapping):
            args = placed(args, key, value)
            continue
        try:
            start, stop, words = change(args, key, value)
            args = (*args[:start], *words, *args[stop:])
        except BadValueError as error:
            problems.append(((key,), str(error)))
    if problems:
        raise LocatedError(problems)
    return args


def placed(entries: Mapping[str, Value], key: str, value: Value) -> dict[str, Value]:
    """Return a mapping with a value for an option. One that it has keeps its place, and its spelling unless `key` has
    dashes in front.
    """
    old = spelled(entries, key)
    if old is None:
        return {**entries, key: value}
    new = key if key.startswith("-") else old
    return {new if each == old else each: value if each == old else kept for each, kept in entries.items()}


def spelled(keys: Iterable[str], key: str) -> str | None:
    """Return the one of `keys` that names the same option as `key`; None if none does."""
    known = list(keys)
    return key if key in known else next((each for each in known if _same(each, key)), None)


def _same(one: str, other: str) -> bool:
    """Whether two keys, or an option and a key, name the same option."""
    bare = [each.lstrip("-") for each in (one, other)]
    dashes = {len(each) - len(name) for each, name in zip((one, other), bare, strict=True)}
    return bare[0].replace("_", "-") == bare[1].replace("_", "-") and (len(dashes) == 1 or 0 in dashes)


def change(words: Sequence[str], key: str, value: ArgValue) -> tuple[int, int, tuple[str, ...]]:
    """Return what gives an option another value in a list of arguments: words[start:stop] = new, as (start, stop, new).

    It is replaced in the form in which it stands (`--lr 0.2`, `--lr=0.2`, `lr=0.2`), else appended in the form of the
    others. Raises BadValueError if it is given twice, or if it is not clear which words are its value.
    """
    found = [(index, word) for index, word in _options(words) if _same(word["dashes"] + word["name"], key)]
    if not found:
        return len(words), len(words), _appended(words, key, value)
    if len(found) > 1:
        raise BadValueError(f"{_option(found[0][1])} is given {len(found)} times in the list: leave one there")
    ((index, word),) = found
    if word["equals"]:
        return index, index + 1, _assigned(word, value)
    old = _values(words[index + 1 :])
    after = index + 1 + len(old)
    if len(old) == 1 and old[0].lower() in ("true", "false") and isinstance(value, bool):
        return index + 1, after, (_boolean(value, old[0]),)
    if value is True:
        return index, index, ()  # it stands there
    unclear = f"{words[index]} is followed by {' '.join(map(show, old))} in the list: "
    if value is None or value is False:
        if old:
            raise BadValueError(f"{unclear}remove there what you do not want, or write args as a mapping")
        return index, index + 1, ()
    if not old:
        raise BadValueError(f"{words[index]} stands in the list without a value: give it one there, or remove it")
    if isinstance(value, str):
        if len(old) > 1:
            raise BadValueError(f"{unclear}give a list of values, or write args as a mapping")
        return index + 1, after, (value,)
    return index + 1, after, value


def _options(words: Sequence[str]) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield index and parts of each word that names an option."""
    for index, word in enumerate(words):
        found = _WORD.fullmatch(word)
        if found and (found["equals"] or (found["dashes"] and not _NUMBER.fullmatch(word))):
            yield index, found


def _option(word: re.Match[str]) -> str:
    return word[0].partition("=")[0]


def _values(after: Sequence[str]) -> tuple[str, ...]:
    """Return the values of an option, from the words after it: the next one, and those of its kind that follow, as a
    number may be followed by a path that is an argument of its own.
    """
    plain = list(takewhile(lambda word: not word.startswith("-") or _NUMBER.fullmatch(word), after))
    return tuple(takewhile(lambda word: _kind(word) == _kind(plain[0]), plain))


def _kind(word: str) -> str:
    return "number" if _NUMBER.fullmatch(word) else "path" if "/" in word else "word"


def _boolean(value: bool, old: str) -> str:
    return str(value) if old[:1].isupper() else str(value).lower()


def _assigned(word: re.Match[str], value: ArgValue) -> tuple[str, ...]:
    """Return `--lr=0.1` or `lr=0.1` with another value; without dashes, null and lists are Hydra's."""
    if value is None and word["dashes"]:
        return ()
    if isinstance(value, tuple) and word["dashes"] and not word["value"].startswith("["):
        raise BadValueError(f"{word[0]} stands in the list with one value: write several there, in the program's form")
    return (f"{_option(word)}={_text(value, word['value'])}",)


def _text(value: ArgValue, old: str = "") -> str:
    if isinstance(value, bool):
        return _boolean(value, old)
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return "null" if value is None else value


def _appended(words: Sequence[str], key: str, value: ArgValue) -> tuple[str, ...]:
    """Return a new option in the form of the last one that has a value; its name is spelled as the others are."""
    others = list(_options(words))
    form = next((word for index, word in reversed(others) if word["equals"] or _values(words[index + 1 :])), None)
    if form is not None and not form["dashes"] and not key.startswith("-"):
        return (f"{key}={_text(value)}",)
    if value is None or value is False:
        return ()
    names = [word["name"] for _, word in others]
    underscores = any("_" in name for name in names) and not any("-" in name for name in names)
    option = f"--{key}" if underscores and not key.startswith("-") else option_of(key)
    if value is True:
        return (option,)
    if isinstance(value, str) and form is not None and form["equals"]:
        return (f"{option}={value}",)
    return (option, value) if isinstance(value, str) else (option, *value)
