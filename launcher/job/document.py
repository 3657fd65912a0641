"""YAML text to a tree of values with their positions: one document, no tags, no YAML 1.1 types, no alias bombs.

The tree is built from the parser's events, without recursion, so that depth and size are limited instead of crashing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from launcher.job.problems import Mark, Path, Problem, refusal, show
from launcher.job.scalars import resolve

DEEPEST = 32
MOST_VALUES = 100_000  # aliases expanded, each counted at every level it is in; 100 characters count as one

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLAIN_TAGS = (None, "!", "tag:yaml.org,2002:str")

# The parser's messages for the commonest mistakes, and what they mean in a job file.
_HINTS = {
    "mapping values are not allowed": "is a value that holds ': ' without quotes, or an indentation wrong?",
    "did not find expected key": "is this line indented unlike those above, or a quote or bracket left open?",
    "did not find expected '-'": "is this line indented unlike the list above?",
    "expected <block end>": "is this line indented unlike those above?",
    "did not find expected ',' or": "is a bracket left open, or a comma missing?",
    "expected ',' or": "is a bracket left open, or a comma missing?",
    "found unexpected end of stream": "is a quote left open?",
    "did not find expected node content": "is a value missing, or a bracket left open?",
    "could not find expected ':'": "is a ':' with a space missing after the key?",
    "unknown escape character": "in double quotes \\ begins an escape; use single quotes",
    "that cannot start any token": "quote values that begin with such a character",
    "unknown directive": "a line beginning with % is a directive; quote it",
}


@dataclass(frozen=True)
class Node:
    """A value and the place of its key (or of its list item). `size` counts all values in it, aliases expanded."""

    mark: Mark
    value: Any  # a scalar, list[Node] or dict[str, Node]; never changed in place: aliases share it
    size: int = 1

    def plain(self) -> Any:
        """The value as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def marks(self, path: Path = ()) -> Iterator[tuple[Path, Mark]]:
        """The place of every value in it, by path."""
        yield path, self.mark
        if isinstance(self.value, dict):
            for key, node in self.value.items():
                yield from node.marks((*path, key))
        elif isinstance(self.value, list):
            for index, node in enumerate(self.value):
                yield from node.marks((*path, index))


@dataclass
class _Open:
    """A collection whose end event has not come yet."""

    mark: Mark
    anchor: str | None
    entries: dict[str, Node] | None  # None for a list
    items: list[Node] = field(default_factory=list)
    key: tuple[str | None, Mark] | None = None  # a mapping's key without its value yet; no text: an invalid key
    merges: bool = False  # the key is <<
    merged: list[Node] = field(default_factory=list)


def compose(text: str, source: str, *, inline: bool = False) -> tuple[Node | None, list[Problem]]:
    """The document's root (None if it is empty) and the problems that did not stop the parser.

    source: the name in its marks. inline: it is no file, so its marks have no lines. Raises JobInvalid.
    """
    composer = _Composer(source, inline)
    if found := _UNPRINTABLE.search(text):
        before = text[: found.start()]
        place = composer.mark(before.count("\n"), len(before) - before.rfind("\n") - 1, column=True)
        raise refusal([Problem(place, (), f"the control character {found[0]!r} is not allowed; is this a text file?")])
    try:
        for event in yaml.parse(text, Loader=_Loader):
            composer.take(event)
    except yaml.MarkedYAMLError as error:
        raise composer.syntax(error, text) from None
    return composer.root, composer.problems


