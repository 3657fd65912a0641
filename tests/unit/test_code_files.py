"""Selection of code files, what is left out and why, links, and adding the launcher's trainer."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import JobInvalid
from launcher.job.loader import job_from, parse_job
from launcher.job.models import Job
from launcher.records import snapshot as snapshots
from launcher.records import trainer
from launcher.records.code_files import code_files
from launcher.records.left_out import CREDENTIALS, EMPTY, ENVIRONMENT, NEVER, LeftOut
from launcher.records.snapshot import list_code, pack, snapshot
from launcher.records.trainer import check_options, needed_trainer

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> set[str]:
    return {file.name for file in code_files(folder)}


def fill(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("line", ["!", "! ", "/", "!/", "//", "\\", "a\\", "[z-a]", "[", "![", "***/["])
@pytest.mark.parametrize("at", ["", "sub/"])
def test_an_invalid_pattern_ignores_nothing_and_the_others_apply(tmp_path: Path, at: str, line: str) -> None:
    fill(tmp_path, "main", "sub/a", "sub/b", "b")
    (tmp_path / at / ".gitignore").write_text(f"b\n{line}\n")
    assert names(tmp_path) == {"main", "sub/a", f"{at}.gitignore"} | ({"b"} if at else set())


@given(lines=st.lists(st.text(st.sampled_from("!*?[]\\/ab-^# .\x80é"), max_size=6), max_size=3))
def test_no_ignore_file_breaks_the_walk(lines: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (fill(Path(folder), "a/b", "b") / ".gitignore").write_text("\n".join(lines))
        assert names(Path(folder)) <= {"a/b", "b", ".gitignore"}


def test_ignore_files_in_many_folders_cost_little(tmp_path: Path) -> None:
    """Only ignore files in parent folders are evaluated. Measured in CPU time, which other programs do not affect."""

    def cost() -> float:
        began = time.process_time()
        assert len(names(tmp_path)) >= 4000
        return time.process_time() - began

    fill(tmp_path, *(f"{folder}/{file}" for folder in range(400) for file in range(10)))
    without = min(cost() for _ in range(3))
    for folder in range(400):
        (tmp_path / str(folder) / ".gitignore").write_text("*.o\n")
    assert min(cost() for _ in range(3)) < 6 * without


def test_slow_packing_reports_progress_and_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, *map(str, range(50)))
    lines: list[str] = []
    assert snapshot(tmp_path, lines.append)
    assert lines == []
    monkeypatch.setattr(snapshots, "SLOW", 0.0)
    assert snapshot(tmp_path, lines.append)
    assert "1 files found" in lines[0]
    assert ".dockerignore" in lines[0]
    assert " of 50 files" in lines[-1]
    assert len(lines) < 30  # at increasing intervals


HEAD = "name: j\nruntime: process\nnodes: [local]\n"
DOCKER_HEAD = "name: j\nimage: {ref: x}\nnodes: [a]\n"


def job(module: str, rest: str = "", head: str = HEAD) -> Job:
    return parse_job(f"{head}run:\n  module: {module}\n{rest}")


@pytest.mark.parametrize(
    ("files", "module", "needed"),
    [
        (["main.py"], "train", True),
        (["main.py"], "train.data.pack", True),
        (["main.py"], "trainer", False),
        (["main.py"], "main", False),
        (["train.py"], "train", False),
        (["train/__init__.py"], "train", False),
        (["train/deep/er/own.py"], "train.deep.er.own", False),  # a package without __init__.py
        (["src/train/__init__.py"], "train", True),
        (["train/cat/1.jpg", "val/cat/2.jpg"], "train", True),  # data of that name is not a module
        (["training.py", "train.yaml"], "train", True),
    ],
)
def test_the_trainer_is_added_to_code_that_runs_it_and_has_none(
    tmp_path: Path, files: list[str], module: str, needed: bool
) -> None:
    fill(tmp_path, *files)
    found = needed_trainer(job(module), tmp_path, code_files(tmp_path))
    assert found == (ROOT / "train" if needed else None)


def test_a_module_that_is_ignored_is_not_in_the_code(tmp_path: Path) -> None:
    (fill(tmp_path, "train/__init__.py") / ".gitignore").write_text("train/\n")
    assert needed_trainer(job("train"), tmp_path, code_files(tmp_path))


def test_a_link_may_be_the_module_and_another_file_is_a_conflict(tmp_path: Path) -> None:
    fill(tmp_path, "src/train/__main__.py", "data/train/1.jpg")
    (tmp_path / "train").symlink_to("src/train")
    assert needed_trainer(job("train"), tmp_path, code_files(tmp_path)) is None
    (tmp_path / "train").unlink()
    (tmp_path / "train").symlink_to("data/train")
    with pytest.raises(
        JobInvalid, match=r"job\.yaml:5: run\.module: .* conflicts with the launcher's trainer; rename it"
    ):
        needed_trainer(job("train"), tmp_path, code_files(tmp_path))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            "{data: x, batchsize: 8}",
            r"job\.yaml:6: run\.args\.batchsize: --batchsize: no such option; closest: --batch-size",
        ),
        ("{data: x, batch_size: 0}", r"job\.yaml:6: run\.args\.batch_size: --batch-size 0: must be at least 1"),
        ("[--data, x, --epochs=many]", r"job\.yaml:6: run\.args\.2: --epochs: invalid int value: 'many'"),
        ("{epochs: 2}", r"job\.yaml:6: run\.args: --data: required"),
    ],
)
def test_the_trainers_options_are_checked_before_the_start(tmp_path: Path, args: str, says: str) -> None:
    given = job("train", f"  args: {args}\n")
    with pytest.raises(JobInvalid, match=says):
        check_options(given, tmp_path, ROOT / "train", print)
    check_options(given, fill(tmp_path, "train/__main__.py"), None, print)  # another trainer, of the user


@pytest.mark.parametrize(
    ("args", "more", "says"),
    [
        (
            "{data: x, parallel: fsdp, compile: true, compile_mode: max-autotune}",
            "",
            r"job\.yaml:6: run\.args\.parallel: --parallel fsdp with --compile-mode max-autotune: a CUDA graph",
        ),
        ("{data: x, parallel: hsdp}", "", r"run\.args\.parallel: --parallel hsdp needs two or more nodes"),
        ("{data: x, parallel: fsdp}", "gpus: none\n", r"shards the weights over processes; start two or more"),
        ("{data: x, parallel: fsdp}", "processes: 2\n", ""),
        ("{data: x, parallel: fsdp}", "", ""),  # the machine's GPUs decide
        ("{data: x, parallel: single}", "gpus: 2\n", r"--parallel single runs one process, not 2"),
        ("{data: x, compile: true, compile_mode: max-autotune}", "min_nodes: 1\n", r"with the job's min_nodes: a CUDA"),
        ("{data: x, parallel: fsdp}", "sweep: [{lr: 1}, {optimizer: lars}]\n", r"does not support --optimizer lars"),
    ],
)
def test_options_that_exclude_each_other_are_refused_before_the_start(
    tmp_path: Path, args: str, more: str, says: str
) -> None:
    given = job("train", f"  args: {args}\n{more}")
    with pytest.raises(JobInvalid, match=says) if says else nullcontext():
        check_options(given, tmp_path, ROOT / "train", print)


def test_a_variant_that_is_added_to_a_pools_sweep_runs_on_few_of_its_machines(tmp_path: Path) -> None:
    """`up --into` has the job's pool, and no sweep."""
    pool = {"name": "p", "image": {"ref": "x:1"}, "gpus": "none", "nodes": {"pool": ["a", "b"], "each": 1}}
    run = {"module": "train", "args": {"data": "x", "parallel": "single"}}
    given = job_from({**pool, "run": run, "sweep": [{"lr": 1}]}).model_copy(update={"sweep": ()})
    check_options(given, tmp_path, ROOT / "train", print)


