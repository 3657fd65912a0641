"""Files on this machine that a job refers to must exist before anything starts; secret files must be private."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from launcher.errors import JobInvalid
from launcher.job.dump import dump_job
from launcher.job.files import check_files, read_secrets
from launcher.job.loader import load_job
from launcher.job.models import Job

HEAD = "name: job\nruntime: process\nnodes: [local]\n"


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "main.py").write_text("print(1)\n")
    (tmp_path / "other.py").write_text("print(2)\n")
    return tmp_path


def job(cwd: Path, rest: str, head: str = HEAD) -> Job:
    (cwd / "job.yaml").write_text(head + rest)
    return load_job(cwd / "job.yaml")


def refused(job: Job, cwd: Path, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(JobInvalid) as caught:
        check_files(job, cwd, environ or {})
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{cwd}/", "").splitlines()


def test_all_files_present(cwd: Path) -> None:
    found = job(cwd, f"code: code\nrun: {{script: code/main.py}}\nmounts: {{{cwd}: {cwd}}}\nsecrets: [A]\n")
    check_files(found, cwd, {"A": "x" * 4})


def test_all_missing_files_are_reported_at_once_with_their_lines(cwd: Path) -> None:
    text = "code: cod\nrun: {script: code/main.p}\nmounts: {/none/such: /none/such}\nsecrets: [NONE_SUCH]\n"
    assert refused(job(cwd, text), cwd) == [
        "job.yaml:4: code: no such folder: cod; relative paths are relative to the working directory",
        "job.yaml:5: run.script: no such file: code/main.p; relative paths are relative to the working directory",
        "job.yaml:6: mounts./none/such: /none/such does not exist on this machine, which is a node",
        "job.yaml:7: secrets.0: NONE_SUCH is not set in your environment; export it, or give {NAME: file}",
    ]


def test_a_script_named_from_the_code_folder_gets_a_hint(cwd: Path) -> None:
    (said,) = refused(job(cwd, "code: code\nrun: {script: main.py}\n"), cwd)
    assert said.endswith("did you mean code/main.py?")


def test_a_script_outside_the_code_folder(cwd: Path) -> None:
    (said,) = refused(job(cwd, "code: code\nrun: {script: other.py}\n"), cwd)
    assert said.startswith("job.yaml:5: run.script: is outside the code folder")
    assert said.endswith("; see `code`")


def test_another_code_folder_does_not_move_the_script(cwd: Path) -> None:
    (cwd / "code" / "other.py").touch()
    (cwd / "job.yaml").write_text(HEAD + "run: {script: other.py}\n")
    (said,) = refused(load_job(cwd / "job.yaml", ["code=code"]), cwd)
    assert said.endswith("copied to the nodes; did you mean code/other.py?")


@pytest.mark.parametrize(
    ("command", "text", "refuses"),
    [
        ("[bash, go.sh]", "set -e\r\npython main.py\r\n", True),
        ("[./go.sh, --lr, 1]", "#!/bin/sh\r\necho\r\n", True),
        ("[./go.sh]", "#!/bin/sh\necho\n", False),
        ("[python3, main.py]", "print(1)\r\n", False),  # Python reads them
    ],
)
def test_a_shell_script_with_windows_line_endings(cwd: Path, command: str, text: str, *, refuses: bool) -> None:
    for name in ("go.sh", "main.py"):
        (cwd / "code" / name).write_bytes(text.encode())
    found = job(cwd, f"code: code\nrun: {{command: {command}}}\n")
    if refuses:
        (said,) = refused(found, cwd)
        assert said.startswith("job.yaml:5: run.command: ")
        assert said.endswith(
            "go.sh has Windows line endings (CRLF), with which shells cannot run it; convert it: "
            "sed -i 's/\\r$//' code/go.sh"
        )
    else:
        check_files(found, cwd, {})


def test_a_folder_as_script_and_a_file_as_code(cwd: Path) -> None:
    said = refused(job(cwd, "code: other.py\nrun: {script: code}\n"), cwd)
    assert said[0].startswith("job.yaml:4: code: is a file; expected a folder")
    assert said[1].startswith("job.yaml:5: run.script: not a regular file")


def test_an_override_is_named_instead_of_a_line(cwd: Path) -> None:
    (cwd / "job.yaml").write_text(HEAD + "run: {module: train}\n")
    (said,) = refused(load_job(cwd / "job.yaml", ["code=nowhere"]), cwd)
    assert said.startswith("--set code=nowhere: code: no such folder")


def test_mounts_on_other_machines_are_not_checked_here(cwd: Path) -> None:
    docker = "name: job\nimage: {ref: img}\nnodes: [a]\n"
    check_files(job(cwd, "run: {module: train}\nmounts: {/none/such: /data}\n", docker), cwd, {})


def test_mounts_on_this_machine_under_docker_are_checked(cwd: Path) -> None:
    docker = "name: job\nimage: {ref: img}\nnodes: [a, local]\n"
    (said,) = refused(job(cwd, "run: {module: train}\nmounts: {/none/such: /data}\n", docker), cwd)
    assert said.startswith("job.yaml:5: mounts./none/such")


def test_secrets_are_read_from_the_environment_and_from_files(cwd: Path) -> None:
    secret = cwd / "token"
    secret.write_text("s3cret-ü\n", encoding="utf-8")
    secret.chmod(0o600)
    found = job(cwd, "run: {module: train}\nsecrets: [A, {B: token}]\n")
    check_files(found, cwd, {"A": "x yz"})
    assert read_secrets(found, cwd, {"A": "x yz"}) == {"A": "x yz", "B": "s3cret-ü"}
    assert "s3cret" not in dump_job(found) + repr(found)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_may_read_is_refused_with_a_fix(cwd: Path, mode: int) -> None:
    (cwd / "my key").write_text("s3cret")
    (cwd / "my key").chmod(mode)
    found = job(cwd, "run: {module: train}\nsecrets: [{B: my key}]\n")
    (said,) = refused(found, cwd)
    assert said == f"job.yaml:5: secrets.0: my key is readable by others (mode {mode:04o}); run: chmod 600 'my key'"
    with pytest.raises(JobInvalid):
        read_secrets(found, cwd, {})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no secret: it is empty"),
        (b"\n", "it is empty"),
        (b"\xff", "is not valid UTF-8"),
        (b"a\0b", "it is not text"),
    ],
)
def test_files_without_a_secret(cwd: Path, content: bytes, said: str) -> None:
    (cwd / "token").write_bytes(content)
    (cwd / "token").chmod(0o600)
    (line,) = refused(job(cwd, "run: {module: train}\nsecrets: [{B: token}]\n"), cwd)
    assert said in line
    assert "a\\x00b" not in line


def test_a_missing_secret_file_a_folder_and_a_pipe(cwd: Path) -> None:
    os.mkfifo(cwd / "pipe", 0o600)
    found = job(cwd, "run: {module: train}\nsecrets:\n  - {A: none}\n  - {B: code}\n  - {C: pipe}\n  - D\n  - E\n")
    said = refused(found, cwd, {"E": ""})
    assert [line.split(": ", 2)[2] for line in said] == [
        "no such file: none",
        "code cannot be read: Is a directory",
        "pipe is not a regular file",
        "D is not set in your environment; export it, or give {NAME: file}",
        "E is set in your environment, but empty; export it, or give {NAME: file}",
    ]


def test_a_secret_that_is_too_short_to_be_masked_is_refused(cwd: Path) -> None:
    (cwd / "pin").write_text("471\n")
    (cwd / "pin").chmod(0o600)
    found = job(cwd, "run: {module: train}\nsecrets: [A, B, {C: pin}]\n")
    said = refused(found, cwd, {"A": "4711", "B": "üüü"})
    what = "has fewer than 4 characters, and would not be masked; if others may see it, give it under env"
    assert said == [f"job.yaml:5: secrets.{index}: {name} {what}" for index, name in ((1, "B"), (2, "C"))]


def test_a_home_folder_and_what_contains_it_are_no_code(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = cwd / "homes" / "ada"
    (home / "proj").mkdir(parents=True)
    (cwd / "linked").symlink_to(home)
    (cwd / "to").symlink_to("homes")
    monkeypatch.setenv("HOME", str(cwd / "to" / "ada"))
    own = pwd.getpwuid(os.getuid()).pw_dir
    known = {"homes/ada": "is a", "linked": "is a", "homes": "contains a", ".": "contains a", "~": "is a", own: "is a"}
    for code, what in known.items():
        (said,) = refused(job(cwd, f"code: '{code}'\nrun: {{command: [ls]}}\n"), cwd)
        assert f"{what} home folder" in said
        assert "put the program in a folder of its own" in said
    (said,) = refused(job(cwd, "code: /\nrun: {command: [ls]}\n"), cwd)
    assert "/ is the root of the file system" in said
    check_files(job(cwd, "code: linked/proj\nrun: {command: [ls]}\n"), cwd, {})
