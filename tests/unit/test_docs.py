"""The generated reference pages are up to date and complete, and their examples are valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from docs import generate
from launcher.cli.main import COMMANDS
from launcher.errors import LauncherError
from launcher.job.dump import json_schema
from launcher.job.models import Job
from launcher.job.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = "## The settings file"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_are_up_to_date() -> None:
    assert not list(generate.stale()), "run: python -m docs.generate"


def test_stale_pages_are_detected(tmp_path: Path) -> None:
    (tmp_path / "job.md").write_text(page("job.md").replace("imagenet", "other", 1))
    assert list(generate.stale(tmp_path)) == ["job.md", "commands.md"]


def test_every_command_has_a_section_and_an_example() -> None:
    sections = re.findall(r"^## launcher (\w+)$(.*?)(?=^## |\Z)", page("commands.md"), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in sections] == list(COMMANDS)
    for name, section in sections:
        for part in section.split("\n### launcher ")[1:] or [f"{name}\n{section}"]:
            full, _, text = part.partition("\n")
            assert re.search(rf"^For example:\n\n```sh\nlauncher {full}( .*)?$", text, re.MULTILINE), full


def test_the_exit_codes_are_those_of_the_errors() -> None:
    def codes(kind: type[LauncherError]) -> set[int]:
        return {kind.exit_code}.union(*(codes(each) for each in kind.__subclasses__()))

    assert codes(LauncherError) | {0} == set(generate.EXIT_CODES)


@pytest.mark.parametrize("name", ["job.md", "commands.md"])
def test_links_lead_to_headings_that_exist(name: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page(name)):
        assert anchor in anchors(page(target or name)), f"{target}#{anchor}"


def test_every_key_of_the_job_file_has_a_section() -> None:
    sections = re.findall(r"^## (.*)$", page("job.md"), re.MULTILINE)
    assert sections == [*Job.model_fields, SETTINGS.removeprefix("## ")]


def test_examples_are_valid() -> None:
    """The sections' examples load; those in the tables match the schema."""
    job, settings = page("job.md").split(f"\n{SETTINGS}\n")
    shortest, *examples = re.findall(r"^```yaml\n(.*?)^```$", job, re.MULTILINE | re.DOTALL)
    for text in (example for block in examples for example in block.split("# or\n")):
        Job.model_validate({**yaml.safe_load(shortest), **yaml.safe_load(text)})
    for text in re.findall(r"^```yaml\n(.*?)^```$", settings, re.MULTILINE | re.DOTALL):
        Settings.model_validate(yaml.safe_load(text))
    definitions = json_schema()["$defs"]
    for model in generate.PARTS.values():
        check_examples(model, definitions)


def check_examples(model: type[BaseModel], definitions: dict[str, Any]) -> None:
    for name, field in model.model_fields.items():
        for example in field.examples or []:
            schema = {"$defs": definitions, **definitions[model.__name__]["properties"][name]}
            Draft202012Validator(schema).validate(example)


def test_the_tests_that_pages_name_exist() -> None:
    root = DOCS.parent
    files = list((root / "tests").rglob("*.py"))
    defined = re.findall(r"def (test_\w+)", "".join(path.read_text(encoding="utf-8") for path in files))
    known = {*defined, *(path.name for path in files)}
    for path in (*DOCS.rglob("*.md"), *root.glob("*.md")):
        named = re.findall(r"\btest_\w+(?:\.py)?", path.read_text(encoding="utf-8"))
        assert [name for name in named if name not in known and f"{name}.py" not in known] == [], path.name


def test_the_modules_that_pages_about_the_inside_name_exist() -> None:
    """Those of features, and tests, may be taken away (tests/features/test_features.py)."""
    root = DOCS.parent
    places = [root, *(root / name for name in ("launcher", "launcher/node", "train", "tests", "tests/train"))]
    for path in (DOCS / "internals").glob("*.md"):
        named = re.findall(r"`([\w/]+/[a-z_0-9]+\.(?:py|sh))`", path.read_text(encoding="utf-8"))
        core = [name for name in named if "features/" not in name and "test_" not in name]
        assert [name for name in core if not any((place / name).is_file() for place in places)] == [], path.name
