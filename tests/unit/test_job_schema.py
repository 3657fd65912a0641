"""The schema and the template document the job file: they must agree with what the loader accepts."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from launcher.job.dump import dump_job, json_schema
from launcher.job.loader import parse_job
from launcher.job.models import Job

REPOSITORY = Path(__file__).parents[2]
JOBS = sorted((REPOSITORY / "jobs").glob("*.yaml"))
BROKEN = Path(__file__).parent / "broken_jobs"
TEMPLATE = resources.files("launcher.job").joinpath("template.yaml").read_text(encoding="utf-8")
SCHEMA = json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)

# Only the loader can check some things: YAML, paths on this machine, combinations of keys.
CAUGHT_BY_SCHEMA = [
    "unknown_key",
    "unknown_key_run",
    "unknown_key_image",
    "unknown_key_node",
    "unknown_key_docker",
    "synonym",
    "key_too_far_in",
    "no_name",
    "no_nodes",
    "no_run",
    "name_capital",
    "name_number",
    "name_long",
    "runtime_unknown",
    "image_text",
    "image_packages_text",
    "nodes_empty",
    "nodes_text",
    "nodes_no_host",
    "gpus_word",
    "gpus_negative",
    "gpus_twice",
    "gpus_empty",
    "gpus_true",
    "processes_zero",
    "processes_word",
    "run_text",
    "run_command_text",
    "args_nested",
    "args_nested_list",
    "args_text",
    "args_dashes",
    "mounts_list",
    "mounts_relative_target",
    "env_list",
    "env_nested",
    "secrets_text",
    "secrets_mapping",
    "output_relative",
    "restarts_negative",
    "restarts_word",
    "port_low",
    "port_high",
    "port_text",
    "docker_ipc",
    "sweep_mapping",
    "sweep_nested",
]


def enabled(text: str) -> str:
    """The template with its disabled settings enabled, except alternatives to settings that are set."""
    lines = [re.sub(r"^(\s*)#(?=[a-z_]+: )", r"\1", line) for line in text.splitlines()]
    out = [line for line in lines if not re.match(r"\s*(ref|script|command|sweep): ", line)]
    return "\n".join(out) + "\n"


def test_it_is_a_valid_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def test_every_key_is_described() -> None:
    def keys(schema: dict[str, Any], where: str) -> None:
        for name, found in schema.get("properties", {}).items():
            part = SCHEMA["$defs"].get(
                found.get("$ref", "").rpartition("/")[2], {}
            )  # the model's description, if the field has none
            assert len(found.get("description", part.get("description", ""))) > 15, f"{where}{name}"

    keys(SCHEMA, "")
    for name, part in SCHEMA["$defs"].items():
        assert part["additionalProperties"] is False
        keys(part, f"{name}.")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_the_repositorys_jobs_match_the_schema(path: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(path.read_text()))


def test_dumped_jobs_match_the_schema() -> None:
    for text in (TEMPLATE, enabled(TEMPLATE)):
        VALIDATOR.validate(yaml.safe_load(dump_job(parse_job(text))))


@pytest.mark.parametrize("name", CAUGHT_BY_SCHEMA)
def test_the_schema_detects_the_mistake(name: str) -> None:
    data = yaml.safe_load((BROKEN / f"{name}.yaml").read_text())
    assert not VALIDATOR.is_valid(data)


def test_the_template_loads_unchanged() -> None:
    job = parse_job(TEMPLATE, "template.yaml")
    assert parse_job(dump_job(job)) == job
    VALIDATOR.validate(yaml.safe_load(TEMPLATE))


def test_the_template_shows_every_key_and_its_disabled_settings_load_too() -> None:
    text = enabled(TEMPLATE)
    parse_job(text, "template.yaml")
    assert set(yaml.safe_load(text)) == set(Job.model_fields) - {"sweep", "codes", "each", "budget"}
    shown = {line.strip().lstrip("#").split(":")[0] for line in TEMPLATE.splitlines()}
    assert {"ref", "base", "torchvision", "packages", "module", "script", "command", "args"} <= shown


def test_the_templates_alternatives_load_too() -> None:
    text = TEMPLATE
    for key, instead in (("ref", "base"), ("script", "module"), ("command", "module")):
        other = re.sub(rf"^  {instead}: .*\n", "", text, flags=re.MULTILINE).replace(f"  #{key}: ", f"  {key}: ")
        parse_job(other, "template.yaml")
    parse_job(TEMPLATE.replace("\n#sweep:", "\nsweep:"), "template.yaml")


def test_the_templates_settings_that_are_defaults_are_the_defaults() -> None:
    """A line that the template presents as a default must be the default."""
    data = yaml.safe_load(TEMPLATE.replace("\n#port: ", "\nport: "))  # given, it would not be chosen
    for key in ("runtime", "code", "gpus", "processes", "output", "port"):
        assert data[key] == Job.model_fields[key].default


def test_the_schema_accepts_keys_for_anchors() -> None:
    job = yaml.safe_load(TEMPLATE)
    VALIDATOR.validate(job | {"x-hosts": ["a"]})
    assert not VALIDATOR.is_valid(job | {"hosts": ["a"]})