def test_the_trainers_options_are_those_of_each_variant(tmp_path: Path) -> None:
    variants = job("train", "sweep: [{data: x}, {data: y, lr: 0}]\n")
    with pytest.raises(JobInvalid, match=r"job\.yaml:6: sweep\.1\.lr: --lr 0\.0: must be greater than 0"):
        check_options(variants, tmp_path, ROOT / "train", print)
    check_options(job("train", "  args: [pack, data, out]\n"), tmp_path, ROOT / "train", print)
    check_options(job("train", "  args: {data: x, arch: 'no.such.module:build'}\n"), tmp_path, ROOT / "train", print)


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        (trainer, "CHECK_TIMEOUT", 0.0, "the check took longer than 0 s"),
        (sys, "executable", "/bin/sh/python", "/bin/sh/python: Not a directory"),
        (sys, "executable", shutil.which("false"), "exit code 1"),
    ],
)
def test_a_check_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any, why: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(where, name, value)
    check_options(job("train", "sweep: [{lr: 0}, {lr: 0, epochs: 1}]\n"), tmp_path, ROOT / "train", lines.append)
    assert lines == [f"warning: the trainer's options were not checked: {why}"]


def test_the_trainers_options_are_checked_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")
    for path in ("numpy", "PIL", "torchvision"):
        (tmp_path / f"{path}.py").write_text("raise ImportError")
    command = [sys.executable, "-m", "train", "--check", "--data", "x"]
    given = {"PYTHONPATH": str(tmp_path)}
    assert subprocess.run(command, cwd=ROOT, env=given, check=False, timeout=60).returncode == 0
    refused = [*command, "--batchsize", "8"]
    done = subprocess.run(refused, cwd=ROOT, env=given, check=False, timeout=60, capture_output=True, text=True)
    assert done.stderr == "train: error: --batchsize: no such option; closest: --batch-size\n"


