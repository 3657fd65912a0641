"""The entry point: exceptions that end the program without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from launcher.cli import main
from launcher.cli.commands import KEYS, Command, Group
from launcher.cli.main import COMMANDS, OTHER_NAMES
from launcher.errors import StoppedByUser
from launcher.job.models import Job

ROOT = Path(__file__).resolve().parents[2]


def test_ctrl_c_wrapped_in_a_librarys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise ValueError("Error building `model` serializer:\n  KeyboardInterrupt: ")

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == StoppedByUser.exit_code


def test_a_bug_is_one_message_with_instructions_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise ValueError("no such\x1b[2J thing")

    monkeypatch.setattr(main, "app", app)
    monkeypatch.setattr(sys, "argv", ["launcher", "runs"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "unexpected ValueError: no such\\x1b[2J thing (test_main.py:" in said
    assert "--debug" in said
    monkeypatch.setattr(sys, "argv", ["launcher", "--debug", "runs"])
    with pytest.raises(ValueError, match="no such"):
        main.main()


MESSAGE_AT_EXIT = """
import fcntl, os, sys, termios, threading, time
from launcher import __main__ as program
from launcher.cli import main, terminal

def end_while_a_message_is_written() -> None:
    threading.Thread(target=terminal.Reporter().log, args=("x" * 200_000,), daemon=True).start()
    capacity = fcntl.fcntl(2, 1032)  # F_GETPIPE_SZ
    while int.from_bytes(fcntl.ioctl(2, termios.FIONREAD, bytes(4)), sys.byteorder) < capacity:
        time.sleep(0.001)
    os.write(1, b"full")
    sys.exit(5)

