"""README and docs are correct: examples run unmodified, links work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import main
from tests.e2e.cli import ROOT, Cli
from tests.ports import free_port

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    page
    for folder in (".", "jobs", "docs", "docs/internals", "tests", "tests/bed")
    for page in sorted((ROOT / folder).glob("*.md"))
]
EXPERIMENT = re.compile(r"e\d_")  # half a second each, as the options of every variant are checked
JOBS = [
    pytest.param(path, marks=[pytest.mark.ci] if EXPERIMENT.match(path.name) else [])
    for path in sorted((ROOT / "jobs").rglob("*.yaml"))
]
FENCE = re.compile(r"(<!-- run -->\n)?```(\w*)\n(.*?)```", re.DOTALL)


def examples() -> list[str]:
    """Return the shell examples marked with `<!-- run -->`."""
    return [body for page in PAGES for mark, _, body in FENCE.findall(page.read_text(encoding="utf-8")) if mark]


def shell(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_there_are_examples() -> None:
    assert len(examples()) >= 1


def python_examples() -> list[str]:
    """Return the Python examples marked with `<!-- python -->`."""
    marked = re.compile(r"<!-- python -->\n```python\n(.*?)```", re.DOTALL)
    return [body for page in PAGES for body in marked.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("program", python_examples())
def test_a_python_example_runs(program: str, tmp_path: Path) -> None:
    """Unmodified, but with a port that no other run on this machine has."""
    port = f'"nodes": ["local", "local"],\n        "port": {free_port()},'
    (tmp_path / "example.py").write_text(program.replace('"nodes": ["local", "local"],', port))
    done = shell("python example.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("script", examples())
def test_an_example_runs_unmodified(script: str, tmp_path: Path) -> None:
    done = shell(script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.name)
def test_every_job_can_be_planned_from_the_root(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for name in yaml.safe_load(job.read_text(encoding="utf-8")).get("secrets", ()):
        monkeypatch.setenv(name, "of-the-user")
    monkeypatch.setattr(sys, "argv", ["launcher", "plan", str(job.relative_to(ROOT)), "--offline"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 0, out + err
    assert yaml.safe_load(job.read_text(encoding="utf-8"))["name"] in out


def test_the_readme_shows_the_imagenet_job() -> None:
    shown = next(yaml.safe_load(body) for _, kind, body in FENCE.findall(README) if kind == "yaml")
    there = yaml.safe_load((ROOT / "jobs/imagenet_2node.yaml").read_text(encoding="utf-8"))
    for key, value in shown.items():
        if key == "run":
            assert value["module"] == there["run"]["module"]
            assert value["args"].items() <= there["run"]["args"].items()
        else:
            assert value == there[key], key


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_init_writes_a_job_that_plan_accepts(cli: Cli) -> None:
    cli("init", "mine.yaml")
    assert "imagenet" in cli("plan", "mine.yaml", "--offline").stdout
