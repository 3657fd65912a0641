"""The table of features; and the core without each of them."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.cli.main import COMMANDS
from launcher.features import FEATURES, load
from launcher.run.cluster import Kind

ROOT = Path(__file__).parents[2]
# Pages describe the whole product, so they name tests of features
OF_ALL = "--deselect=tests/unit/test_docs.py::test_the_tests_that_pages_name_exist"


def test_every_command_of_a_feature_is_listed_and_exists() -> None:
    added = {name: command for feature in FEATURES.values() for name, command in feature.commands.items()}
    assert added.keys() <= COMMANDS.keys()  # `after` names a command of the core
    assert all(callable(load(command)) for command in added.values())


def test_every_option_of_a_feature_is_one_of_its_command() -> None:
    for feature in FEATURES.values():
        for name, option in feature.options.items():
            shown = [param.name for param in main.load(name).params]
            assert shown[shown.index(option.after) + 1] in inspect.get_annotations(load(option))


def test_every_kind_of_cluster_has_an_engine() -> None:
    for feature in FEATURES.values():
        assert feature.clusters.keys() == feature.engines.keys()
        assert feature.causes.keys() <= feature.clusters.keys()
        assert all(isinstance(load(cluster), Kind) for cluster in feature.clusters.values())
        assert all(callable(load(engine)) for engine in feature.engines.values())
        assert all(callable(cause) for causes in feature.causes.values() for cause in load(causes))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FEATURES)
def test_the_core_does_not_need_a_feature(name: str, tmp_path: Path) -> None:
    """Take its folder, its tests and its entry of the table away from a copy, and run the core's tests there."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for file in filter(None, listed):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file, follow_symlinks=False)
    shutil.rmtree(tmp_path / "launcher" / "features" / name)
    shutil.rmtree(tmp_path / "tests" / "features" / name)
    for file in (tmp_path / "tests" / name).glob("test_*.py"):  # on a real cluster, whose bed others use too
        file.unlink()
    table = tmp_path / "launcher" / "features" / "__init__.py"
    table.write_text(without_entry(table.read_text(), name))
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}  # it is no worker of ours
    for command in (["docs.generate"], ["mypy"], ["pytest", "-n", "2", OF_ALL, "tests/unit", "tests/process"]):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def without_entry(text: str, name: str) -> str:
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name:
                    del lines[key.lineno - 1 : value.end_lineno]
    return "".join(lines)