def test_code_and_trainer_have_a_digest_each(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "one", "a"), fill(tmp_path / "two", "b")
    lines: list[str] = []

    def packed(module: str, folder: Path) -> str:
        return pack(list_code(job(module), folder, lines.append), lines.append).digest

    digests = [packed("train", folder) for folder in (one, two)]
    (first, added), (second, same) = (digest.split(" with train ") for digest in digests)
    assert first == packed("main", one) == snapshot(one).digest
    assert first != second
    assert added == same
    assert [line.partition(":")[0] for line in lines] == [*["using the launcher's trainer", "code"] * 2, "code"]


def left_out(folder: Path) -> dict[str, str]:
    found = LeftOut()
    list(code_files(folder, found))
    return {name: why for name, why in found.why.items() if name != ".git/"}


def git(folder: Path, *args: str) -> None:
    own = ("-c", "user.name=ada", "-c", "user.email=ada@localhost", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *own, *args], cwd=folder, check=True)


def repository(folder: Path, ignore: str, *tracked: str) -> Path:
    """A repository in which files that its .gitignore excludes are tracked nevertheless."""
    (fill(folder, *tracked) / ".gitignore").write_text(ignore)
    git(folder, "init", "-q")
    git(folder, "add", "-f", *tracked)
    return folder


def test_files_that_git_tracks_are_code_whatever_an_ignore_file_says(tmp_path: Path) -> None:
    repository(tmp_path, "data/\n*.log\n", "pkg/data/a/1.txt", "pkg/data/gone", "keep.log", "caf\u00e9 \n/x.log")
    (tmp_path / "pkg/data/gone").unlink()
    fill(tmp_path, "pkg/data/untracked", "pkg/data/a/2.txt", "pkg/data/b/3.txt", "data/4.txt", "b.log", "new.py")
    sent = {".gitignore", "pkg/data/a/1.txt", "keep.log", "caf\u00e9 \n/x.log", "new.py"}
    assert names(tmp_path) == sent
    excluded = ("pkg/data/untracked", "pkg/data/a/2.txt", "pkg/data/b/", "data/")
    assert left_out(tmp_path) == dict.fromkeys(excluded, "excluded by .gitignore:1") | {
        "b.log": "excluded by .gitignore:2"
    }
    git(tmp_path, "-c", "commit.gpgsign=false", "commit", "-qm", "x")
    git(tmp_path, "worktree", "add", "-q", tmp_path.with_name("tree"))
    assert names(tmp_path.with_name("tree")) == (sent | {"pkg/data/gone"}) - {"new.py", ".gitignore"}


def test_git_is_asked_in_subfolders_and_submodules(tmp_path: Path) -> None:
    module = repository(tmp_path / "module", "build/\n", "build/kernel.cu")
    git(module, "commit", "-qm", "x")
    top = repository(tmp_path / "top", "*.txt\nvendor/\n", "pkg/a.txt")
    git(top, "submodule", "add", "-f", str(module), "vendor/module")
    fill(top, "pkg/b.txt", "vendor/other")
    assert names(top / "pkg") == {"a.txt", "b.txt"}  # .gitignore of a folder above does not apply to `code: pkg`
    assert names(top) == {".gitignore", ".gitmodules", "pkg/a.txt", "vendor/module/build/kernel.cu"}


