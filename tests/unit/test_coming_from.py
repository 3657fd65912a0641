"""docs/coming-from.md: what replaces the lines of other tools is valid."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import load, main
from launcher.job.loader import parse_job

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
SECTIONS = {title: text for title, _, text in (part.partition("\n") for part in PAGE.split("\n## ")[1:])}
# Jobs that the keys of a row change.
DOCKER = "{name: x, image: {base: x}, nodes: [a, b, c, d], run: {script: train.py}}"
CLUSTER = "{name: x, runtime: process, nodes: 2, run: {script: train.py}}"


def rows(text: str) -> list[tuple[list[str], list[str]]]:
    """Return the code of the left and of the right cell of each row."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    assert all(len(cells) == 2 for cells in lines)
    return [(re.findall(r"`([^`]+)`", left), re.findall(r"`([^`]+)`", right)) for left, right in lines]


def is_command(code: str) -> bool:
    return code.startswith("launcher ")


def is_key(code: str) -> bool:
    return re.match(r"\w+: ", code) is not None


RIGHT = [pytest.param(right, id=" ".join(right)) for text in SECTIONS.values() for _, right in rows(text) if right]


@pytest.mark.parametrize("row", RIGHT)
def test_the_keys_and_commands_of_a_row_are_valid(row: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    for code in filter(is_command, row):
        name, *arguments = (str(tmp_path / each) if each == "job.yaml" else each for each in shlex.split(code)[1:])
        command = load(name)
        if hasattr(command, "commands"):  # a group, such as `image ship`
            command = command.commands[arguments.pop(0)]
        command.make_context(name, arguments)
    found: list[dict[str, Any]] = [yaml.safe_load(code) for code in row if is_key(code)]
    together = {key: value for each in found for key, value in each.items()}
    for each in found:  # a key that occurs twice has alternatives
        base = CLUSTER if "cluster" in together or isinstance(together.get("nodes"), int) else DOCKER
        parse_job(yaml.safe_dump({**yaml.safe_load(base), **together, **each}))


def job_of(title: str) -> str:
    (job,) = re.findall(r"^```yaml\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)
    return str(job)


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_has_a_table_a_job_and_what_is_not_carried_over(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job for a cluster is exported in tests/features/slurm."""
    assert len(rows(SECTIONS[title])) > 8
    assert re.search(r"^Not carried over: [^;]*; stay with\s", SECTIONS[title], re.MULTILINE)
    job = job_of(title)
    if isinstance(yaml.safe_load(job)["nodes"], int):
        parse_job(job)
        return
    for name in ("train.py", "main.py", "ds.json", "fsdp.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "job.yaml").write_text(job)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "1234")
    monkeypatch.setenv("HF_TOKEN", "1234")
    monkeypatch.setattr(sys, "argv", ["launcher", "plan", "job.yaml", "--offline"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 0, out + err
