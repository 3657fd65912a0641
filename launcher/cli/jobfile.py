"""`launcher init` and `launcher schema`: the job file's own documentation, as an example and as JSON Schema."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from launcher.errors import UsageError


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Every key, with what it means and what it is by default."""
    if path.exists() and not force:
        raise UsageError(str(path), "is there already", "choose another name, or --force")
    path.write_text(resources.files("launcher.job").joinpath("template.yaml").read_text(encoding="utf-8"))
    typer.echo(f"wrote {path}; look at what it would do: launcher plan {path} --offline")


def schema() -> None:
    """For editors: `# yaml-language-server: $schema=...` gives completion and checks while typing."""
    from launcher.job.dump import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