@pytest.fixture(autouse=True)
def no_settings_of_git(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder with git's settings, empty."""
    config = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config / "gitconfig"))
    (config / "git").mkdir()
    return config / "git"


def test_what_gits_own_lists_exclude_is_no_code_unless_git_tracks_it(tmp_path: Path, no_settings_of_git: Path) -> None:
    """Their patterns count from the top of the repository, and the ignore files of its folders decide before them."""
    top = repository(tmp_path / "top", "!kept.log\n", "main.py", "sub/a.ckpt", "sub/main.py")
    (top / ".git/info/exclude").write_text("customers.csv\n/sub/notes/\n")
    (no_settings_of_git / "ignore").write_text("# mine\n*.ckpt\n*.log\n")
    fill(top, "customers.csv", "sub/customers.csv", "sub/notes/x", "notes/x", "b.ckpt", "sub/b.ckpt", "kept.log")
    assert names(top) == {".gitignore", "main.py", "sub/a.ckpt", "sub/main.py", "notes/x", "kept.log"}
    local, mine = "excluded by .git/info/exclude", f"excluded by {no_settings_of_git / 'ignore'}"
    assert left_out(top) == {
        "b.ckpt": f"{mine}:2",
        "customers.csv": f"{local}:1",
        "sub/b.ckpt": f"{mine}:2",
        "sub/customers.csv": f"{local}:1",
        "sub/notes/": f"{local}:2",
    }
    assert names(top / "sub") == {"a.ckpt", "main.py"}
    assert left_out(top / "sub")["notes/"] == f"excluded by {top}/.git/info/exclude:2"
    git(top, "-c", "commit.gpgsign=false", "commit", "-qm", "x")
    git(top, "worktree", "add", "-q", tmp_path / "tree")
    assert names(fill(tmp_path / "tree", "customers.csv", "b.log")) == {"main.py", "sub/a.ckpt", "sub/main.py"}
    outer = fill(tmp_path / "outer", "main.py", "b.ckpt")  # no repository, with one in it
    top.rename(outer / "top")
    assert names(outer) == {"main.py", "b.ckpt", *(f"top/{name}" for name in names(outer / "top"))}


