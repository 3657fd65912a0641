"""Parse YAML into a tree of values with positions: one document, no tags, no YAML 1.1 types, no alias bombs.

The tree is built from parser events, so that excessive depth and size are errors, not crashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from launcher.job.problems import Mark, Path, Problem, printable, refusal, show
from launcher.job.scalars import resolve

DEEPEST = 32
MOST_VALUES = 100_000  # aliases expanded, each counted at every level; 100 characters count as one value

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_OPENED = re.compile("flow (sequence|mapping)|quoted scalar")  # what begins with a bracket or a quote
_PLAIN_TAGS = (None, "!", "tag:yaml.org,2002:str")

# The parser's messages for common mistakes, and hints.
_HINTS = {
    "mapping values are not allowed": "does an unquoted value contain ': ', or is the indentation wrong?",
    "did not find expected key": "is the indentation of this line different, or a quote or bracket not closed?",
    "did not find expected '-'": "is the indentation of this line different from the list above?",
    "expected <block end>": "is the indentation of this line different from the lines above?",
    "did not find expected ',' or": "is a bracket not closed, or a comma missing?",
    "expected ',' or": "is a bracket not closed, or a comma missing?",
    "found unexpected end of stream": "is a quote not closed?",
    "did not find expected node content": "is a value missing, or a bracket not closed?",
    "could not find expected ':'": "is ': ' missing after the key?",
    "unknown escape character": "in double quotes \\ starts an escape sequence; use single quotes",
    "that cannot start any token": "quote values that start with such a character",
    "unknown directive": "a line that starts with % is a directive; quote it",
}


@dataclass(frozen=True)
class Node:
    """A value and the position of its key or list item. `size` counts all values in it, aliases expanded."""

    mark: Mark
    value: Any  # a scalar, list[Node] or dict[str, Node]; never modified, as aliases share it
    size: int = 1

    def plain(self) -> Any:
        """Return the value as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def marks(self, path: Path = ()) -> Iterator[tuple[Path, Mark]]:
        """Yield the path and position of every value."""
        yield path, self.mark
        if isinstance(self.value, dict):
            for key, node in self.value.items():
                yield from node.marks((*path, key))
        elif isinstance(self.value, list):
            for index, node in enumerate(self.value):
                yield from node.marks((*path, index))


def compose(text: str, source: str, *, inline: bool = False) -> tuple[Node | None, list[Problem]]:
    """Return the document's root (None if it is empty) and the problems that did not stop the parser.

    source: the name in its marks. inline: the text is not a file, so marks have no lines. Raises JobInvalid.
    """
    composer = _Composer(yaml.parse(text, Loader=_Loader), source, inline)
    if found := _UNPRINTABLE.search(text):
        before = text[: found.start()]
        mark = composer.mark(before.count("\n"), len(before) - before.rfind("\n") - 1)
        raise refusal([Problem(mark, (), f"the control character {found[0]!r} is not allowed; is this a text file?")])
    try:
        return composer.root(), composer.problems
    except yaml.MarkedYAMLError as error:
        raise composer.syntax(error, text) from None


class _Composer:
    def __init__(self, events: Iterator[Any], source: str, inline: bool) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._inline = inline
        self._events = events
        self._values = 0
        self._anchors: dict[str, Node] = {}

    def mark(self, line: int, column: int = -1) -> Mark:
        """Return a mark. Both numbers count from 0, as in the parser."""
        return Mark(self._source) if self._inline else Mark(self._source, line + 1, column + 1)

    def root(self) -> Node | None:
        root: Node | None = None
        for event in self._events:
            mark = self.mark(event.start_mark.line)
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise refusal([Problem(mark, (), "a second YAML document starts here; expected exactly one")])
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event, ())
        return root

    def _node(self, event: Any, path: Path) -> Node:
        """Return the value that starts with this event."""
        mark = self.mark(event.start_mark.line)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise refusal(
                    [Problem(mark, path, f"the alias *{event.anchor} has no complete anchor &{event.anchor} above it")]
                )
            node = replace(self._anchors[event.anchor], mark=mark)
        else:
            if event.tag not in _PLAIN_TAGS:
                self.problems.append(Problem(mark, path, f"the tag {show(event.tag)} is not supported"))
            if isinstance(event, yaml.ScalarEvent):
                value = resolve(event.value) if _is_plain(event) else event.value
                node = Node(mark, value, 1 + len(event.value) // 100)
            elif len(path) >= DEEPEST:
                raise refusal([Problem(mark, (), f"nested deeper than {DEEPEST} levels")])
            else:
                is_list = isinstance(event, yaml.SequenceStartEvent)
                node = self._list(mark, path) if is_list else self._mapping(mark, path)
            if event.anchor:
                self._anchors[event.anchor] = node
        self._values += node.size
        if self._values > MOST_VALUES:
            raise refusal([Problem(mark, path, f"more than {MOST_VALUES} values after alias expansion")])
        return node

    def _list(self, mark: Mark, path: Path) -> Node:
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items))))
        return Node(mark, items, 1 + sum(item.size for item in items))

    def _mapping(self, mark: Mark, path: Path) -> Node:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        size = 1
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key_mark = self.mark(event.start_mark.line)
            if not isinstance(event, yaml.ScalarEvent):
                self.problems.append(Problem(key_mark, path, "a key must be text, not a list, a mapping or an alias"))
                self._node(event, (*path, "?"))
                self._node(next(self._events), (*path, "?"))
                continue
            key = event.value
            if (first := entries.get(key)) is not None:
                where = f"first on line {first.mark.line}" if first.mark.line else "twice"
                self.problems.append(Problem(key_mark, (*path, key), f"the key is given twice, {where}"))
            node = self._node(next(self._events), (*path, key))
            size += node.size
            if node.value is None and (found := re.fullmatch(r"([\w./-]+):(\S+)", key)) and _is_plain(event):
                what = f"a space is missing after the colon: {{{printable(f'{found[1]}: {found[2]}')}}}"
                self.problems.append(Problem(key_mark, (*path, key), what))
            if key == "<<" and _is_plain(event):
                for mapping in node.value if isinstance(node.value, list) else [node]:
                    if isinstance(mapping.value, dict):
                        merged = {**mapping.value, **merged}  # the first mapping with a key takes precedence
                    else:
                        what = "expected an alias of a mapping, or a list of such aliases"
                        self.problems.append(Problem(key_mark, (*path, key), what))
            else:
                entries.setdefault(key, replace(node, mark=key_mark))
        return Node(mark, {**merged, **entries}, size)  # the mapping's own keys take precedence

    def syntax(self, error: yaml.MarkedYAMLError, text: str) -> Exception:
        """Return the exception for a syntax error."""
        position = error.problem_mark or error.context_mark
        opened = error.context_mark if _OPENED.search(error.context or "") else None
        if opened is not None and position is not None and position.line > opened.line:
            position = opened  # the parser notices it where the next key begins, or at the end
        line, column = (position.line, position.column) if position else (0, 0)
        lines = text.split("\n")
        here = lines[line] if line < len(lines) else ""
        what = " ".join(part for part in (error.context, error.problem) if part)
        if "\t" in here[: len(here) - len(here.lstrip())] or here[column : column + 1] == "\t":
            what = "a tab; YAML is indented with spaces"
        else:
            hint = next((text for message, text in _HINTS.items() if message in what), "")
            what = f"not valid YAML: {what}" + (f"; {hint}" if hint else "")
        return refusal([Problem(self.mark(line, column), (), what)])


def _is_plain(event: Any) -> bool:
    """Return whether a scalar has neither quotes nor a tag."""
    return bool(event.implicit[0]) and not event.style