main.app = end_while_a_message_is_written
program.main()
"""


def test_a_background_message_at_exit_is_complete_and_the_exit_code_stays() -> None:
    argv, pipe = [sys.executable, "-c", MESSAGE_AT_EXIT], subprocess.PIPE
    # Several at once: one that has both cores seldom ends between two writes.
    every = [subprocess.Popen(argv, stdout=pipe, stderr=pipe, cwd=ROOT) for _ in range(6)]
    for process in every:
        assert process.stdout
        assert process.stdout.read(4) == b"full"
    time.sleep(0.5)  # in which those that can end do
    for process in every:
        assert process.communicate(timeout=60) == (b"", b"launcher: " + 200_000 * b"x" + b"\n")
        assert process.returncode == 5


def test_a_file_of_this_machine_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(main, "app", lambda: open("/nowhere/at/all"))  # noqa: PTH123, SIM115
    monkeypatch.setattr(sys, "argv", ["launcher", "runs"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 3
    assert "this machine: No such file or directory: /nowhere/at/all" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["typer", "yaml"])
def test_ctrl_c_while_modules_load_has_the_exit_code_of_stopped(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    argv = [sys.executable, "-m", "launcher", "plan", "job.yaml", "--offline"]
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == StoppedByUser.exit_code, done.stderr
    assert done.stderr == "launcher: stopped; nothing was started\n"
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_up_loads_what_starts_runs_says_that_nothing_was_started(tmp_path: Path) -> None:
    (tmp_path / "pathspec.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    (tmp_path / "job.yaml").write_text("name: job\nruntime: process\nnodes: [local]\nrun: {command: ['true']}\n")
    argv, env = [sys.executable, "-m", "launcher", "up", "job.yaml"], {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == StoppedByUser.exit_code, done.stderr
    assert done.stderr == "launcher: stopped; nothing was started, and nothing remains on the nodes\n"


def test_ctrl_c_before_the_start_of_a_run_has_the_exit_code_of_stopped(tmp_path: Path) -> None:
    began = tmp_path / "began"
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n ProxyCommand touch {began} && exec sleep 60\n")
    job = tmp_path / "job.yaml"
    job.write_text("name: job\nimage: {ref: x}\nnodes: [silent]\nrun: {command: ['true']}\ncode: code\n")
    (tmp_path / "code").mkdir()
    argv = [sys.executable, "-m", "launcher", "up", "job.yaml", "--ssh-config", str(config)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    up = subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    while not began.exists():
        assert up.poll() is None, up.communicate()[1]
        time.sleep(0.05)
    up.send_signal(signal.SIGINT)
    messages = up.communicate(timeout=30)[1]
    assert up.returncode == StoppedByUser.exit_code, messages
    assert messages.splitlines()[-1] == "launcher: stopped; nothing was started, and nothing remains on the nodes"
    assert "Traceback" not in messages


def test_with_code_and_without_a_code_folder_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: a\nimage: {ref: x}\nnodes: [gpu-a]\ncode: gone\nrun: {module: x}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["launcher", "image", "build", str(job), "--with-code"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert f"{job}:4: code: no such folder: {tmp_path}/gone" in capsys.readouterr().err


def test_a_misspelt_command_is_corrected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["launcher", "stauts"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert "Did you mean 'status'?" in capsys.readouterr().err


ALL = ("a", "b", "a-20260102-120000-000c", "b-20260101-130000-000b", "b-20260101-125900-00bb", "a-20260101-120000-000a")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["logs", ""], [*ALL]),
        (["status", "a-20260102"], ["a-20260102-120000-000c"]),
        (["fetch", "b-"], ["b-20260101-130000-000b", "b-20260101-125900-00bb"]),  # the second is a sweep
        (["up", "job.yaml", "--nodes", "gpu-a,gpu"], ["gpu-a,gpu-b"]),
        (["stat"], ["status"]),
        (["doctor", "gpu"], ["gpu-a", "gpu-b"]),
        (["stauts", "stat"], ["status"]),  # as click does
    ],
)
def test_shell_completion(
    words: list[str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for run in ("a-20260101-120000-000a", "b-20260101-130000-000b", "a-20260102-120000-000c", "other"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    (tmp_path / "runs/.sweeps").mkdir()
    (tmp_path / "runs/.sweeps/b-20260101-125900-00bb.json").touch()
    (tmp_path / "config").write_text("Host gpu-a gpu-b other\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCHER_SSH_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("_LAUNCHER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["launcher", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    monkeypatch.setattr(sys, "argv", ["launcher"])
    with pytest.raises(SystemExit):
        main.app(prog_name="launcher")
    assert capsys.readouterr().out.split() == expected


def test_an_error_about_a_file_named_like_an_emoji(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["launcher", "up", "job:fire:.yaml"])
    with pytest.raises(SystemExit):
        main.main()
    assert "job:fire:.yaml" in capsys.readouterr().err


def every_command() -> Iterator[tuple[str, Any]]:
    yield "launcher", get_command(main.app)
    for name in main.COMMANDS:
        command = main.load(name)
        yield name, command
        yield from ((f"{name} {sub}", each) for sub, each in getattr(command, "commands", {}).items())


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag takes no value, and an example is a line that can be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, command in every_command():
        assert isinstance(command, (Command, Group)), name
        with pytest.raises(SystemExit) as ended:
            command(["--help"], prog_name=name)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "<bool>" not in shown
        assert max(map(len, shown.splitlines())) <= 80
        for line in (command.help or "").splitlines():
            assert "Example: " not in line or f" {line.strip()} " in shown


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("stop", "Did you mean 'down'? Stop a run and remove its containers"),
        ("kill", "Did you mean 'down'?"),
        ("ps", "Did you mean 'status'? Show the state"),
        ("ls", "Did you mean 'runs'?"),
        ("run", "Did you mean 'up'?"),
        ("job.yaml", "To start a job: launcher up job.yaml"),
        ("train.py", "a job file with `run: {script: train.py}`"),
        ("xyzzy", "The commands: launcher -h"),
    ],
)
def test_a_command_of_another_tool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    assert exit_code(monkeypatch, command, "x") == 2
    assert said in unwrapped(capsys.readouterr().err)


def exit_code(monkeypatch: pytest.MonkeyPatch, *argv: str) -> object:
    monkeypatch.setattr(sys, "argv", ["launcher", *argv])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code


def unwrapped(box: str) -> str:
    return " ".join(box.replace("│", " ").split())


def test_other_names_are_of_commands() -> None:
    assert set(OTHER_NAMES.values()) <= COMMANDS.keys()
    assert not set(OTHER_NAMES) & COMMANDS.keys()


@pytest.mark.parametrize(
    ("call", "first", "fix"),
    [
        ("up --lr 0.1", "--lr", "up JOB --set run.args.lr=0.1"),
        ("up -- --lr 0.1", "--lr", "up JOB --set run.args.lr=0.1"),
        ("up job.yaml -- --lr 0.1 --amp", "--lr", "up job.yaml --set run.args.lr=0.1 --set run.args.amp=true"),
        ("up --amp job.yaml", "--amp", "up job.yaml --set run.args.amp=true"),
        ("up job.yaml lr=0.1", "lr", "up job.yaml --set run.args.lr=0.1"),
        ("up job.yaml --batch_size=8", "--batch_size", "up job.yaml --set run.args.--batch_size=8"),
        ("up -d job.yaml -b 8", "-b", "up job.yaml --set run.args.-b=8"),
        ("up job.yaml --gpus 2 --hang-timeout 15m", "--gpus", "up job.yaml --set gpus=2 --set hang_timeout=15m"),
        ("up job.yaml --nproc_per_node=2", "--nproc_per_node", "up job.yaml --set processes=2"),
        ("plan job.yaml --offline --epochs 3", "--epochs", "plan job.yaml --set run.args.epochs=3"),
    ],
)
def test_an_option_that_is_not_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str, first: str, fix: str
) -> None:
    assert exit_code(monkeypatch, *call.split()) == 2
    said = capsys.readouterr().err
    assert f"{first} is not an option of this command" in said
    assert f"set it in the job: launcher {fix}\n" in said


def test_an_option_without_its_value_takes_no_other_option_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "up", "job.yaml", "--resume", "--set", "run.args.lr=1") == 2
    assert "launcher up: --resume has no value: --set follows it\n" in capsys.readouterr().err
    assert exit_code(monkeypatch, "up", "missing.yaml", "--resume", "job") == 2  # a run may be named like an argument
    assert "has no value" not in capsys.readouterr().err


@pytest.mark.parametrize("call", ["up job.yaml --detatch", "up --set", "up a.yaml b.yaml"])
def test_other_mistakes_are_typers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    assert exit_code(monkeypatch, *call.split()) == 2
    assert "is not an option of this command" not in capsys.readouterr().err


def test_the_keys_of_the_job_file_are_known_as_options() -> None:
    assert set(KEYS) == set(Job.model_fields)