@pytest.mark.parametrize("name", ["~/lists/mine", "lists/mine", ""])
def test_the_list_that_gits_settings_name(
    tmp_path: Path, no_settings_of_git: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (no_settings_of_git / "ignore").write_text("*.default\n")
    top = repository(tmp_path / "top", "", "main.py")
    for root in (tmp_path, top):
        (fill(root, "lists/mine") / "lists/mine").write_text("*.mine\n")
    git(top, "config", "core.excludesFile", name)
    fill(top, "x.default", "sub/x.mine")
    assert ("sub/x.mine" not in names(top), "x.default" in names(top)) == (name != "", True)
    assert not name or left_out(top)["sub/x.mine"] == f"excluded by {name}:1"


def test_the_line_that_leaves_nothing_is_named(tmp_path: Path) -> None:
    top = repository(tmp_path / "top", "", "main.py")
    (top / ".git/info/exclude").write_text("\nscratch/\n")
    _, lines = packed(fill(top / "scratch", "job.py", "data/x"))
    assert lines[-2:] == [
        f"code: 0 files, 0 B, 2 left out by {top}/.git/info/exclude",
        f"warning: no file of {top}/scratch is sent: {top}/.git/info/exclude:2 excludes data/, job.py",
    ]


def test_virtual_environments_are_left_out_and_named(tmp_path: Path) -> None:
    repository(tmp_path, "", "tracked/pyvenv.cfg", "tracked/main.py")
    fill(tmp_path, "main.py", "venv/pyvenv.cfg", "venv/lib/x.py", "sub/env/conda-meta/history", "sub/env/bin/python")
    fill(tmp_path, "sent/pyvenv.cfg", "tracked/lib/x.py", ".dockerignore")
    (tmp_path / ".dockerignore").write_text("!sent/\n")
    (tmp_path / "link").symlink_to("venv")
    sent, lines = packed(tmp_path)
    assert sent == {
        ".dockerignore",
        ".gitignore",
        "main.py",
        "sent/pyvenv.cfg",
        "tracked/pyvenv.cfg",
        "tracked/main.py",
    }
    assert lines[-1] == "left out of the code, as virtual environments: link, venv/, sub/env/, tracked/lib/"
    assert left_out(tmp_path) == {
        **dict.fromkeys(("link", "venv/", "sub/env/", "tracked/lib/"), ENVIRONMENT),
        "sub/": EMPTY,
    }


def test_archives_of_launcher_report_are_left_out_and_named(tmp_path: Path) -> None:
    report, unfinished = "launcher-report-night-20261128-200000-bbbb.tar.gz", ".launcher-report-ab_12cd9"
    repository(tmp_path, "", "tests/launcher-report-old.tar.gz")
    fill(tmp_path, "main.py", report, unfinished, "sub/launcher-report-1.tar.gz", "launcher-report-mine.tar.gz")
    (tmp_path / ".dockerignore").write_text("!launcher-report-mine.tar.gz\n")
    sent, lines = packed(tmp_path)
    kept = {"main.py", "launcher-report-mine.tar.gz", "tests/launcher-report-old.tar.gz"}
    assert sent == {".dockerignore", ".gitignore", *kept}
    out = f"{unfinished}, {report}, sub/launcher-report-1.tar.gz"
    assert lines[-1] == f"left out of the code, as archives of launcher report: {out}"


def test_dockerignore_excludes_tracked_files_too(tmp_path: Path) -> None:
    repository(tmp_path, "*.bin\n", "a.bin", "data/b.bin", "data/c.bin")
    (tmp_path / ".dockerignore").write_text("# large\n\ndata/b.bin\n")
    assert names(tmp_path) == {".gitignore", ".dockerignore", "a.bin", "data/c.bin"}
    assert left_out(tmp_path) == {"data/b.bin": "excluded by .dockerignore:3"}


def test_without_a_usable_git_the_patterns_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, "*.bin\n", "a.bin")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "of a hook"))
    assert "a.bin" in names(tmp_path)
    (tmp_path / ".git" / "index").write_text("damaged")
    lines: list[str] = []
    pack(list_code(job("main"), tmp_path, lines.append), lines.append)
    assert any(".gitignore excludes files even if git tracks them" in line and "index" in line for line in lines)
    monkeypatch.setenv("PATH", "/none")
    assert names(tmp_path) == {".gitignore"}
    assert any("as git cannot list them: there is no program git" in line for line in packed(tmp_path)[1])


def test_the_reason_is_the_line_of_the_ignore_file(tmp_path: Path) -> None:
    fill(tmp_path, "a.o", "sub/b.o", "sub/c.o", "runs/r/log", "logs/x.o", "kept/.gitkeep")
    (tmp_path / "none").mkdir()
    (tmp_path / ".gitignore").write_text("\ufeff# built\r\n\r\n*.o\r\nruns\r\n", encoding="utf-8")
    (tmp_path / "sub" / ".gitignore").write_text("!c.o\nb.*\n")
    assert left_out(tmp_path) == {
        "runs/": NEVER,
        "a.o": "excluded by .gitignore:3",
        "logs/x.o": "excluded by .gitignore:3",
        "logs/": EMPTY,
        "none/": EMPTY,
        "sub/b.o": "excluded by sub/.gitignore:2",
    }


