"""Valid job files: every documented form and its value."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import launcher
from launcher.errors import JobInvalid
from launcher.job.dump import dump_job
from launcher.job.loader import load_job, parse_job
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep, variant_name
from launcher.model.container import Mount

REPOSITORY = Path(__file__).parents[2]
JOBS = sorted((REPOSITORY / "jobs").glob("*.yaml"))
HEAD = "name: job\nimage: {ref: img}\nnodes: [a, b]\nrun: {module: train}\n"

MANUAL = """
name: imagenet-2node
runtime: docker             # docker (default) | process
image:
  base: nvcr.io/nvidia/pytorch:26.09-py3
  torchvision: auto
  packages: []
code: .
nodes: [gpu-a, {host: gpu-b, gpus: [0, 1], address: 10.0.0.5, env: {A: b}}]
gpus: all
processes: auto
run:
  module: train
  args: {data: /data/imagenet, arch: resnet50, epochs: 6}
mounts: {/data/imagenet: /data/imagenet:ro}
env: {NCCL_DEBUG: WARN}
secrets: [WANDB_API_KEY]
output: /output
restarts: 0
port: 29500
timeout: 24h
hang_timeout: 15m
resources: {memory: 64g, cpus: 16}
docker: {ipc: host, extra_hosts: {}, devices: [], cap_add: []}
sweep: [{batch_size: 128}, {batch_size: 256}]
"""


def process(extra: str, nodes: str = "[local]") -> Job:
    return parse_job(f"name: job\nruntime: process\nnodes: {nodes}\nrun: {{module: train}}\n{extra}")


def job(extra: str) -> Job:
    return parse_job(HEAD + extra)


def args(text: str) -> Any:
    return parse_job(f"name: job\nimage: {{ref: img}}\nnodes: [a]\nrun:\n  module: train\n  args: {text}\n").run.args


def test_the_documented_job_file() -> None:
    job = parse_job(MANUAL)
    assert job.image is not None
    assert (job.image.base, job.image.ref, job.image.torchvision) == ("nvcr.io/nvidia/pytorch:26.09-py3", None, "auto")
    assert [node.name for node in job.nodes] == ["gpu-a", "gpu-b"]
    assert job.gpus_of(job.nodes[0]) == "all"
    assert job.gpus_of(job.nodes[1]) == (0, 1)
    assert job.env_of(job.nodes[1]) == {"NCCL_DEBUG": "WARN", "A": "b"}
    assert job.nodes[1].address == "10.0.0.5"
    assert job.mounts == (Mount("/data/imagenet", "/data/imagenet", True),)
    assert job.run.args == {"data": "/data/imagenet", "arch": "resnet50", "epochs": "6"}
    assert (job.timeout, job.hang_timeout) == (86400, 900)
    assert (job.resources.memory, job.resources.cpus) == (64 << 30, 16.0)
    assert str(job.mark(("run", "args", "epochs"))) == "job.yaml:14"
    assert str(job.mark(("run", "args", "lr"))) == "job.yaml:14"
    assert str(job.mark(("image", "packages"))) == "job.yaml:7"
    assert parse_job(dump_job(job)) == job


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_job_of_the_repository_loads_and_survives_a_dump(path: Path) -> None:
    job = load_job(path)
    assert parse_job(dump_job(job)) == job
    assert job.name == path.stem.replace("_", "-")


def test_defaults() -> None:
    found = job("")
    assert (found.runtime, found.code, found.gpus, found.processes, found.output) == (
        "docker", ".", "all", "auto", "/output"
    )  # fmt: skip
    assert (found.restarts, found.port, found.timeout, found.sweep, found.run.args) == (0, 29500, None, (), {})


def test_a_key_without_a_value_has_its_default() -> None:
    found = job("mounts:\nenv:  # {A: b}\nport:\ntimeout: ~\nresources:\n  memory:\n")
    assert found == job("")


@pytest.mark.parametrize("mark", ["\ufeff", "---\n", "%YAML 1.2\n---\n", "# comment\n\n"])
def test_harmless_file_beginnings(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(mark + HEAD, encoding="utf-8")
    assert load_job(path) == job("")


def test_windows_line_ends_keep_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(HEAD.replace("\n", "\r\n").encode())
    assert str(load_job(path).mark(("run",))) == f"{path}:4"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("all", "all"),
        ("none", "none"),
        ("0", "none"),
        ("2", 2),
        ("[0, 2]", (0, 2)),
        ("[GPU-8f2d, MIG-1/2/0]", ("GPU-8f2d", "MIG-1/2/0")),
    ],
)
def test_gpus(text: str, value: object) -> None:
    assert job(f"gpus: {text}").gpus == value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24h", 86400),
        ("15m", 900),
        ("90s", 90),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        ("90", 90),
        ("1H", 3600),
    ],
)
def test_durations(text: str, seconds: int) -> None:
    assert job(f"timeout: {text}").timeout == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64g", 64 << 30),
        ("512m", 512 << 20),
        ("16G", 16 << 30),
        ("1.5g", 3 << 29),
        ("2GiB", 2 << 30),
        ("8388608", 8 << 20),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert job(f"resources: {{memory: {text}}}").resources.memory == size


def test_mounts_are_normalised() -> None:
    mounts = job("mounts: {/data/: '/data/x/', /b: '/b:rw', //c: /c:ro}").mounts
    assert mounts == (Mount("/data", "/data/x"), Mount("/b", "/b"), Mount("/c", "/c", True))


def test_secrets_from_the_environment_and_from_files() -> None:
    secrets = job("secrets: [A, {B: ~/.b}]").secrets
    assert [(secret.name, secret.file) for secret in secrets] == [("A", None), ("B", "~/.b")]


def test_node_names_follow_from_hosts() -> None:
    text = "[me@10.0.0.1:2222, 'you@gw:2201', 'you@gw:2202', '[fe80::1]:22', {host: ubuntu@ec2-1.example, name: c}]"
    found = parse_job(f"name: job\nimage: {{ref: img}}\nnodes: {text}\nrun: {{module: train}}")
    assert [node.name for node in found.nodes] == ["10.0.0.1", "gw-2201", "gw-2202", "fe80--1", "c"]
    assert parse_job(dump_job(found)) == found


def test_local_may_repeat_for_plain_processes() -> None:
    assert [node.name for node in process("").nodes] == ["local"]
    assert [node.name for node in process("", "[local, {host: local, gpus: [1]}]").nodes] == ["local-0", "local-1"]


def test_plain_processes_may_have_identity_mounts_and_an_unused_image() -> None:
    assert process("mounts: {/data: /data:ro}\nimage: {ref: img}").mounts == (Mount("/data", "/data", True),)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{lr: 1e-4}", {"lr": "1e-4"}),
        ("{lr: 1.10}", {"lr": "1.10"}),
        ("{seed: 010}", {"seed": "010"}),
        ("{mask: 0x1F}", {"mask": "0x1F"}),
        ("{time: 1:30}", {"time": "1:30"}),
        ("{day: 2026-11-21}", {"day": "2026-11-21"}),
        ("{n: 1_000}", {"n": "1_000"}),
        ("{n: +5}", {"n": "+5"}),
        ("{amp: true, b: False, c: null, d: ~}", {"amp": True, "b": False, "c": None, "d": None}),
        ("{amp: 'yes', b: \"on\"}", {"amp": "yes", "b": "on"}),
        ("{s: ''}", {"s": ""}),
        ("{mean: [0.5, 0.50, x, true]}", {"mean": ("0.5", "0.50", "x", "true")}),
        ("{on: 1, 5: 6, null: x}", {"on": "1", "5": "6", "null": "x"}),
        ("[--lr, 1e-4, 'a b']", ("--lr", "1e-4", "a b")),
    ],
)
def test_values_reach_the_program_as_written(text: str, value: object) -> None:
    assert args(text) == value
    found = parse_job(f"name: job\nimage: {{ref: img}}\nnodes: [a]\nrun:\n  module: train\n  args: {text}\n")
    assert parse_job(dump_job(found)).run.args == value


@pytest.mark.parametrize(
    "text", ["\x85", "a\u2028b", " x ", "a\nb\n", "\t", "#", "- a", "'", '"', "{", "\ufeff", "a: b"]
)
def test_any_text_survives_a_dump(text: str) -> None:
    found = Job.model_validate({"name": "j", "image": {"ref": "i"}, "nodes": ["a"], "run": {"command": ["x", text]}})
    assert parse_job(dump_job(found)).run.command == ("x", text)


def test_environment_values_are_passed_on_as_written() -> None:
    env = job("env: {A: 1, B: 1.10, C: yes, D: true, E: '', F: 1e3, on: 0o17}").env
    assert env == {"A": "1", "B": "1.10", "C": "yes", "D": "true", "E": "", "F": "1e3", "on": "0o17"}


def test_merge_keys_and_aliases() -> None:
    text = """
