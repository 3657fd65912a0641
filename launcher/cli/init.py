"""`launcher init`: files to start from, and what a coding assistant should know."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import terminal
from launcher.errors import NodeUnfit, UsageError
from launcher.local_files import write_atomic
from launcher.shipped import shipped

WHEN = (
    "How to run PyTorch programs on other machines with the command launcher - job files, starting, following, reading "
    "failures, sweeps and their ledger. Use it where a job file of launcher or a folder runs/ is, or somebody wants to "
    "train on machines with ssh and Docker."
)
TEMPLATE = Path(__file__).parents[1] / "job" / "template.yaml"


class Example(str, Enum):
    """A job that runs as it is, and its files; the first is the job."""

    quickstart = "quickstart"

    @property
    def files(self) -> tuple[str, ...]:
        return (f"jobs/{self.value}.yaml", "jobs/data/digits.tar", "jobs/data/LICENCE.md")


def init(
    path: Annotated[Path | None, typer.Argument(help="File to create; job.yaml by default.")] = None,
    example: Annotated[Example | None, typer.Option(help="Write a job that runs as it is, with its data.")] = None,
    skill: Annotated[
        bool, typer.Option("--skill", help="Print docs/agents.md as a skill for a coding assistant, and write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """The file documents every key and its default. An example is written to jobs/ in this folder.

    Example: launcher init job.yaml
    """
    if skill:
        if path is not None or example is not None or force:
            raise UsageError("--skill", "writes no file", "give it alone; to keep it: launcher init --skill > SKILL.md")
        terminal.say(skill_text(), nl=False)
        return
    if example is None:
        path = path or Path("job.yaml")
        _write({path: TEMPLATE}, force)
        terminal.say(f"wrote {path}; to preview the run: launcher plan {shlex.quote(str(path))} --offline")
        return
    if path is not None:
        raise UsageError(f"--example {example.value}", "has names of its own for its files", f"omit {path}")
    _write({Path(name): shipped(name) for name in example.files}, force)
    terminal.say(f"wrote {', '.join(example.files)}; to run it: launcher up {example.files[0]}")


def skill_text() -> str:
    """Return the page for coding assistants in the form of a skill: with a header that says when it is needed.

    Links lead to other pages of the documentation, which an assistant may not have: their texts remain.
    """
    page = shipped("docs/agents.md").read_text(encoding="utf-8")
    text = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", page)
    return f"---\nname: launcher\ndescription: {WHEN}\n---\n\n{text}"


def _write(files: Mapping[Path, Path], force: bool) -> None:
    """Copy files to new ones: all, or none if one of them exists. Raises UsageError, NodeUnfit."""
    for target in files:
        if target.exists() and not force:
            raise UsageError(str(target), "already exists", "choose another name or use --force")
        if target.exists() and not target.is_file():
            raise UsageError(str(target), "is not a regular file", "choose another name")
    for target, source in files.items():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target.resolve(), source.read_bytes())
        except OSError as error:
            fix = "check free space and permissions, or choose another path"
            raise NodeUnfit(str(target), f"could not be written: {error.strerror}", fix) from error