def test_a_link_to_run_records_or_an_environment_on_another_disk_is_no_code(tmp_path: Path) -> None:
    fill(tmp_path, "code/main.py", "disk/runs/r/log", "disk/venv/bin/python")
    (tmp_path / "code" / "runs").symlink_to(tmp_path / "disk" / "runs")
    (tmp_path / "code" / ".venv").symlink_to("../disk/venv")
    assert left_out(tmp_path / "code") == {"runs": NEVER, ".venv": NEVER}
    assert list_code(job("main", "", DOCKER_HEAD), tmp_path / "code", print)


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n-----END OPENSSH PRIVATE KEY-----\n"
SECRETS = {
    ".env": "A=1",
    "conf/.env.production": "A=1",
    ".netrc": "machine",
    "home/.aws/credentials": "[default]",
    ".config/gcloud/application_default_credentials.json": "{}",
    ".huggingface/token": "hf",
    ".kube/config": "x",
    ".docker/config.json": "{}",
    "kaggle.json": "{}",
    ".git-credentials": "x",
    ".pypirc": "x",
    ".npmrc": "//npm.example.org/:_authToken=x\n",
    "id_ed25519": "x",
    "win.PPK": "x",
    "keys/deploy": KEY,
    "keys/note.txt": f"# for the robots\n\n{KEY}",
    "both.pem": f"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n{KEY}",
    "text.pem": f"Private-Key: (2048 bit)\n{KEY}",
    "putty": "PuTTY-User-Key-File-3: ssh-ed25519\n",
    "gcp-1234.json": '{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----\\nx"}',
}
PUBLIC = {
    ".env.example": "A=",
    "id_ed25519.pub": "ssh-ed25519 AAAA",
    "cert.pem": "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n",
    "known.key": "-----BEGIN PUBLIC KEY-----\nx\n",
    "sub/.npmrc": "save-exact=true\n",
    "test_keys.py": f'KEY = """\\\n{KEY}"""\n',
    "README.md": f"Do not commit such files:\n{KEY}",
    "env.py": "x",
    "config.json": '{"private_key": "/run/secrets/key"}',
    "aws/credentials": "x",
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in fill(folder, *files) and files.items():
        (folder / name).write_text(text)


def packed(folder: Path, text: str = "") -> tuple[set[str], list[str]]:
    """The names in the archive, and the messages."""
    lines: list[str] = []
    made = pack(list_code(job("main", text), folder, lines.append), lines.append)
    with tarfile.open(fileobj=io.BytesIO(made.archive)) as tar:
        return set(tar.getnames()), lines


def test_private_keys_and_credential_files_are_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, SECRETS | PUBLIC)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".env").symlink_to("/somewhere/.env")
    sent, lines = packed(tmp_path)
    assert sent == set(PUBLIC)
    [said] = [line for line in lines if CREDENTIALS in line]
    assert "`secrets`" in said
    assert "to .dockerignore" in said
    named = said.partition("credentials: ")[2].partition(";")[0]
    assert named.endswith(" and 1 more")
    assert set(named.removesuffix(" and 1 more").split(", ")) < {*SECRETS, "linked/.env"}


def test_a_line_in_dockerignore_sends_a_credential_file(tmp_path: Path) -> None:
    """The line has the file's name, or its path: `!*.json` in a list of what is code is no such wish."""
    write(tmp_path, {".env": "A=1", "a/.env": "A=2", "keys/deploy": KEY, "kaggle.json": "{}", ".gitignore": ".env\n"})
    (tmp_path / ".dockerignore").write_text("!/.env\n!deploy\n!*.json\n")
    sent, _ = packed(tmp_path)
    assert sent == {".env", "keys/deploy", ".gitignore", ".dockerignore"}


def test_the_files_of_the_jobs_secrets_are_not_sent(tmp_path: Path) -> None:
    fill(tmp_path, "main.py", "token.txt")
    sent, lines = packed(tmp_path, f"secrets: [{{A: {tmp_path}/token.txt}}]\n")
    assert sent == {"main.py"}
    assert "token.txt" in lines[-1]


def test_one_line_says_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "main.py", "data/1", "data/2", "a.log", "b.log", "sub/c")
    assert packed(tmp_path)[1] == ["code: 6 files, 34 B"]
    (tmp_path / ".gitignore").write_text("data\n*.log\n")
    (tmp_path / "sub" / ".gitignore").write_text("c\n")
    (tmp_path / ".dockerignore").write_text("b.log\n")
    (tmp_path / "link").symlink_to("main.py")
    (tmp_path / "model").write_bytes(b"x" * 200_000)
    said = "code: 5 files, 200 kB, 1 left out by .dockerignore, 3 left out by .gitignore, 1 link"
    assert packed(tmp_path)[1] == [said]
    monkeypatch.setattr(snapshots, "LARGE", 100_000)
    (line,) = packed(tmp_path)[1]
    assert line.startswith(f"{said}; the largest: model (200 kB), ")


def test_checkpoints_in_the_code_are_named_unless_git_tracks_them(tmp_path: Path) -> None:
    tracked = ["weights/init.pt", "utils/checkpoint.py"]
    fill(repository(tmp_path, "", *tracked), *tracked, "last.ckpt", "lib/checkpointing.py", "checkpoints/1", "a.pt.txt")
    assert packed(tmp_path)[1] == ["code: 7 files, 84 B, with last.ckpt, checkpoints/1, from which a program may start"]
    fill(tmp_path, "a.pth", "b.safetensors")
    assert "with a.pth, b.safetensors, last.ckpt and 1 more, from which" in packed(tmp_path)[1][0]