class _Composer:
    def __init__(self, source: str, inline: bool) -> None:
        self.root: Node | None = None
        self.problems: list[Problem] = []
        self._source = source
        self._inline = inline
        self._documents = 0
        self._values = 0
        self._stack: list[_Open] = []
        self._anchors: dict[str, Node] = {}

    def mark(self, line: int, at: int = 0, *, column: bool = False) -> Mark:
        """line and at count from 0, like the parser's."""
        return Mark(self._source) if self._inline else Mark(self._source, line + 1, at + 1 if column else 0)

    def take(self, event: Any) -> None:
        mark = self.mark(event.start_mark.line)
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise refusal([Problem(mark, (), "a second YAML document begins here; a job file holds exactly one")])
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event, mark)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                message = f"*{event.anchor} has no finished &{event.anchor} above it"
                raise refusal([Problem(mark, self._path(), message)])
            self._place(self._anchors[event.anchor], mark, None)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._check_tag(event, mark)
            if len(self._stack) >= DEEPEST:
                raise refusal([Problem(mark, (), f"nested deeper than {DEEPEST} levels")])
            entries: dict[str, Node] | None = {} if isinstance(event, yaml.MappingStartEvent) else None
            self._stack.append(_Open(mark, event.anchor, entries))
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._close()

    def _scalar(self, event: Any, mark: Mark) -> None:
        plain = event.implicit[0] and not event.style
        top = self._stack[-1] if self._stack else None
        if top is not None and top.entries is not None and top.key is None:
            top.key = (event.value, mark)
            if (first := top.entries.get(event.value)) is not None:
                where = f"first on line {first.mark.line}" if first.mark.line else "twice"
                self.problems.append(Problem(mark, self._path(), f"the key is given twice, {where}"))
            top.merges = plain and event.value == "<<"
            return
        self._check_tag(event, mark)
        value = resolve(event.value) if plain else event.value
        self._place(Node(mark, value, 1 + len(event.value) // 100), mark, event.anchor)

    def _close(self) -> None:
        top = self._stack.pop()
        children = top.items if top.entries is None else list(top.entries.values())
        value: Any = top.items
        if top.entries is not None:
            value = dict(top.entries)
            for mapping in top.merged:  # the first one that has a key wins; the mapping's own keys override all
                value = {**mapping.value, **value}
        size = 1 + sum(child.size for child in (*children, *top.merged))
        self._place(Node(top.mark, value, size), top.mark, top.anchor)

    def _place(self, node: Node, mark: Mark, anchor: str | None) -> None:
        """Attach a finished value to its parent; a collection that is itself a key is refused."""
        if anchor:
            self._anchors[anchor] = node
        self._values += node.size
        if self._values > MOST_VALUES:
            raise refusal([Problem(mark, self._path(), f"more than {MOST_VALUES} values, aliases filled in")])
        if not self._stack:
            self.root = node
            return
        top = self._stack[-1]
        if top.entries is None:
            top.items.append(replace(node, mark=mark))
        elif top.key is None:
            self.problems.append(Problem(mark, self._path(), "a key must be text, not a list, a mapping or an alias"))
            top.key, top.merges = (None, mark), False
        else:
            (key, place), top.key = top.key, None
            if top.merges:
                self._merge(top, node, place)
            elif key is not None:
                top.entries.setdefault(key, replace(node, mark=place))

    def _merge(self, top: _Open, node: Node, mark: Mark) -> None:
        for mapping in node.value if isinstance(node.value, list) else [node]:
            if isinstance(mapping.value, dict):
                top.merged.append(mapping)
            else:
                self.problems.append(Problem(mark, (*self._path(), "<<"), "expected an alias of a mapping, or several"))

    def _check_tag(self, event: Any, mark: Mark) -> None:
        if event.tag not in _PLAIN_TAGS:
            self.problems.append(Problem(mark, self._path(), f"the tag {show(event.tag)} is not used in job files"))

    def _path(self) -> Path:
        """The path of the collection that is being parsed."""
        parts = (len(o.items) if o.entries is None else o.key and o.key[0] for o in self._stack)
        return tuple(part for part in parts if part is not None)

    def syntax(self, error: yaml.MarkedYAMLError, text: str) -> Exception:
        place = error.problem_mark or error.context_mark
        line, column = (place.line, place.column) if place else (0, 0)
        lines = text.split("\n")
        here = lines[line] if line < len(lines) else ""
        what = " ".join(part for part in (error.context, error.problem) if part)
        if "\t" in here[: len(here) - len(here.lstrip())] or here[column : column + 1] == "\t":
            what = "a tab; YAML is indented by spaces"
        else:
            hint = next((text for words, text in _HINTS.items() if words in what), "")
            what = f"not valid YAML: {what}" + (f"; {hint}" if hint else "")
        return refusal([Problem(self.mark(line, column, column=True), (), what)])
