"""The blocks of all pages are right: those of first-day.md run in order, commands parse, job files load."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import COMMANDS, load
from launcher.job.loader import parse_job
from launcher.job.models import Job
from launcher.job.settings import read_settings
from launcher.records.trainer import _refusal
from tests.e2e.cli import ROOT

BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
EVERY = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "jobs").rglob("*.md"))]
GENERATED = ("commands.md", "job.md")  # from the commands, and from the examples of the schema
PAGES = [page for page in EVERY if page.name not in GENERATED]


def blocks(kind: str) -> list[Any]:
    """Return the blocks of a kind as parameters of a test."""
    return [*_blocks(kind)]


def _blocks(kind: str) -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            if found[1] == kind:
                line = text[: found.start()].count("\n") + 1
                yield pytest.param(found[2], id=f"{page.relative_to(ROOT)}:{line}")


# --- the first day


@pytest.mark.ci
@pytest.mark.timeout(400)
def test_the_first_day_runs_as_written(tmp_path: Path) -> None:
    page = ROOT / "docs" / "first-day.md"
    project, home = tmp_path / "project", tmp_path / "home"
    for folder in (project, home):
        folder.mkdir()
    script = ["set -euo pipefail"]
    for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "sh":
            script.append(body)
        else:  # a file, whose first line has its name
            (project / body.splitlines()[0].removeprefix("# ")).write_text(body)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=project,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    printed = re.findall(r"^steps .*batch \d+", done.stdout, re.MULTILINE)
    assert printed == [
        "steps 0 to 20, lr 0.05, batch 16",
        "steps 0 to 40, lr 0.01, batch 16",
        "steps 40 to 60, lr 0.05, batch 16",
    ], shown
    assert "last.pt\n" in done.stdout
    assert "warning" not in done.stderr, shown
    assert re.search(r"removed", shown), shown


# --- all pages


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each command of the launcher, and of the trainer, in a block."""
    text = re.sub(r"\\\n\s*", " ", script)
    for line in text.splitlines():
        with_comments = shlex.shlex(re.sub(r"^(\$|>) ", "", line), posix=True, punctuation_chars=";&|<>")
        with_comments.whitespace_split = True
        try:
            words = list(with_comments)
        except ValueError:  # a quote that ends in another line
            continue
        while words:
            end = next((index for index, word in enumerate(words) if set(word) <= set(";&|<>")), len(words))
            one, words = words[:end], words[end + 1 :]
            if one and (one[0].endswith("launcher") or one[:3] == ["python", "-m", "launcher.trainer"]):
                yield one


SH = [each for kind in ("sh", "console") for each in blocks(kind) if any(True for _ in commands(each.values[0]))]


@pytest.mark.parametrize("script", SH)
def test_the_commands_of_a_block_exist_with_these_options(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, *arguments in commands(script):
        if name == "python":
            trained = arguments[2:]
            if trained[:1] and trained[0].startswith("--"):
                assert _refusal(tuple(trained), ()) == "", trained
            continue
        command = arguments.pop(0)
        if command.startswith("-"):
            continue
        assert command in COMMANDS, command
        for each in arguments:
            if re.fullmatch(r"[\w./-]+\.yaml", each):
                Path(each).parent.mkdir(parents=True, exist_ok=True)
                Path(each).touch()
        found = load(command)
        if hasattr(found, "commands"):  # a group, such as `image ship`
            command = arguments.pop(0)
            found = found.commands[command]
        found.make_context(command, list(arguments))


MINIMAL = {"name": "x", "image": {"ref": "x"}, "nodes": ["gpu-a", "gpu-b"], "run": {"script": "train.py"}}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_job_file_loads_and_so_do_keys_of_one(text: str, tmp_path: Path) -> None:
    keys = yaml.safe_load(text)
    assert isinstance(keys, dict)
    if not set(keys) <= set(Job.model_fields):
        (tmp_path / "launcher").mkdir()
        (tmp_path / "launcher" / "settings.yaml").write_text(text)
        read_settings({"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)})
        return
    base = {key: value for key, value in MINIMAL.items() if key != "image" or keys.get("runtime") != "process"}
    merged = {**base, **keys}
    if isinstance(merged.get("nodes"), dict):
        merged.setdefault("sweep", [{"lr": 1}])
    parse_job(yaml.safe_dump(merged))


@pytest.mark.parametrize("text", blocks("python"))
def test_a_program_compiles(text: str) -> None:
    compile(textwrap.dedent(text), "block", "exec")  # a block may be indented, in a list


@pytest.mark.parametrize("text", blocks("json"))
def test_json_is_valid(text: str) -> None:
    json.loads(text)