def test_a_script_that_would_not_be_sent_is_refused(tmp_path: Path) -> None:
    (fill(tmp_path, "build/main.py", "main.py") / ".gitignore").write_text("build/\n")
    found = parse_job(f"{HEAD}run: {{script: build/main.py}}\n")
    with pytest.raises(JobInvalid, match=r"run\.script: .* build/ is left out \(excluded by \.gitignore:1\)"):
        list_code(found, tmp_path, print)
    assert list_code(parse_job(f"{HEAD}run: {{script: main.py}}\n"), tmp_path, print)


OUTSIDE = {
    "common": "../shared/common",
    "sub/up": "../../shared/common",
    "host": "HERE/shared/common",
    "ignored": "data/weights",
    "chained": "common/x",
    "parent": "..",
    "runs-link": "runs/old",
}
INSIDE = {
    "a": "lib",
    "sub/b": "../lib/x",
    "through": "a/x",
    "itself": ".",
    "mounted": "/data/imagenet/train",
    "relative": "../../data/imagenet",
    "above": "/data",
    "out": "/output/checkpoints",
    "device": "/dev/null",
    "container": "/workspace/code/lib",
    "set": "/sets/b",
}


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A code folder beside a shared one."""
    project = fill(tmp_path, "shared/common/x", "project/lib/x", "project/data/weights", "project/runs/old") / "project"
    (project / "sub").mkdir()
    (project / ".gitignore").write_text("data/\n")
    return project


DOCKER = "mounts: {/data/imagenet: /data/imagenet:ro}\ndata: {b: {from: gpu-b:/sets, at: /sets}}\n"


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_link_to_what_is_not_sent_is_refused_by_name(linked: Path, name: str) -> None:
    for each in {name, "common"} if name == "chained" else {name}:
        (linked / each).symlink_to(OUTSIDE[each].replace("HERE", str(linked.parent)))
    with pytest.raises(JobInvalid) as caught:
        list_code(job("main", DOCKER, DOCKER_HEAD), linked, print)
    said = str(caught.value)
    assert f"code: the link {name} -> " in said
    assert "or list the link in .dockerignore" in said
    assert ("excluded by .gitignore:1" in said) == (name == "ignored")
    (linked / ".dockerignore").write_text(f"{name}\ncommon\n")
    assert list_code(job("main", DOCKER, DOCKER_HEAD), linked, print)


def test_links_within_the_code_and_below_mounts_are_sent(linked: Path) -> None:
    for name, target in INSIDE.items():
        (linked / name).symlink_to(target)
    assert list_code(job("main", DOCKER, DOCKER_HEAD), linked, print).broken == []


def test_links_that_lead_nowhere_here_are_named_and_sent(linked: Path) -> None:
    for name, target in {".#lock": "ada@host.1:2", "bin/tool": "../gone/tool", "loop": "loop"}.items():
        (linked / name).parent.mkdir(exist_ok=True)
        (linked / name).symlink_to(target)
    sent, lines = packed(linked)
    assert {".#lock", "bin/tool", "loop"} <= sent
    assert lines[-1] == "links in the code that lead nowhere: .#lock, loop, bin/tool"


def test_an_absolute_link_into_the_code_has_to_be_relative(linked: Path) -> None:
    (linked / "sub" / "link").symlink_to(linked / "lib" / "x")
    with pytest.raises(JobInvalid, match=rf"run: ln -sfn \.\./lib/x {linked}/sub/link"):
        list_code(job("main", DOCKER, DOCKER_HEAD), linked, print)
    subprocess.run(["ln", "-sfn", "../lib/x", linked / "sub" / "link"], check=True)
    assert list_code(job("main", DOCKER, DOCKER_HEAD), linked, print)


def test_plain_processes_see_absolute_paths(linked: Path) -> None:
    (linked / "link").symlink_to(linked.parent / "shared")
    assert list_code(job("main"), linked, print)
    (linked / "relative").symlink_to("../shared")
    with pytest.raises(JobInvalid, match=r"the link relative -> \.\./shared leads out of the code"):
        list_code(job("main"), linked, print)
