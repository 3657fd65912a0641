"""Properties of the job file: only JobInvalid for any text, load(dump(job)) == job, the argument rule."""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import JobInvalid
from launcher.job.arguments import argv_of
from launcher.job.dump import dump_job
from launcher.job.fields import parse_args
from launcher.job.loader import parse_job
from launcher.job.models import Job
from launcher.job.overrides import variant_name
from launcher.job.scalars import parse_duration, parse_size, show_duration, show_size

HERE = Path(__file__).parent
SEEDS = [path.read_text() for path in sorted((HERE / "broken_jobs").glob("*.yaml"))]
SEEDS += [path.read_text() for path in sorted((HERE.parents[1] / "jobs").glob("*.yaml"))]

text = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)
number = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
scalar = st.one_of(text, number, st.booleans())
key = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,8}", fullmatch=True)
arguments = st.one_of(
    st.dictionaries(key, st.one_of(scalar, st.none(), st.lists(scalar, max_size=3)), max_size=5).filter(
        lambda d: len({k.replace("_", "-") for k in d}) == len(d)
    ),
    st.lists(scalar, max_size=5),
)
name = st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True)
env = st.dictionaries(st.from_regex(r"[A-KM-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), scalar, max_size=3)
gpus = st.one_of(
    st.sampled_from(["all", "none"]),
    st.integers(0, 16),
    st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True),
    st.lists(st.from_regex(r"GPU-[0-9a-f]{8}", fullmatch=True), min_size=1, max_size=4, unique=True),
)
part = st.from_regex(r"[A-Za-z0-9 _.-]{1,8}", fullmatch=True).filter(lambda p: p not in ("..", "."))
path = st.lists(part, min_size=1, max_size=3).map(lambda parts: "/m/" + "/".join(parts))


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    hosts = draw(st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=4, unique=True))
    nodes = [
        draw(
            st.sampled_from(
                [host, {"host": host, "gpus": draw(gpus), "env": draw(env)}, {"host": host, "name": f"n{i}"}]
            )
        )
        for i, host in enumerate(hosts)
    ]
    sources = draw(st.lists(path, max_size=3, unique=True))
    mounts = {source: f"/t{i}{source}" + draw(st.sampled_from(["", ":ro", ":rw"])) for i, source in enumerate(sources)}
    return {
        "name": draw(name),
        "image": draw(st.sampled_from([{"ref": "a"}, {"base": "b:1", "packages": ["timm"], "torchvision": "0.20.1"}])),
        "nodes": nodes,
        "gpus": draw(gpus),
        "processes": draw(st.one_of(st.just("auto"), st.integers(1, 8))),
        "run": {
            **draw(st.sampled_from([{"module": "m"}, {"script": "a b/ü.py"}, {"command": ["x", "1", "yes"]}])),
            "args": draw(arguments),
        },
        "mounts": mounts,
        "env": draw(env),
        "secrets": draw(st.sampled_from([[], ["LA"], ["LA", {"LB": "~/x"}]])),
        "restarts": draw(st.integers(0, 1000)),
        "port": draw(st.integers(1024, 65535)),
        "timeout": draw(st.one_of(st.none(), st.integers(1, 10**7))),
        "resources": draw(st.sampled_from([{}, {"memory": "64g", "cpus": 1.5}, {"memory": 6291457, "cpus": 3}])),
        "docker": draw(
            st.sampled_from([{}, {"ipc": "private", "devices": ["/dev/fuse"], "extra_hosts": {"a": "::1"}}])
        ),
        "sweep": draw(st.lists(arguments, max_size=2, unique_by=lambda each: variant_name(parse_args(each)))),
    }


@given(jobs())
@settings(max_examples=80, deadline=None)
def test_a_dumped_job_loads_as_the_same_job(data: dict[str, Any]) -> None:
    job = Job.model_validate(data)
    again = parse_job(dump_job(job))
    assert again == job
    assert dump_job(again) == dump_job(job)


def loads_or_refuses(source: str, sets: list[str], nodes: list[str] | None = None) -> None:
    try:
        job = parse_job(source, "job.yaml", sets, nodes)
    except JobInvalid as error:
        message = str(error)
        assert message.startswith(("job.yaml:", "--set ", "--nodes"))
        assert all(character.isprintable() or character == "\n" for character in message)
    else:
        assert parse_job(dump_job(job)) == job


@given(st.text(), st.lists(st.text(), max_size=2))
@settings(max_examples=200, deadline=None)
def test_any_text_loads_or_is_refused(source: str, sets: list[str]) -> None:
    loads_or_refuses(source, sets)


WORDS = "- |: |<<: |&a |*a|name|nodes|run|env|args|null|1e5|0x|---|...|true|yes|module|!!str |0o7|1:30|.nan|-.inf"
tokens = st.sampled_from([*"\n:-[]{},&*!|>'\"%@`#?\t \ufeff\x85\u2028\x00", "\n  ", "\n    ", *WORDS.split("|")])


@given(st.lists(tokens, max_size=40).map("".join), st.lists(tokens, max_size=8).map("".join))
@settings(max_examples=250, deadline=None)
def test_any_sequence_of_yaml_tokens_loads_or_is_refused(source: str, assignment: str) -> None:
    loads_or_refuses(source, [])
    loads_or_refuses(SEEDS[0] + source, [f"run.args.x={assignment}"], [assignment])


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_damaged_job_files_load_or_are_refused(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from(SEEDS))
    begin = data.draw(st.integers(0, len(source)))
    end = data.draw(st.integers(begin, min(len(source), begin + 12)))
    loads_or_refuses(source[:begin] + data.draw(st.one_of(tokens, st.text(max_size=4))) + source[end:], [])


def test_a_missing_space_before_what_cannot_be_printed_is_refused_in_a_line() -> None:
    loads_or_refuses("name: job\nimage: {ref:\ud7fcimg}\nnodes: [a]\nrun: {module: train}\n", [])


short = st.text(string.ascii_lowercase, max_size=4)
nested = st.recursive(
    st.one_of(scalar, st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(Job.model_fields)), nested, max_size=8))
@settings(max_examples=250, deadline=None)
def test_wrong_types_anywhere_are_refused_with_their_location(data: dict[str, Any]) -> None:
    loads_or_refuses(json.dumps(data), [])


@given(st.dictionaries(key, st.one_of(scalar, st.none(), st.lists(scalar, max_size=3)), max_size=6))
def test_the_argument_rule(args: dict[str, Any]) -> None:
    argv = list(argv_of(args))
    for name, value in args.items():
        if value is None or value is False:
            continue
        assert argv.pop(0) == "--" + name.replace("_", "-")
        if value is True:
            continue
        for item in value if isinstance(value, list) else [value]:
            said = argv.pop(0)
            if isinstance(item, bool):
                assert said == ("true" if item else "false")
            else:
                assert type(item)(said) == item
    assert argv == []


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0))
def test_numbers_are_written_so_that_argparse_reads_them(value: float) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float)
    assert parser.parse_args(argv_of({"learning_rate": value})).learning_rate == value


@given(st.lists(text))
def test_a_list_of_arguments_is_used_unchanged(args: list[str]) -> None:
    assert list(argv_of(args)) == args


@given(st.integers(1, 10**8))
def test_durations_are_shown_as_they_are_read(seconds: int) -> None:
    assert parse_duration(show_duration(seconds)) == seconds


@given(st.integers(6 << 20, 1 << 50))
def test_sizes_are_shown_as_they_are_read(size: int) -> None:
    assert parse_size(show_size(size)) == size
