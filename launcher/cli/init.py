"""`launcher init`: files to start from."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import terminal
from launcher.errors import NodeUnfit, UsageError
from launcher.local_files import write_atomic
from launcher.shipped import shipped

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
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """The file documents every key and its default. An example is written to jobs/ in this folder.

    Example: launcher init job.yaml
    """
    if example is None:
        path = path or Path("job.yaml")
        _write({path: TEMPLATE}, force)
        terminal.say(f"wrote {path}; to preview the run: launcher plan {path} --offline")
        return
    if path is not None:
        raise UsageError(f"--example {example.value}", "has names of its own for its files", f"omit {path}")
    _write({Path(name): shipped(name) for name in example.files}, force)
    terminal.say(f"wrote {', '.join(example.files)}; to run it: launcher up {example.files[0]}")


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
