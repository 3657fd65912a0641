"""Print a random sample of what people read, for proofreading: `python -m docs.sample SEED`.

40 messages (strings of the code), 40 comments or docstrings, 10 paragraphs of the pages.
"""

from __future__ import annotations

import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for folder in ("launcher", "train") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def messages(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if _documented(node)}  # type: ignore[attr-defined]
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.JoinedStr, ast.Constant)) or id(node) in docstrings | parts:
            continue
        text = ast.unparse(node) if isinstance(node, ast.JoinedStr) else str(node.value)
        if text.count(" ") >= 3 and "\n" not in text and "$(" not in text:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {text}"


def comments(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if _documented(node):
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {ast.get_docstring(node)}"  # type: ignore[arg-type]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and "noqa" not in token.string:
            yield f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"


def paragraphs(path: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for paragraph in text.split("\n\n"):
        if len(paragraph) > 100 and not paragraph.startswith(("|", "#", "<")):
            yield f"{path.relative_to(ROOT)}: {paragraph.strip()}"


def _documented(node: ast.AST) -> bool:
    return isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None


def main() -> None:
    choice = random.Random(int(sys.argv[1]))  # noqa: S311 - no secret
    for number, find, paths in ((40, messages, SOURCES), (40, comments, SOURCES), (10, paragraphs, PAGES)):
        found = [text for path in paths for text in find(path)]
        print(f"\n== {number} of {len(found)} {find.__name__}", *choice.sample(found, number), sep="\n")


if __name__ == "__main__":
    main()