name: job
image: {ref: img}
nodes:
  - &one {host: a, env: &env {A: "1", B: "2"}}
  - {<<: *one, host: b}
  - host: c
    env: {<<: [{A: "9", C: "3"}, *env], B: "0"}
run: {module: train}
"""
    nodes = parse_job(text).nodes
    assert [node.host for node in nodes] == ["a", "b", "c"]
    assert [dict(node.env) for node in nodes] == [
        {"A": "1", "B": "2"},
        {"A": "1", "B": "2"},
        {"A": "9", "B": "0", "C": "3"},
    ]


def test_overrides_take_a_path_and_a_yaml_value() -> None:
    sets = [
        "run.args.epochs=2",
        "run.args.data=/d=1",
        "env.A=b c",
        "nodes.1=c",
        "gpus=[0, 2]",
        "resources.memory=8g",
        "mounts./data=/data:ro",
        "timeout=1h",
        "run.args.lr=1e-4",
    ]
    found = parse_job(HEAD, "job.yaml", sets)
    assert found.run.args == {"epochs": "2", "data": "/d=1", "lr": "1e-4"}
    assert (found.env, found.gpus, found.resources.memory, found.timeout) == ({"A": "b c"}, (0, 2), 8 << 30, 3600)
    assert [node.host for node in found.nodes] == ["a", "c"]
    assert found.mounts == (Mount("/data", "/data", True),)
    assert str(found.mark(("run", "args", "lr"))) == "--set run.args.lr=1e-4"
    assert str(found.mark(("run", "module"))) == "job.yaml:4"


@pytest.mark.parametrize("text", ["1234567", "0123456", "12e4567", "true"])
def test_an_override_of_text_is_taken_as_it_is_written(text: str) -> None:
    """As `git rev-parse --short` prints it: a shell leaves no quotes for YAML."""
    found = parse_job(HEAD, "job.yaml", [f"name={text}", f"revision={text}", f"cluster.account={text}"])
    assert (found.name, found.revision, found.cluster.account) == (text, text, text)
    assert parse_job(HEAD, "job.yaml", [f"sweep.code=[{text}]"]).codes == (text,)
    assert parse_job(HEAD + f"revision: {text}\n", "job.yaml").revision == text
    assert parse_job(HEAD + "revision: main\n", "job.yaml", ["revision=null"]).revision is None


def test_an_override_can_remove_a_setting() -> None:
    assert parse_job(HEAD + "timeout: 1h\n", "job.yaml", ["timeout="]).timeout is None


def test_an_override_changes_one_use_of_an_alias() -> None:
    text = "name: j\nimage: {ref: i}\nnodes: [{host: a, env: &e {A: '1'}}, {host: b, env: *e}]\nrun: {module: m}\n"
    nodes = parse_job(text, "job.yaml", ["nodes.0.env.A=2"]).nodes
    assert [dict(node.env) for node in nodes] == [{"A": "2"}, {"A": "1"}]


def test_chosen_nodes_keep_their_settings_from_the_file() -> None:
    entries = "[a, {host: me@b:22, gpus: 1}, {host: c, name: d, gpus: 2}]"
    nodes = parse_job(HEAD.replace("[a, b]", entries), "job.yaml", nodes=["b", "e", "d"]).nodes
    assert [(node.name, node.host, node.gpus) for node in nodes] == [
        ("b", "me@b:22", 1),
        ("e", "e", None),
        ("d", "c", 2),
    ]
    assert [node.name for node in parse_job(MANUAL, nodes=["x", "gpu-b"]).nodes] == ["x", "gpu-b"]


def test_a_sweep_is_one_job_per_variant() -> None:
    found = parse_job(HEAD.replace("{module: train}", "{module: train, args: {batch_size: 64, lr: 0.1, amp: true}}") + (
        "sweep: [{batch_size: 128}, {batch-size: 256, amp: false}, {}]\n"
    ))  # fmt: skip
    jobs = expand_sweep(found)
    assert [job.run.args for job in jobs] == [
        {"batch_size": "128", "lr": "0.1", "amp": True},
        {"batch_size": "256", "lr": "0.1", "amp": False},
        {"batch_size": "64", "lr": "0.1", "amp": True},
    ]
    assert all(job.sweep == () and job.nodes == found.nodes for job in jobs)
    assert [variant_name(variant) for variant in found.sweep] == ["batch_size=128", "batch-size=256 amp=false", ""]


def test_a_sweep_of_argument_lists_appends() -> None:
    found = job("").model_copy(update={"sweep": (("--lr", "1"), {"lr": "2", "mean": ("1", "2")})})
    assert [one.run.args for one in expand_sweep(found)] == [("--lr", "1"), {"lr": "2", "mean": ("1", "2")}]
    assert [variant_name(variant) for variant in found.sweep] == ["--lr 1", "lr=2 mean=1,2"]


def test_without_a_sweep_there_is_one_job() -> None:
    assert expand_sweep(job("sweep: []")) == [job("")]


def test_a_job_is_frozen_and_survives_a_process_boundary() -> None:
    found = parse_job(MANUAL)
    with pytest.raises(ValueError, match="frozen"):
        found.name = "other"  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(found))
    assert copy == found
    assert str(copy.mark(("run",))) == str(found.mark(("run",)))


def test_a_jobs_origin_does_not_affect_equality() -> None:
    assert parse_job("\n\n" + HEAD, "a.yaml") == parse_job(HEAD, "b.yaml")
    assert parse_job(HEAD) != parse_job(HEAD + "port: 29501")


def test_a_job_knows_whether_its_file_alone_gives_it(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(HEAD)
    loaded = load_job(file)
    assert loaded.is_of_file
    assert not load_job(file, ["port=1234"]).is_of_file
    assert not load_job(file, nodes=["c"]).is_of_file
    assert not loaded.model_copy(update={"port": 1234}).is_of_file
    assert loaded.model_copy(update={"sweep": ()}).is_of_file
    assert not parse_job(HEAD).is_of_file
    file.write_text(HEAD + "port: 1234\n")
    assert loaded.is_of_file, "the file is not read again"


def test_a_job_from_a_pipe_cannot_be_named_by_its_file() -> None:
    reader, writer = os.pipe()
    os.write(writer, HEAD.encode())
    os.close(writer)
    assert not load_job(f"/dev/fd/{reader}").is_of_file
    os.close(reader)


def test_loading_is_fast(tmp_path: Path) -> None:
    """20 ms for the documented job file; the import takes little longer than pydantic alone."""
    path = tmp_path / "job.yaml"
    path.write_text(MANUAL)
    load_job(path)
    taken = []  # repeated, as other programs slow the machine down
    while len(taken) < 50 and min(taken, default=1.0) >= 0.020:
        taken.append(_seconds(lambda: load_job(path)))
    assert min(taken) < 0.020, taken


def test_importing_pulls_in_nothing_heavy() -> None:
    heavy = ("torch", "docker", "paramiko", "rich", "typer")
    code = f"import sys, launcher.job.loader, launcher.job.files; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.strip() == "[]"


def _seconds(action: Any) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def test_top_level_keys_for_anchors_are_ignored() -> None:
    text = "name: job\nx-hosts: &hosts [a, b]\nimage: {ref: img}\nnodes: *hosts\nrun: {module: train}\n"
    job = parse_job(text)
    assert job == parse_job(HEAD)
    assert "x-" not in dump_job(job)
    with pytest.raises(JobInvalid, match="x-lr: unknown key"):
        parse_job(text.replace("train}", "train, x-lr: 1}"))


def test_a_host_may_be_a_url_and_no_user_name_has_an_at() -> None:
    assert parse_job(HEAD.replace("a, b", "'ssh://ada@gpu-a:2222/'")).nodes[0].host == "ada@gpu-a:2222"
    with pytest.raises(JobInvalid, match="give a user name with an @ in your ssh config, and its alias here"):
        parse_job(HEAD.replace("a, b", "ada@corp@gpu-a"))


@pytest.mark.parametrize(
    ("keys", "key", "kind"),
    [
        ({"env": {"A": object()}}, "env", "object"),
        ({"run": {"command": [b"python", "a.py"]}}, "run", "bytes"),
        ({"mounts": {Path(b"/x".decode()): {1, 2}}}, "mounts", ""),
    ],
)
def test_a_python_value_that_a_job_file_cannot_have_is_refused(keys: dict[str, Any], key: str, kind: str) -> None:
    """Not passed to the program as its repr, `<object object at 0x7f...>`."""
    job = {"name": "x", "image": {"ref": "y"}, "nodes": ["a"], "run": {"module": "train"}}
    with pytest.raises(JobInvalid, match=f"job: {key}: .*{kind}"):
        launcher.load({**job, **keys})
    name, value = next(iter(keys.items()))
    with pytest.raises(JobInvalid, match=f"job: {key}: .*{kind}"):
        launcher.load(job, set={name: value})


def test_paths_and_mappings_are_accepted_as_values_of_a_job() -> None:
    keys = {"name": "x", "image": {"ref": "y"}, "nodes": ("a",), "env": MappingProxyType({"A": Path("/x"), "B": 1})}
    assert launcher.load({**keys, "run": {"module": "train"}}).env == {"A": "/x", "B": "1"}
