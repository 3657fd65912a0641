"""The time to search what programs write grows with its length, and not with the square of it, whatever they write."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.container_scripts import words
from launcher.container_scripts.words import bounded, last_traceback, lost_peer
from launcher.faults import disk, lookup, table, transport
from launcher.records.left_out import NEVER, LeftOut
from launcher.records.masking import Masker
from launcher.run.end import left_out

try:
    from re import _parser as sre  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as sre  # type: ignore[no-redef]

SIZE = 8 << 10  # of the shorter text
NOTHING = 0.01  # seconds: less is not measured
Search = Callable[[str], object]


def cost(search: Search, text: str) -> float:
    """In CPU time, which other programs do not affect; the least of three."""
    found = []
    for _ in range(3):
        began = time.thread_time()
        search(text)
        found.append(time.thread_time() - began)
        if found[-1] < NOTHING:
            break
    return min(found)


def is_slow(search: Search, unit: str, size: int = SIZE) -> bool:
    """Whether twice as much of a text takes more than three times as long, and again four times as much."""
    return all(_growth(search, unit, each) >= 3 for each in (size, 2 * size))


def _growth(search: Search, unit: str, size: int) -> float:
    twice = cost(search, unit * (2 * size // len(unit)))
    return twice / max(cost(search, unit * (size // len(unit))), 1e-6) if twice > NOTHING else 1.0


def patterns() -> Iterator[tuple[str, str, Search]]:
    """Yield each pattern with the search as the launcher does it."""

    def anywhere(pattern: re.Pattern[str]) -> Search:
        return lambda text: [*pattern.finditer(bounded(text))]

    def at_the_start(pattern: re.Pattern[str]) -> Search:
        return lambda text: pattern.match(bounded(text))

    for module in (disk, left_out, transport, words):
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                yield f"{module.__name__}.{name}", value.pattern, anywhere(value)
    for reason, _, _ in transport._REASONS:  # noqa: SLF001
        yield reason, reason, anywhere(re.compile(reason, re.ASCII))
    for rule in (*table.RULES, table.LAST_RESORT):
        yield rule.pattern, rule.pattern, anywhere(re.compile(rule.pattern, re.MULTILINE))
        for origin in rule.origins:
            yield f"{origin.name}, file", origin.file, anywhere(re.compile(origin.file))
            yield f"{origin.name}, line", origin.line, anywhere(re.compile(origin.line))
            yield f"{origin.name}, words", origin.words, at_the_start(re.compile(origin.words))
            yield f"{origin.name}, kind", origin.kind, at_the_start(re.compile(f"(?:{origin.kind})$"))
    masker = Masker(("a-secret-value", "another"))
    yield "mask", str(masker._in_place and masker._in_place.pattern), masker  # noqa: SLF001


def texts(pattern: str, flags: int = 0) -> set[str]:
    """Return beginnings of what a pattern matches, which make it look again and again for the rest."""
    found = set[str]()
    for seed in range(8):
        text = "".join(_matching(sre.parse(pattern, flags), seed % 3, random.Random(seed)))
        found |= {text[: len(text) * part // 6] for part in range(1, 7)}
    return found - {""}


def _matching(tree: Any, repeats: int, chance: random.Random) -> Iterator[str]:
    """Yield the parts of a text that matches, without what is looked ahead for."""
    for operation, value in tree:
        kind = str(operation)
        if kind == "LITERAL":
            yield chr(value)
        elif kind in ("ANY", "NOT_LITERAL"):
            yield "a"
        elif kind == "IN":
            yield _one_of(value, chance)
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            for _ in range(max(least, min(most, repeats))):
                yield from _matching(inner, repeats, chance)
        elif kind == "SUBPATTERN":
            yield from _matching(value[-1], repeats, chance)
        elif kind == "BRANCH":
            yield from _matching(chance.choice(value[1]), repeats, chance)


def _one_of(group: Any, chance: random.Random) -> str:
    named = {"DIGIT": "1", "WORD": "a", "SPACE": " ", "NOT_SPACE": "a", "NOT_DIGIT": "a", "NOT_WORD": "-"}
    found = []
    for operation, value in group:
        kind = str(operation)
        if kind == "NEGATE":
            return "a"
        found.append(
            chr(value)
            if kind == "LITERAL"
            else chr(value[0])
            if kind == "RANGE"
            else named[str(value).removeprefix("CATEGORY_")]
        )
    return chance.choice(found)


EVERY = list({name: (name, pattern, search) for name, pattern, search in patterns()}.values())


@pytest.mark.parametrize(("pattern", "search"), [each[1:] for each in EVERY], ids=[each[0][:60] for each in EVERY])
def test_no_pattern_takes_the_square_of_a_hostile_text(pattern: str, search: Search) -> None:
    assert [unit for unit in texts(pattern) if is_slow(search, unit)] == []


LOST = LeftOut({"data/": NEVER})
FAILED = "Traceback (most recent call last):\nRuntimeError: "


@pytest.mark.parametrize(
    ("search", "unit"),
    [
        (lambda text: transport.parse(f"NCCL INFO Using network IB\nNCCL INFO NET/IB : Using {text}"), "[0]={"),
        (lambda text: lookup.cause_of_report(table.ENGINE, f"exec format error{text}"), "lib..so"),
        (lambda text: lookup.cause_of_output(text, "", {}), "lib..so"),
        (lambda text: lookup.cause_of_output("", text, {}), ":[E1"),
        (lambda text: lookup.cause_of_output(FAILED + text, "", {}), "[gloo/"),
        (lambda text: lookup.cause_of_output(f"{FAILED[:-14]}OSError: {text}", text, {}), " /a could n"),
        (lambda text: left_out.left_out_hint(f"no such file {text}", LOST, Path("/"), "/code"), "\u2018a"),
        (lambda text: left_out.left_out_hint(f"no such file {text}", LOST, Path("/"), "/code"), "/a"),
        (disk.is_full, ": quota exceeded "),
        (lost_peer, "[W"),
        (lambda text: last_traceback(f"{text}\n{FAILED}\n{FAILED}{text}\nAuthor"), "/accelerate/\n  "),
        (
            lambda text: last_traceback("\n".join(f"[rank{n}]: {FAILED}" for n in range(len(text) // 60))),
            " " * 60,
        ),
    ],
)
def test_what_searches_texts_of_programs_bounds_their_lines(search: Search, unit: str) -> None:
    assert not is_slow(search, unit, 32 << 10)
    assert cost(search, unit * ((256 << 10) // len(unit))) < 5


def test_a_long_line_keeps_both_ends() -> None:
    line = "OSError: " + "x" * 100_000 + ": No space left on device"
    assert bounded(f"a\n{line}\n") == f"a\n{line[:1000]} [...] {line[-1000:]}\n"
    assert bounded("a\n" * 5 + "x" * 2000) == "a\n" * 5 + "x" * 2000
