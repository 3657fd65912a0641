"""Broken job files: each gives a readable error with line, key and expected value.

The first lines of a file in broken_jobs say which message is expected: `# expect LINE: FRAGMENT`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.errors import JobInvalid
from launcher.job.files import check_files
from launcher.job.loader import load_job, parse_job
from launcher.planning.checks import written

BROKEN = sorted((Path(__file__).parent / "broken_jobs").glob("*.yaml"))
GOOD = "name: job\nimage: {ref: img}\nnodes: [a, {host: b, gpus: 1}]\nrun: {module: train, args: {lr: 0.1}}\n"


def refused(path: Path | str, *sets: str, nodes: list[str] | None = None) -> str:
    with pytest.raises(JobInvalid) as caught:
        load_job(path, sets, nodes)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "Traceback" not in message
    assert "pydantic" not in message
    assert all(character.isprintable() or character == "\n" for character in message)
    assert len(message) < 4000
    return message


def test_there_are_at_least_60_broken_jobs() -> None:
    assert len(BROKEN) >= 60


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_broken_job_is_refused_with_line_key_and_expectation(path: Path) -> None:
    expected = re.findall(r"^# expect (\d+): (.*)$", path.read_text(), re.MULTILINE)
    assert expected
    lines = refused(path).splitlines()
    for line, fragment in expected:
        where = f"{path}:{line}:"
        assert any(said.startswith(where) and fragment in said for said in lines), (where, fragment, lines)
    assert sum(said.startswith(str(path)) for said in lines) == len(expected), lines


def test_missing_file(tmp_path: Path) -> None:
    assert refused(tmp_path / "job.yaml").startswith(f"{tmp_path}/job.yaml: no such job file")


def test_folder_instead_of_file(tmp_path: Path) -> None:
    assert f"{tmp_path}: cannot be read: Is a directory" in refused(tmp_path)


def test_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD + "# " + "x" * 1_000_000)
    assert f"{path}:5: the file is larger than 1 MB" in refused(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (GOOD.encode() + b"env: {A: \xff}\n", ":5: not UTF-8: byte 0xff"),
        (GOOD.encode("utf-16"), ":1: not UTF-8: byte 0xff"),
        ("# Gerät\n".encode("latin-1") + GOOD.encode(), ":1: not UTF-8: byte 0xe4"),
        (b"\x7fELF\x00\x01", ":1:1: the control character '\\x7f' is not allowed"),
    ],
)
def test_other_encodings(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(data)
    assert f"{path}{said}" in refused(path)


def test_values_in_messages_are_short_and_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD + 'gpus: "' + "x\\n" * 1000 + '"\n')
    (line,) = refused(path).splitlines()
    assert len(line) < 400


def test_at_most_ten_problems_are_shown_by_line_and_the_others_counted(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD + "".join(f"key{n:02}: 1\n" for n in range(25)))
    lines = refused(path, "prt=1").splitlines()
    assert [line.split(":")[1] for line in lines[:10]] == [str(n) for n in range(5, 15)]
    assert lines[10:] == ["... and 16 more"]


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("port", "--set port: expected KEY=VALUE"),
        ("=1", "--set =1: expected KEY=VALUE"),
        ("run..args=1", "--set run..args=1: expected KEY=VALUE"),
        ("port=80", "--set port=80: port: expected a port from 1024 to 65535, not 80"),
        ("run.args.epochs={a: b}", "--set run.args.epochs={a: b}: run.args.epochs: expected a plain value"),
        ("run.moduel=x", "--set run.moduel=x: run.moduel: unknown key; did you mean 'module'?"),
        ("lr=3", "--set lr=3: lr: unknown key; did you mean 'run.args.lr'?"),
        ("run.lr=3", "--set run.lr=3: run.lr: unknown key; did you mean 'run.args.lr'?"),
        ("epochs=3", "--set epochs=3: epochs: unknown key; an option of the program is run.args.epochs"),
        ("ref=x", "--set ref=x: ref: unknown key; 'ref' belongs under 'image'"),
        ("nodes.2=x", "--set nodes.2=x: nodes.2: nodes is a list of 2: expected an index below that, not 2"),
        ("nodes.first=x", "nodes is a list of 2: expected an index below that, not first"),
        ("name.x=1", "--set name.x=1: name.x: name is neither a mapping nor a list"),
        ("env=[", "--set env=[: not valid YAML"),
        ("env.A=", "--set env.A=: env.A: expected text, not null"),
        ("image=null", "--set image=null: image: required for runtime: docker"),
        ("env.A=!!binary x", "the tag"),
        ("revision=", "--set revision=: revision: expected a commit, branch or tag, not ''"),
        ("code=", "--set code=: code: expected a path, not ''"),
        ("sweep.code=[]", "--set sweep.code=[]: sweep.code: an empty list; expected at least one revision"),
        ("sweep.grid.lr=[0.1,0.1]", "sweep.grid.lr=[0.1,0.1]: sweep.grid.lr.1: 0.1 is listed twice"),
    ],
)
def test_wrong_overrides_are_named_as_given(tmp_path: Path, assignment: str, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    assert said in refused(path, assignment)


@pytest.mark.parametrize("nodes", [[], [""], ["a", " "]])
def test_no_node_chosen(tmp_path: Path, nodes: list[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    assert "--nodes: a node is missing" in refused(path, nodes=nodes)


def test_wrong_chosen_nodes_are_named_as_given(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    assert "--nodes: nodes.1: c is already listed as entry 0" in refused(path, nodes=["c", "c"])
    assert "--nodes: nodes.0.host: expected an ssh alias" in refused(path, nodes=["-oProxyCommand=id"])


def test_an_error_in_a_merged_mapping_is_located_at_its_source() -> None:
    text = "name: job\nruntime: process\nnodes: [local]\nrun:\n  module: train\n  args: &a\n    lr: yes\n" + (
        "sweep:\n  - <<: *a\n    x: 1\n"
    )
    with pytest.raises(JobInvalid) as caught:
        parse_job(text, "job.yaml")
    assert str(caught.value).splitlines() == [
        "job.yaml:7: run.args.lr: yes is ambiguous; write true for a boolean or 'yes' for text",
        "job.yaml:7: sweep.0.lr: yes is ambiguous; write true for a boolean or 'yes' for text",
    ]


@pytest.mark.parametrize(("name", "run"), [("train.py", "script: train.py"), ("run.sh", "command: [bash, run.sh]")])
def test_a_program_instead_of_a_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, run: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("import torch\nprint('a: b')\n")
    said = refused(name)
    assert said.startswith(f"{name}: is a program, not a job file: a job file (launcher init) has `run: {{{run}}}`")


def test_a_job_file_without_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    assert f"did you mean {tmp_path}/job.yaml?" in refused(tmp_path / "job")


def test_a_sweep_without_a_space(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    said = refused(path, "sweep=[{lr:1}]")
    assert said == "--set sweep=[{lr:1}]: sweep.0.lr:1: a space is missing after the colon: {lr: 1}"


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        ("python train.py", "; write script: train.py, which torchrun starts under the image's Python"),
        ("torchrun --nproc_per_node 2 train.py", "; write script: train.py, which torchrun starts"),
        ("train.py --lr 0.1", "; write script: train.py and args: [--lr, 0.1], which torchrun starts"),
        ("python 'train.py", ""),
        ("nicht da.py", ""),
        ("python3.12 da.py", "; write script: da.py, which torchrun starts"),
        ("main.py", ""),
    ],
)
def test_a_command_line_as_script(tmp_path: Path, script: str, hint: str) -> None:
    (tmp_path / "train.py").touch()
    job = parse_job(GOOD.replace("{module: train, args: {lr: 0.1}}", f"{{script: {json.dumps(script)}}}"))
    with pytest.raises(JobInvalid) as caught:
        check_files(job, tmp_path, {})
    text = str(caught.value)
    assert f"run.script: no such file: {tmp_path}/{script}" in text
    assert hint in text
    assert bool(hint) == ("write script" in text)


def test_a_duration_without_a_unit_is_told() -> None:
    def said(text: str) -> list[str]:
        return [note for note in written(parse_job(GOOD + text)) if "unit" in note]

    assert said("timeout: 24\n") == ["timeout: 24 is 24s: without a unit it is in seconds"]
    assert said("budget: 24\n") == ["budget: 24 is 24s: without a unit it is in seconds"]
    assert said("hang_timeout: 5400\n") == ["hang_timeout: 5400 is 1h30m: without a unit it is in seconds"]
    assert said("timeout: 24h\nhang_timeout: 90s\n") == []


@pytest.mark.parametrize("hang_timeout", ["4m59s", "5m", "10m"])
def test_a_hang_timeout_that_the_budget_precedes_is_told(hang_timeout: str) -> None:
    told = written(parse_job(f"{GOOD}budget: 5m\nhang_timeout: {hang_timeout}\n"))
    late = f"hang_timeout: {hang_timeout} is not shorter than the budget of 5m, which ends a hang first, as done"
    assert told == ([] if hang_timeout == "4m59s" else [late])
