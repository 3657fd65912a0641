"""Arguments of a program: keys as written, `--set` and sweeps on lists, and what is said of them before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.errors import JobInvalid
from launcher.job.arguments import argv_of
from launcher.job.loader import parse_job
from launcher.job.overrides import expand_sweep
from launcher.model.plan import Plan

HEAD = "name: job\nimage: {ref: img}\nnodes: [a]\nrun:\n  script: main.py\n  args: "
SWEEP = "\nsweep: [{}]\n"


def with_set(args: str, *sets: str) -> list[str]:
    return list(argv_of(parse_job(f"{HEAD}{args}\n", "job.yaml", [f"run.args.{each}" for each in sets]).run.args))


def swept(args: str, variant: str) -> list[str]:
    (job,) = expand_sweep(parse_job(f"{HEAD}{args}\nsweep: [{variant}]\n"))
    return list(argv_of(job.run.args))


def test_a_key_that_begins_with_a_dash_is_passed_as_written() -> None:
    assert with_set("{--batch_size: 64, -b: 1, -lr: 0.1, --amp: true, --off: false, --mean: [1, 2]}") == [
        "--batch_size", "64", "-b", "1", "-lr", "0.1", "--amp", "--mean", "1", "2"
    ]  # fmt: skip


@pytest.mark.parametrize("twin", ["batch_size", "batch-size", "--batch-size"])
def test_an_option_is_given_once_however_it_is_spelled(twin: str) -> None:
    with pytest.raises(JobInvalid, match="is the same option as --batch_size"):
        with_set(f"{{--batch_size: 64, {twin}: 32}}")


# What a list becomes with an option of another value, by --set and by a variant of a sweep.
CHANGES = [
    ("[--lr, 0.1, --wd, 1]", "lr", "0.2", "--lr 0.2 --wd 1"),
    ("[--lr=0.1, --wd=1]", "lr", "0.2", "--lr=0.2 --wd=1"),
    ("[lr=0.1, wd=1]", "lr", "0.2", "lr=0.2 wd=1"),
    ("[+lr=0.1, wd=1]", "lr", "0.2", "+lr=0.2 wd=1"),
    ("[-lr, 0.1]", "lr", "0.2", "-lr 0.2"),
    ("[--weight_decay, 1]", "weight-decay", "2", "--weight_decay 2"),
    ("[--weight-decay, 1]", "weight_decay", "2", "--weight-decay 2"),
    ("[--lr, 0.1]", "--lr", "0.2", "--lr 0.2"),
    ("[model.lr=0.1]", "model.lr", "0.2", "model.lr=0.2"),
    ("[--lr, -1, --x]", "lr", "-2", "--lr -2 --x"),
    ("[-a, resnet50, --lr, 0.1, /data]", "lr", "0.2", "-a resnet50 --lr 0.2 /data"),  # the path is no value of --lr
    ("[-a, resnet50, /data]", "a", "vit", "-a vit /data"),
    ("[--steps, 30, 60, --lr, 1]", "steps", "[10, 20, 40]", "--steps 10 20 40 --lr 1"),
    ("[steps=1]", "steps", "[1, 2]", "steps=[1,2]"),
    # an option that is not in it, in the list's own form
    ("[]", "batch_size", "2", "--batch-size 2"),
    ("[--lr, 1]", "batch_size", "2", "--lr 1 --batch-size 2"),
    ("[--lr, 1, --weight_decay, 0]", "batch_size", "2", "--lr 1 --weight_decay 0 --batch_size 2"),
    ("[--lr=1, --amp]", "batch_size", "2", "--lr=1 --amp --batch-size=2"),
    ("[lr=1, -m]", "batch_size", "2", "lr=1 -m batch_size=2"),
    ("[--lr, 1]", "--batch_size", "2", "--lr 1 --batch_size 2"),
    ("[train, --lr, 1]", "steps", "[1, 2]", "train --lr 1 --steps 1 2"),
    # flags
    ("[--lr, 1]", "amp", "true", "--lr 1 --amp"),
    ("[--amp, --lr, 1]", "amp", "true", "--amp --lr 1"),
    ("[--amp, --lr, 1]", "amp", "false", "--lr 1"),
    ("[--amp, --lr, 1]", "amp", "null", "--lr 1"),
    ("[--amp, 'False', --lr, 1]", "amp", "true", "--amp True --lr 1"),
    ("[--amp=true]", "amp", "false", "--amp=false"),
    ("[amp=true]", "amp", "false", "amp=false"),
    ("[--resume=x]", "resume", "null", ""),
    ("[resume=x]", "resume", "null", "resume=null"),
]


@pytest.mark.parametrize(("args", "key", "value", "expected"), CHANGES)
def test_an_option_of_a_list_is_replaced_where_and_as_it_stands(args: str, key: str, value: str, expected: str) -> None:
    assert with_set(args, f"{key}={value}") == expected.split()
    assert swept(args, f"{{{key}: {value}}}") == expected.split()


REFUSED = [
    ("[--lr, 1, --lr, 2]", "lr", "3", "--lr is given 2 times in the list"),
    ("[--lr=1, --lr, 2]", "lr", "3", "--lr is given 2 times in the list"),
    ("[--lr, --wd, 1]", "lr", "3", "--lr stands in the list without a value"),
    ("[--wd, 1, --lr]", "lr", "3", "--lr stands in the list without a value"),
    ("[--steps, 30, 60]", "steps", "10", "--steps is followed by '30' '60' in the list"),
    ("[--resume, x.pt]", "resume", "null", "--resume is followed by 'x.pt' in the list"),
    ("[--amp, /data]", "amp", "false", "--amp is followed by '/data' in the list"),
    ("[--lr=1]", "lr", "[1, 2]", "--lr=1 stands in the list with one value"),
    ("[--amp]", "amp", "yes", "yes is ambiguous"),
]


@pytest.mark.parametrize(("args", "key", "value", "why"), REFUSED)
def test_an_option_without_a_clear_place_is_refused(args: str, key: str, value: str, why: str) -> None:
    with pytest.raises(JobInvalid) as caught:
        with_set(args, f"{key}={value}")
    assert str(caught.value).startswith(f"--set run.args.{key}={value}: run.args.{key}: {why}")
    with pytest.raises(JobInvalid) as caught:
        swept(args, f"{{{key}: {value}}}")
    assert str(caught.value).startswith(f"job.yaml:7: sweep.0.{key}: {why}")


def test_items_of_a_list_are_set_by_their_number_as_before() -> None:
    assert with_set("[--lr, 0.1]", "1=0.2") == ["--lr", "0.2"]
    assert with_set("{steps: [1, 2]}", "steps.1=3") == ["--steps", "1", "3"]


def test_errors_in_a_changed_list_keep_their_lines() -> None:
    text = f"{HEAD}\n    - --lr\n    - 0.1\n    - {{a: b}}\n"
    with pytest.raises(JobInvalid, match=r"job.yaml:9: run.args.2: expected text, not a mapping"):
        parse_job(text, "job.yaml", [])
    with pytest.raises(JobInvalid, match=r"run.args.lr: .*expected text, not a mapping"):
        parse_job(text, "job.yaml", ["run.args.lr=1"])


@pytest.mark.parametrize(
    ("args", "key", "expected"),
    [
        ("{batch_size: 1, x: 2}", "batch-size", "--batch-size 5 --x 2"),
        ("{--batch_size: 1, x: 2}", "batch_size", "--batch_size 5 --x 2"),
        ("{batch_size: 1, x: 2}", "--batch_size", "--batch_size 5 --x 2"),
        ("{-b: 1, x: 2}", "b", "-b 5 --x 2"),
        ("{-b: 1, --b: 2}", "--b", "-b 1 --b 5"),
        ("{model.lr: 1}", "model.lr", "--model.lr 5"),
        ("", "model.lr", "--model.lr 5"),
    ],
)
def test_an_option_of_a_mapping_is_replaced_however_it_is_spelled(args: str, key: str, expected: str) -> None:
    assert with_set(args, f"{key}=5") == expected.split()
    assert swept(args, f"{{{key}: 5}}") == expected.split()


def test_arguments_of_a_node_replace_those_of_a_list() -> None:
    text = f"{HEAD}[--batch_size, 64, --lr, 1]\n".replace("[a]", "[a, {host: b, args: {batch_size: 32}}]")
    job = parse_job(text, "job.yaml", ["nodes.1.args.lr=2"])
    assert [job.args_of(node) for node in job.nodes] == [
        ("--batch_size", "64", "--lr", "1"),
        ("--batch_size", "32", "--lr", "2"),
    ]
    with pytest.raises(JobInvalid, match=r"nodes.1.args.lr: --lr is given 2 times"):
        parse_job(text.replace("--lr, 1", "--lr, 1, --lr, 2"), "job.yaml", ["nodes.1.args.lr=2"])


# --- what plan and up say


def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, **keys: Any) -> Plan:
    (tmp_path / "main.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    job = {"name": "job", "image": {"ref": "img"}, "nodes": ["a"], "gpus": "none", **keys}
    return launcher.plan(launcher.load(job), offline=True, log=lambda _: None)


def said(plan: Plan) -> list[str]:
    return [warning for warning in plan.warnings if not warning.startswith("offline")]


UNDERSCORES = "parser.add_argument('--batch_size', type=int)\n"


@pytest.mark.parametrize("more", [{}, {"sweep": [{"batch_size": 1}]}])
def test_plan_says_how_the_code_spells_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    run = {"script": "main.py", "args": {} if more else {"batch_size": 64}}
    plan = offline(tmp_path, monkeypatch, UNDERSCORES, run=run, **more)
    assert said(plan) == [
        "the program is given --batch-size, and the code has only --batch_size (main.py): "
        "write the key so, as it is: {--batch_size: VALUE}"
    ]


@pytest.mark.parametrize(
    ("code", "args"),
    [
        (UNDERSCORES, {"--batch_size": 64}),
        (UNDERSCORES + "'--batch-size'", {"batch_size": 64}),  # it has both
        ("'--batch_size_of_something'", {"batch_size": 64}),
        ("", {"batch_size": 64}),  # of a library, perhaps
        (UNDERSCORES, ["--batch_size", "64"]),
    ],
)
def test_nothing_is_said_of_an_option_that_may_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, args: Any
) -> None:
    assert said(offline(tmp_path, monkeypatch, code, run={"script": "main.py", "args": args})) == []


def test_the_reverse_and_lists_are_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = offline(tmp_path, monkeypatch, "'--batch-size'", run={"script": "main.py", "args": ["--batch_size=64"]})
    assert said(plan) == [
        "the program is given --batch_size, and the code has only --batch-size (main.py): correct run.args"
    ]


def test_false_that_is_left_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"pretrained": False, "amp": True, "resume": None}
    assert said(offline(tmp_path, monkeypatch, "", run={"script": "main.py", "args": args})) == [
        "pretrained: false is left out: the program is not given --pretrained. To pass the word: pretrained: 'false'"
    ]
    own = {"data": "synthetic", "arch": "resnet18", "amp": False}
    assert said(offline(tmp_path, monkeypatch, "", run={"module": "train", "args": own})) == []


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"command": ["python3", "main.py"]}, "main.py"),
        ({"module": "main"}, "main"),
        ({"command": ["sh", "-c", "cd /opt/tool && sh run.sh"]}, None),
    ],
)
def test_a_code_without_files_is_told_of_a_program_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: dict[str, Any], said: str | None
) -> None:
    """As of a launcher that is called in another folder than was meant."""
    monkeypatch.chdir(tmp_path)
    job = {"name": "job", "image": {"ref": "img"}, "nodes": ["a"], "gpus": "none", "run": run}
    told = [each for each in launcher.plan(job, offline=True).warnings if "no file to send" in each]
    assert [f"{tmp_path} has no file to send, and the job starts {said}: " in each for each in told] == [True] * bool(
        said
    )


def test_up_says_both_before_it_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.py").write_text(UNDERSCORES)
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config"
    config.write_text("Host a\n  HostName 127.0.0.1\n  Port 1\n")
    run = {"script": "main.py", "args": {"batch_size": 64, "pretrained": False}}
    lines: list[str] = []
    with pytest.raises(launcher.errors.NodesFailed):
        launcher.up(
            {"name": "job", "image": {"ref": "img"}, "nodes": ["a"], "gpus": "none", "run": run},
            log=lines.append,
            ssh_config=config,
        )
    assert any(line.startswith("warning: pretrained: false is left out") for line in lines)
    assert any(line.startswith("warning: the program is given --batch-size") for line in lines)
